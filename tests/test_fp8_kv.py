"""K and V in 8 bits: what is stored, what the kernels make of it, and what it costs in accuracy.

Exactly what attention over such pools is, every backend's cases of test_attention.py say.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mosaic_interpreter import extended_interpreter
from test_attention import BACKENDS, EIGHT_BITS, GPUS, Case, attend, backend_called, make_batch, on_tensor_cores, oracle

from fastgen_jax.kernels import choose_backend, ragged_attention
from fastgen_jax.kernels.fp8 import FP8, LARGEST, to_stored
from fastgen_jax.kernels.mosaic_gpu_widen import conversion

BYTES = np.arange(256, dtype=np.uint8)


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    with extended_interpreter():
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_too_large_becomes_the_largest_and_what_is_no_number_stays_none(dtype: str):
    x = jnp.asarray([447, 448, 449, 464, 465, 500, 6e4, -464, -465, -6e4, 0, -0.0, 2.0**-9, 1e-9], dtype)
    stored = np.asarray(to_stored(x, FP8), np.float32)
    assert stored.tolist() == [*[LARGEST] * 7, *[-LARGEST] * 3, 0, 0, 2.0**-9, 0]
    assert np.isnan(np.asarray(to_stored(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf], dtype), FP8), np.float32)).all()


def test_a_scale_divides_before_anything_is_cut_off():
    x = jnp.asarray([1000.0, -4000.0, 0.001])
    assert np.asarray(to_stored(x, FP8, jnp.float32(10)), np.float32).tolist() == [96, -384, 0]
    assert np.asarray(to_stored(x[2:], FP8, jnp.float32(0.001)), np.float32).tolist() == [1]
    np.testing.assert_array_equal(to_stored(x, jnp.float32), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_kv_saturates_in_every_layout(backend: str):
    kv = backend_called(backend)
    pools = kv.allocate(2, 16, 1, 32, FP8)
    k = jnp.full((1, 1, 32), 1e4, jnp.bfloat16)
    scales = {"k_scale": jnp.float32(2), "v_scale": jnp.float32(100)}
    for pool, largest in zip(kv.write_kv(*pools, k, -k, jnp.asarray([16]), **scales), (448, -100), strict=True):
        found = np.asarray(pool, np.float32)
        assert pool.dtype == FP8 and (found[found != 0] == (448 if largest > 0 else -96)).all()
        assert np.count_nonzero(found) == 32


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_near_that_over_k_and_v_that_were_not_rounded(backend: str):
    rows = [(1, 300), (1, 700), (40, 400), (20, 200)]
    case = Case("near", rows, head_dim=64, block_size=64, kv_scales=(0.00937, 0.00911))
    case = on_tensor_cores(case) if backend in GPUS else case
    exact = oracle(case, make_batch(case._replace(kv_scales=None), backend))
    error = attend(case, make_batch(case, backend), backend) - exact
    assert 3e-3 < np.sqrt(np.mean(error**2)) <= 3e-2  # numbers with 3 bits of mantissa, of values around 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_key_or_value_that_is_no_number_is_seen(backend: str, which: int):
    case = Case("nan", [(1, 40), (3, 20)], head_dim=64, block_size=16, dtype="bfloat16", kv_scales=(1, 1))
    batch = make_batch(case, backend, 0.0)
    q, *pools, _, _, tables = batch.args
    kv = backend_called(backend)
    bad = [jnp.zeros((1, 2, 64)), jnp.zeros((1, 2, 64))]
    bad[which] = jnp.full((1, 2, 64), jnp.inf)
    pools = kv.write_kv(*pools, *bad, tables[0, :1] * 16 + 5, **batch.scales)
    out = attend(case, batch._replace(args=(q, *pools, *batch.args[3:])), backend)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()


def run_ptx(ptx: str, kind: np.dtype, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """$0 and $1 of the PTX of `conversion`, instruction by instruction, for uint32 words in $2."""
    registers = {"$2": word}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(word, int(name, 0))

    def pairs(x: np.ndarray) -> np.ndarray:
        return x.view(kind).astype(np.float64)

    def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        source = np.stack([a, b], axis=-1).view(np.uint8)
        out = np.zeros((*a.shape, 4), np.uint8)
        for i in range(4):
            nibble = int(selector[0]) >> 4 * i & 15
            byte = source[..., nibble & 7]
            out[..., i] = np.where(byte & 128, 255, 0) if nibble & 8 else byte
        return out.view(np.uint32)[..., 0]

    operations = {
        "mov.b32": lambda a: a,
        "and.b32": np.bitwise_and,
        "or.b32": np.bitwise_or,
        "add.u32": np.add,
        "shr.u32": np.right_shift,
        "prmt.b32": prmt,
        "fma.rn": lambda a, b, c: (pairs(a) * pairs(b) + pairs(c)).astype(kind).view(np.uint32),
    }
    for line in ptx.strip("{}\n").split(";\n"):
        name, _, operands = line.strip().rstrip(";").partition(" ")
        if name == ".reg":
            continue
        out, *given = (part.strip() for part in operands.split(","))
        registers[out] = operations[name if name in operations else name.rpartition(".")[0]](*map(value, given))
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_the_instructions_of_the_gpu_kernels_give_every_byte_its_number(dtype: str, kind: type):
    word = np.random.default_rng(0).permutation(np.tile(BYTES, 4)).view(np.uint32)
    low, high = (x.view(kind).reshape(-1, 2) for x in run_ptx(conversion(dtype), np.dtype(kind), word))
    found = np.concatenate([low, high], axis=1).reshape(-1).astype(np.float64)
    np.testing.assert_array_equal(found, word.view(np.uint8).view(FP8).astype(np.float64))


def test_backends_are_asked_about_the_pools_dtype_too():
    model = {"head_dim": 64, "num_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16"}
    assert choose_backend(**model, kv_dtype=FP8).NAME == "xla"
    for gpu in GPUS.values():
        assert gpu.supported(**model, block_size=64, platform="gpu", kv_dtype=FP8) is None
    odd = model | {"head_dim": 96, "block_size": 16}
    reason = "block_size=16 with head_dim=96 is not for K and V of 8 bits on a 8.0"
    assert GPUS["ampere"].supported(**odd, platform="gpu", kv_dtype=FP8) == reason
    assert GPUS["ampere"].supported(**odd, platform="gpu") is None
    assert GPUS["hopper"].supported(**odd, platform="gpu", kv_dtype=FP8) is None
    with pytest.raises(ValueError, match="kv_dtype is int8; it must be float8_e4m3fn or dtype, bfloat16"):
        choose_backend(**model, kv_dtype="int8")


BAD_SCALES = [
    ("float32", jnp.float32(1), "k_scale is for pools of float8_e4m3fn; these are float32"),
    (FP8, 1.0, "k_scale is 1.0; it must be an array, float32[]"),
    (FP8, jnp.ones(2), "k_scale is Array([1., 1.], dtype=float32); it must be an array, float32[]"),
]


@pytest.mark.parametrize(("dtype", "scale", "sentence"), BAD_SCALES)
def test_scales_that_do_not_fit_are_refused(dtype, scale, sentence: str):
    kv = backend_called("xla")
    pools, row = kv.allocate(2, 8, 2, 16, dtype), (jnp.asarray([0, 1]), jnp.asarray([1]), jnp.asarray([[1]]))
    with pytest.raises(ValueError) as error:
        ragged_attention(jnp.zeros((1, 4, 16)), *pools, *row, scale=1.0, k_scale=scale)
    assert str(error.value) == sentence


def test_scales_are_values_and_not_part_of_what_is_compiled():
    case = EIGHT_BITS[0]
    batch = make_batch(case, "xla")
    attention = jax.jit(lambda *args, **scales: backend_called("xla").ragged_attention(*args, scale=0.1, **scales))
    for scale in (1.0, 0.5, 2.0):
        attention(*batch.args, k_scale=jnp.float32(scale), v_scale=jnp.float32(scale))
    assert attention._cache_size() == 1
