"""Every attention backend against one dense float64 oracle, with NaN wherever no query may look.

The GPU kernels run in Mosaic GPU's interpreter, with race detection and every asynchronous operation as late as
the kernel's waits allow (mosaic_interpreter.py): the kernels that run here are those that ship.
"""

import doctest
import functools
import itertools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import extended_interpreter, interpret_params

from fastgen_jax import kernels
from fastgen_jax.kernels import Backend, choose_backend, get_backend, mosaic_gpu, ragged_attention, reference
from fastgen_jax.kernels.fp8 import FP8

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}  # of the result's scale

# Each GPU's kernels, on two SMs: thread blocks that have several work items, and rows that are split.
CAPABILITIES = {"hopper": (9, 0), "ampere": (8, 0), "blackwell": (10, 0)}
GPUS = {
    name: mosaic_gpu.MosaicGpu(mosaic_gpu.Target(capability, 2, mosaic_gpu.SMEM_BYTES[capability]), interpret_params())
    for name, capability in CAPABILITIES.items()
}
ANYWHERE = ["xla", "reference"]
BACKENDS = [*ANYWHERE, *GPUS]


def backend_called(name: str) -> Backend:
    return GPUS[name] if name in GPUS else get_backend(name)


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    with extended_interpreter():
        yield


@pytest.fixture(autouse=True)
def strict_shapes():
    with jax.numpy_rank_promotion("raise"):
        yield


class Case(NamedTuple):
    name: str
    rows: list[tuple[int, int]]  # (q_len, kv_len)
    heads: tuple[int, int] = (4, 2)  # H, K
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"
    pad_rows: int = 0
    pad_tokens: int = 0
    kv_scales: tuple[float, float] | None = None  # of pools of 8 bits


DECODES = [(1, 1), (1, 16), (1, 17), (1, 100), (1, 64), (1, 65), (1, 200)]
CHUNKS = [(37, 37), (70, 150), (2, 33), (16, 64), (16, 65)]  # the last two end at a block's end, and one past it
MIXED = DECODES + CHUNKS

LONG = [(1, 1100), (1, 30), (3, 1050), (1, 2048)]  # of which a decode is split where rows are split
FEW = [(1, 1), (1, 65), (3, 40), (70, 100), (2, 2)]
# dtype x D x G x block size x window x rows, each value with several of the others.
GPU_CASES = [
    Case("split", LONG, head_dim=64, block_size=64),
    Case("split, D 128, G 3", LONG, heads=(3, 1), head_dim=128, block_size=128, dtype="bfloat16", pad_rows=2),
    Case("split, window", LONG, heads=(2, 2), window=1030, block_size=32, dtype="bfloat16"),
    Case("split, softcap, G 16", [(1, 1100)], heads=(16, 1), head_dim=64, softcap=3.0, dtype="float16"),
    Case("D 64, MHA", FEW, heads=(2, 2), head_dim=64, block_size=32, dtype="bfloat16"),
    Case("D 96, MHA", FEW, heads=(2, 2), head_dim=96, block_size=128, dtype="float16"),
    Case("D 128, MHA", FEW, heads=(2, 2), head_dim=128, block_size=32, dtype="float16", window=33),
    Case("D 256, MHA", FEW, heads=(1, 1), head_dim=256, block_size=64, dtype="bfloat16"),
    Case("D 80, G 5", FEW, heads=(5, 1), head_dim=80, block_size=64, dtype="bfloat16", softcap=4.0),
    Case("D 96, G 6", FEW, heads=(6, 1), head_dim=96, dtype="bfloat16", window=20),
    Case("D 256, G 3", FEW, heads=(3, 1), head_dim=256, block_size=32, dtype="float16", window=50),
    Case("D 256, G 8", FEW, heads=(8, 1), head_dim=256, block_size=128, dtype="bfloat16", softcap=6.0),
    Case("D 64, G 7", FEW, heads=(7, 1), head_dim=64, block_size=64, dtype="bfloat16"),
    Case("D 128, G 16", FEW, heads=(16, 1), head_dim=128, block_size=16, dtype="bfloat16", pad_tokens=3),
    Case("D 64, G 17, two KV heads", [(1, 65), (3, 40)], heads=(34, 2), head_dim=64, dtype="bfloat16", window=30),
    Case("D 64, G 2, two KV heads", FEW, heads=(4, 2), head_dim=64, block_size=128, dtype="float16", window=5),
    Case("a tile beside a window", [(140, 300)], heads=(1, 1), head_dim=64, block_size=64, window=40),
]

EIGHT_BITS = [
    Case("8 bits", MIXED, heads=(9, 3), head_dim=64, pad_rows=3, pad_tokens=20, kv_scales=(1, 1)),
    Case("8 bits, split", LONG, heads=(3, 1), head_dim=64, block_size=64, kv_scales=(0.02171, 3.137)),
    Case("8 bits, D 128, G 8", FEW, heads=(8, 1), head_dim=128, dtype="bfloat16", kv_scales=(0.01137, 0.5)),
    Case("8 bits, window, softcap", FEW, head_dim=80, window=20, block_size=64, softcap=4.0, kv_scales=(0.5, 0.25)),
    Case(
        "8 bits, float16", FEW, heads=(2, 2), head_dim=96, block_size=32, dtype="float16", kv_scales=(0.03171, 0.01137)
    ),
    Case("8 bits, G 17", [(1, 65), (3, 40)], heads=(34, 2), head_dim=64, dtype="bfloat16", kv_scales=(0.02171, 3.137)),
    Case("8 bits, D 256", FEW, heads=(3, 1), head_dim=256, block_size=128, window=50, kv_scales=(0.5, 2)),
]

CASES = [
    Case("one token of one sequence", [(1, 1)]),
    Case("prompt of two tokens", [(2, 2)]),
    Case("whole prompt", [(150, 150)], head_dim=64, block_size=64),
    Case("chunk with context", [(50, 333)]),
    Case("decodes, padded", DECODES, pad_rows=5, pad_tokens=9),
    Case("mixed, padded", MIXED, pad_rows=3, pad_tokens=20),
    Case("prompts before decodes", [(5, 5), (1, 30), (66, 90), (1, 7)], pad_rows=2, pad_tokens=4),
    Case("only padding", [], pad_rows=3, pad_tokens=8),
    Case("blocks of one token", MIXED, block_size=1),
    Case("blocks of 64", MIXED, heads=(9, 3), head_dim=64, block_size=64),
    Case("MHA, D 80", MIXED, heads=(3, 3), head_dim=80, block_size=64),
    Case("G 4, D 128", MIXED, heads=(8, 2), head_dim=128),
    Case("MQA of 8", MIXED, heads=(8, 1), block_size=64),
    Case("window", MIXED, window=60),
    Case("window less than a block", MIXED, window=7, block_size=64),
    Case("window of one key", MIXED, window=1),
    Case("softcap", MIXED, softcap=2.0),
    Case("window and softcap", MIXED, heads=(8, 1), window=20, softcap=5.0, pad_rows=1, pad_tokens=1),
    *GPU_CASES,
    *EIGHT_BITS,
    Case("bfloat16", MIXED, heads=(9, 3), head_dim=64, dtype="bfloat16", pad_rows=3, pad_tokens=20),
    Case("float16", MIXED, heads=(4, 4), head_dim=80, dtype="float16", window=40),
]


class Batch(NamedTuple):
    """Arguments of `ragged_attention`, and the dense K and V of each row behind them, as the pools have them."""

    args: tuple[jax.Array, ...]
    scales: dict[str, jax.Array]
    keys: list[np.ndarray]  # [kv_len, K, D] per row
    values: list[np.ndarray]


def make_batch(case: Case, backend: str, poison: float = np.nan) -> Batch:
    """A batch whose every slot, block-table entry and token that no query may use leads to `poison`."""
    rng = np.random.default_rng(0)
    (num_heads, num_kv_heads), head_dim, block_size = case.heads, case.head_dim, case.block_size
    num_rows = len(case.rows) + case.pad_rows
    num_tokens = sum(q_len for q_len, _ in case.rows) + case.pad_tokens
    num_used = [-(-kv_len // block_size) for _, kv_len in case.rows]
    num_blocks = 1 + sum(num_used) + 2
    free_blocks = list(rng.permutation(np.arange(1, num_blocks)))

    tables = np.zeros((num_rows, max(num_used, default=0) + 1), np.int32)
    keys, values, slots, written_keys, written_values = [], [], [], [], []
    for row, (q_len, kv_len) in enumerate(case.rows):
        k, v = (
            np.asarray(jnp.asarray(rng.standard_normal((kv_len, num_kv_heads, head_dim)), case.dtype)) for _ in "kv"
        )
        first_visible = 0 if case.window is None else max(0, kv_len - q_len - case.window + 1)
        for index in range(first_visible // block_size, num_used[row]):
            tables[row, index] = free_blocks.pop()
        positions = np.arange(first_visible, kv_len)
        slots.append(tables[row, positions // block_size] * block_size + positions % block_size)
        written_keys.append(k[first_visible:])
        written_values.append(v[first_visible:])
        keys.append(k if case.kv_scales is None else in_8_bits(k, case.kv_scales[0]))
        values.append(v if case.kv_scales is None else in_8_bits(v, case.kv_scales[1]))

    module = backend_called(backend)
    scales = dict(zip(("k_scale", "v_scale"), map(jnp.float32, case.kv_scales or ()), strict=False))
    pools = tuple(
        jnp.full(shape, poison, FP8 if scales else case.dtype)
        for shape in module.pool_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    )
    if slots:
        slot_mapping = jnp.asarray(np.concatenate(slots), jnp.int32)
        written = np.concatenate(written_keys), np.concatenate(written_values)
        pools = module.write_kv(*pools, *written, slot_mapping, **scales)
    q = np.full((num_tokens, num_heads, head_dim), poison)
    num_real = num_tokens - case.pad_tokens
    q[:num_real] = 2 * rng.standard_normal((num_real, num_heads, head_dim))
    cu_q_lens = np.full(num_rows + 1, num_real, np.int32)
    cu_q_lens[: len(case.rows) + 1] = np.cumsum([0] + [q_len for q_len, _ in case.rows])
    kv_lens = np.zeros(num_rows, np.int32)
    kv_lens[: len(case.rows)] = [kv_len for _, kv_len in case.rows]
    args = (jnp.asarray(q, case.dtype), *pools, *map(jnp.asarray, (cu_q_lens, kv_lens, tables)))
    return Batch(args, scales, keys, values)


def in_8_bits(x: np.ndarray, scale: float) -> np.ndarray:
    """x as a pool of 8 bits gives it back: NumPy's own rounding of x / scale."""
    return np.clip(np.float32(x) / np.float32(scale), -448, 448).astype(FP8).astype(np.float64) * scale


def oracle(case: Case, batch: Batch) -> np.ndarray:
    """Dense float64 attention, row by row; zeros for padding."""
    q = np.asarray(batch.args[0], np.float64)
    num_heads, num_kv_heads = case.heads
    out = np.zeros(q.shape)
    start = 0
    for (q_len, kv_len), k, v in zip(case.rows, batch.keys, batch.values, strict=True):
        k, v = (x.astype(np.float64).repeat(num_heads // num_kv_heads, axis=1) for x in (k, v))
        scores = scale_of(case) * np.einsum("qhd,chd->hqc", q[start : start + q_len], k)
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        query_position = np.arange(kv_len - q_len, kv_len)[:, None]
        key_position = np.arange(kv_len)[None]
        visible = (key_position <= query_position) & (key_position > query_position - (case.window or kv_len))
        weights = np.where(visible[None], np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        out[start : start + q_len] = np.einsum("hqc,chd->qhd", weights, v)
        start += q_len
    return out


def on_tensor_cores(case: Case) -> Case:
    """The case in a dtype that they multiply without loss of precision."""
    return case._replace(dtype="bfloat16") if case.dtype == "float32" else case


def scale_of(case: Case) -> float:
    return case.head_dim**-0.5


@functools.cache
def compiled(scale: float, window: int | None, softcap: float | None, backend: str):
    attention = backend_called(backend).ragged_attention
    return jax.jit(functools.partial(attention, scale=scale, window=window, softcap=softcap))


def attend(case: Case, batch: Batch, backend: str) -> np.ndarray:
    call = compiled(scale_of(case), case.window, case.softcap, backend)
    return np.asarray(call(*batch.args, **batch.scales))


# Blackwell's kernels are Ampere's but for the copies.
PAIRS = [(case, name) for name in BACKENDS for case in (CASES[::5] if name == "blackwell" else CASES)]


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=[f"{case.name}-{name}" for case, name in PAIRS])
def test_attention_is_dense_attention_over_the_visible_keys(case: Case, backend: str):
    if backend in GPUS:
        case = on_tensor_cores(case)
        if case.block_size not in mosaic_gpu.BLOCK_SIZES:
            pytest.skip("the kernels are for blocks of 16 to 128")
    batch = make_batch(case, backend)
    out, expected = attend(case, batch, backend), oracle(case, batch)
    assert out.dtype == batch.args[0].dtype
    error = np.abs(out.astype(np.float64) - expected).max()
    assert error <= TOLERANCE[case.dtype] * max(1, np.abs(expected).max())
    num_real = len(expected) - case.pad_tokens
    assert not out[num_real:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [0.0, np.inf, -np.inf])
def test_what_no_query_sees_changes_no_bit(backend: str, poison: float):
    case = Case("mixed", MIXED, window=90, pad_rows=3, pad_tokens=20)
    case = on_tensor_cores(case) if backend in GPUS else case
    out = attend(case, make_batch(case, backend, poison), backend)
    np.testing.assert_array_equal(out, attend(case, make_batch(case, backend), backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_of_nan_leaves_the_others_alone(backend: str):
    case = Case("mixed", MIXED, window=90, pad_rows=3, pad_tokens=20)
    case = on_tensor_cores(case) if backend in GPUS else case
    batch = make_batch(case, backend)
    clean = attend(case, batch, backend)
    first_of_chunk = len(DECODES) + CHUNKS[0][0]
    sick_rows = (slice(1, 2), slice(first_of_chunk, first_of_chunk + CHUNKS[1][0]))  # a decode and a chunk
    q = batch.args[0]
    for tokens in sick_rows:
        q = q.at[tokens].set(jnp.nan)
    out = attend(case, batch._replace(args=(q, *batch.args[1:])), backend)
    healthy = np.ones(len(out), bool)
    for tokens in sick_rows:
        healthy[tokens] = False
    np.testing.assert_array_equal(out[healthy], clean[healthy])


@pytest.mark.parametrize("backend", ANYWHERE)
def test_float32_decode_over_4096_keys_is_exact_to_1e_5(backend: str):
    case = Case("long", [(1, 4096)], heads=(8, 8), head_dim=128, block_size=64)
    batch = make_batch(case, backend)
    assert np.abs(attend(case, batch, backend) - oracle(case, batch)).max() < 1e-5


@pytest.mark.parametrize("num_splits", range(1, 17))
def test_combined_splits_are_dense_attention(num_splits: int):
    """The published guide's check: 8 heads, D 128, 4096 keys, 1 to 16 splits."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 128), (4096, 8, 128), (4096, 8, 128)))

    def attention(keys: slice) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("hd,chd->hc", q, k[keys], precision="highest") * 128**-0.5
        weights = jax.nn.softmax(scores)
        return jnp.einsum("hc,chd->hd", weights, v[keys], precision="highest"), jax.nn.logsumexp(scores, axis=-1)

    bounds = np.linspace(0, 4096, num_splits + 1).astype(int)
    outs, lses = zip(*(attention(slice(*pair)) for pair in itertools.pairwise(bounds)), strict=True)
    with jax.numpy_rank_promotion("allow"):
        combined = reference.combine(jnp.stack(outs), jnp.stack(lses))
    assert np.abs(combined - attention(slice(None))[0]).max() < 1e-5


@pytest.mark.parametrize("backend", ANYWHERE)
@pytest.mark.parametrize("block_size", [1, 4])
def test_write_kv_fills_the_named_slots_and_drops_the_rest(backend: str, block_size: int):
    module = get_backend(backend)
    num_blocks, num_kv_heads, head_dim = 12 // block_size, 2, 3
    pools = module.allocate(num_blocks, block_size, num_kv_heads, head_dim, "float32")
    slots = jnp.asarray([7, -1, 2, 12, -12, 11, 2**31 - 1, -(2**31)], jnp.int32)
    k = 1 + jnp.arange(8 * num_kv_heads * head_dim, dtype=jnp.float32).reshape(8, num_kv_heads, head_dim)
    written = module.write_kv(*pools, k, -k, slots)
    for pool, new in zip(written, (k, -k), strict=True):
        kept = np.asarray(new)[[0, 2, 5]]
        assert np.count_nonzero(pool) == kept.size
        np.testing.assert_array_equal(np.sort(pool[pool != 0]), np.sort(kept.ravel()))
    # A query that sees one key gets its value back: slot 11 leads its block only where B is 1.
    readable = {7: 0, 2: 2, 11: 5} if block_size == 1 else {}
    for slot, token in readable.items():
        q = jnp.ones((1, 2, head_dim))
        row = (jnp.asarray([0, 1]), jnp.asarray([1]), jnp.asarray([[slot]]))
        np.testing.assert_array_equal(ragged_attention(q, *written, *row, scale=1.0, backend=backend)[0], -k[token])


@pytest.mark.parametrize("backend", ANYWHERE)
def test_a_step_updates_donated_pools_in_place(backend: str):
    module = get_backend(backend)
    num_tokens, num_rows, shape = 64, 16, (512, 64, 2, 16)

    def step(k_pool, v_pool, q, k, v, slots, cu_q_lens, kv_lens, tables):
        k_pool, v_pool = module.write_kv(k_pool, v_pool, k, v, slots)
        out = module.ragged_attention(q, k_pool, v_pool, cu_q_lens, kv_lens, tables, scale=0.25)
        return k_pool, v_pool, out

    def ints(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    pools = [jax.ShapeDtypeStruct(s, jnp.float32) for s in module.pool_shapes(*shape)]
    q, k = (jax.ShapeDtypeStruct((num_tokens, heads, 16), jnp.float32) for heads in (4, 2))
    rows = (ints(num_tokens), ints(num_rows + 1), ints(num_rows), ints(num_rows, 8))
    memory = jax.jit(step, donate_argnums=(0, 1)).lower(*pools, q, k, k, *rows).compile().memory_analysis()
    pool_bytes = 4 * np.prod(shape)
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes


def test_xla_work_follows_the_tokens_attended_to_not_the_table():
    num_rows, num_columns, block_size = 32, 256, 64  # a table of 16k tokens
    pools = get_backend("xla").allocate(1 + num_rows * 128, block_size, 1, 64, "bfloat16")
    tables = 1 + jnp.arange(num_rows * num_columns, dtype=jnp.int32).reshape(num_rows, num_columns) % (num_rows * 128)
    q = jnp.ones((num_rows, 2, 64), jnp.bfloat16)
    cu_q_lens = jnp.arange(num_rows + 1, dtype=jnp.int32)
    step = jax.jit(functools.partial(ragged_attention, scale=0.1, backend="xla"))

    def cpu_seconds(kv_lens):  # of all threads, so that a busy machine does not count
        args = (q, *pools, cu_q_lens, jnp.asarray(kv_lens, jnp.int32), tables)
        step(*args).block_until_ready()
        times = []
        for _ in range(5):
            start = time.process_time()
            step(*args).block_until_ready()
            times.append(time.process_time() - start)
        return min(times)

    all_long = cpu_seconds([8192] * 32)
    assert cpu_seconds([64] * 32) < all_long / 10  # 128 times fewer tokens
    assert cpu_seconds([8192] + [64] * 31) < all_long / 5  # 26 times fewer


def test_choose_backend_takes_the_best_or_the_one_named():
    model = {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "dtype": "float32", "platform": "cpu"}
    assert choose_backend(**model).NAME == "xla"
    assert choose_backend("reference", **model).NAME == "reference"


def test_a_named_backend_that_cannot_run_raises_with_its_reason(monkeypatch):
    model = {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "dtype": "float32", "platform": "cpu"}
    monkeypatch.setattr(get_backend("xla"), "supported", lambda *_: "it is Tuesday")
    with pytest.raises(ValueError, match="backend='xla' cannot run: it is Tuesday"):
        choose_backend("xla", **model)
    assert choose_backend(**model).NAME == "reference"


BAD_MODELS = [
    ({"name": "cuda"}, "backend='cuda' does not exist; the backends are mosaic_gpu, xla, reference"),
    ({"num_heads": 8}, "num_heads=8 is not a multiple of num_kv_heads=3"),
    ({"dtype": "float64"}, "dtype is float64; it must be one of float32, bfloat16, float16"),
    ({"dtype": "foo"}, "dtype is 'foo'; it must be one of float32, bfloat16, float16"),
    ({"block_size": 0}, "block_size=0 is out of range; it must be a whole number from 1"),
    ({"num_kv_heads": 0}, "num_kv_heads=0 is out of range; it must be a whole number from 1"),
    ({"head_dim": 64.0}, "head_dim=64.0 is out of range; it must be a whole number from 1"),
    (
        {"name": "mosaic_gpu", "platform": "cpu"},
        "backend='mosaic_gpu' cannot run: it needs an NVIDIA GPU, and this is for platform='cpu'",
    ),
]


BAD_GPU_MODELS = [
    ({"head_dim": 68}, "head_dim=68 is not a multiple of 8 up to 256"),
    ({"head_dim": 512}, "head_dim=512 is not a multiple of 8 up to 256"),
    ({"block_size": 48}, "block_size=48 is not one of 16, 32, 64, 128"),
    ({"dtype": "float32"}, "its kernels are for bfloat16 and float16, not float32, which runs on 'xla'"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_GPU_MODELS)
def test_the_gpu_backend_says_what_it_cannot_run(change: dict, sentence: str):
    model = {"head_dim": 64, "num_heads": 8, "num_kv_heads": 2, "block_size": 64, "dtype": "bfloat16"}
    for gpu in GPUS.values():
        assert gpu.supported(**model, platform="gpu") is None
        assert gpu.supported(**{**model, **change}, platform="gpu") == sentence


def test_the_gpu_backend_names_the_chips_it_has_kernels_for():
    turing = mosaic_gpu.MosaicGpu(mosaic_gpu.Target((7, 5), 40, 65536))
    reason = turing.supported(64, 8, 2, 64, "bfloat16", "gpu")
    assert reason == "there are no kernels for compute capability 7.5, only for 8.0, 8.6, 8.9, 9.0, 10.0"


@pytest.mark.parametrize(("change", "sentence"), BAD_MODELS)
def test_choose_backend_says_what_is_wrong(change: dict, sentence: str):
    model = {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "dtype": "float32"}
    with pytest.raises(ValueError) as error:
        choose_backend(**{**model, **change})
    assert str(error.value) == sentence


GOOD = {
    "q": jnp.zeros((5, 4, 16)),
    "k_pool": jnp.zeros((3, 2, 16, 8)),
    "v_pool": jnp.zeros((3, 2, 8, 16)),
    "cu_q_lens": jnp.zeros(3, jnp.int32),
    "kv_lens": jnp.zeros(2, jnp.int32),
    "block_tables": jnp.zeros((2, 1), jnp.int32),
    "scale": 1.0,
}
BAD_ARGUMENTS = [
    ({"q": jnp.zeros((5, 64))}, "q has shape (5, 64); it must have 3 dimensions, [T, H, D]"),
    ({"q": jnp.zeros((5, 4, 16), jnp.int32)}, "q is int32; it must be one of float32, bfloat16, float16"),
    ({"q": jnp.zeros((5, 4, 16), jnp.bfloat16)}, "k_pool is float32; it must be q's dtype, bfloat16, or float8_e4m3fn"),
    (
        {"v_pool": jnp.zeros((3, 2, 8))},
        "v_pool has shape (3, 2, 8); it must have 4 dimensions, a backend's layout",
    ),
    (
        {"q": jnp.zeros((5, 3, 16)), "backend": "xla"},
        "backend='xla' cannot run: q's 3 heads are not a multiple of the pools' 2",
    ),
    (
        {"q": jnp.zeros((5, 4, 32)), "backend": "xla"},
        "backend='xla' cannot run: k_pool (3, 2, 16, 8) and v_pool (3, 2, 8, 16) do not have its layout for "
        "D=32, such as (3, 2, 32, 8) and (3, 2, 8, 32)",
    ),
    (
        {"cu_q_lens": jnp.zeros(2, jnp.int32)},
        "cu_q_lens has 2 entries; it must have 3, one more than kv_lens",
    ),
    (
        {"block_tables": jnp.zeros((3, 1), jnp.int32)},
        "block_tables has 3 rows; it must have 2, as kv_lens has",
    ),
    ({"kv_lens": jnp.zeros(2)}, "kv_lens is float32; it must be int32"),
    ({"window": 0}, "window=0 is out of range; it must be at least 1, or None for no window"),
    ({"softcap": 0.0}, "softcap=0.0 is out of range; it must be more than 0, or None for no cap"),
    ({"backend": "cuda"}, "backend='cuda' does not exist; the backends are mosaic_gpu, xla, reference"),
    ({"scale": float("nan")}, "scale=nan is out of range; it must be a number more than 0"),
    ({"scale": 0.0}, "scale=0.0 is out of range; it must be a number more than 0"),
    ({"window": 1.5}, "window=1.5 is out of range; it must be at least 1, or None for no window"),
    ({"q": jnp.zeros((0, 4, 16))}, "q has shape (0, 4, 16); none of its dimensions may be 0"),
    ({"num_splits": jnp.zeros(3, jnp.int32)}, "num_splits is int32[3]; it must be int32[2]"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_ARGUMENTS)
def test_ragged_attention_says_what_is_wrong(change: dict, sentence: str):
    ragged_attention(**GOOD)
    with pytest.raises(ValueError) as error:
        ragged_attention(**{**GOOD, **change})
    assert str(error.value) == sentence


def test_the_docstrings_example_runs():
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(kernels.ragged_attention, "ragged_attention", globs={})
    assert doctest.DocTestRunner().run(example).failed == 0
