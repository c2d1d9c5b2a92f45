"""The product with a quantised weight against one worked out in NumPy, and how a weight is cut over devices."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from fastgen_jax.kernels import mixed_xla
from fastgen_jax.kernels.mixed import Chip
from fastgen_jax.quantization import KINDS, QuantizedMatrix, dequantize, on_chip, pack, quantized_matmul, unpack

F, E = 48, 256
GROUPS = (1, 2, 4, 8)  # of 256, 128, 64 and 32 inputs


def some_values(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    if kind == "fp8":
        bits = rng.integers(0, 256, shape).astype(np.uint8)
        return np.where(bits & 127 == 127, 0, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)  # but NaN
    low, high = {"int8": (-128, 127), "int4": (-8, 7)}[kind]
    return rng.integers(low, high, shape, endpoint=True).astype(np.int8)


def some_matrix(kind: str, groups: int, *, zeros: bool, shape: tuple[int, int] = (F, E)):
    """A matrix, and the weights that it stands for, float64."""
    rng = np.random.default_rng(groups)
    values = some_values(rng, kind, shape)
    scales = rng.uniform(0.5, 2, (shape[0], groups)).astype(np.float32)
    offsets = some_values(rng, kind, scales.shape) if zeros else None
    expected = values.astype(np.float64).reshape(shape[0], groups, -1)
    if offsets is not None:
        expected = expected - offsets.astype(np.float64)[:, :, None]
    expected = (expected * scales[:, :, None]).reshape(shape)
    device_zeros = None if offsets is None else jnp.asarray(offsets)
    return QuantizedMatrix(jnp.asarray(pack(kind, values)), jnp.asarray(scales), device_zeros, kind), expected


CASES = [
    pytest.param(kind, groups, zeros, id=f"{kind}-{E // groups}{'-zeros' * zeros}")
    for kind in KINDS
    for groups in GROUPS
    for zeros in ((False,) if kind == "fp8" else (False, True))
]


def close(found: jax.Array, x: np.ndarray, weight: np.ndarray, dtype: str) -> None:
    """Within rounding of sums of this size: 1e-5 in float32; of bfloat16 and float16 with weights of that precision."""
    expected = x.astype(np.float64) @ weight.T
    size = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(weight, axis=1)[None]
    limit = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    assert np.max(np.abs(np.asarray(found, np.float64) - expected) / size) < limit


def as_on_a_gpu(x: jax.Array, m: QuantizedMatrix, *, fuses: bool = True) -> jax.Array:
    """What XLA is given on a GPU; it means the same on a CPU."""
    return mixed_xla._on_gpu(x, m.values, m.scales, m.zeros, kind=m.kind, fuses=fuses)


PRODUCTS = {"here": quantized_matmul, "gpu": as_on_a_gpu, "old gpu": partial(as_on_a_gpu, fuses=False)}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "groups", "zeros"), CASES)
def test_the_product_is_that_of_the_weights_it_stands_for(kind, groups, zeros, dtype, product):
    matrix, expected = some_matrix(kind, groups, zeros=zeros)
    for num_tokens in (1, 5, 40):
        x = np.random.default_rng(num_tokens).standard_normal((num_tokens, E)).astype(jnp.dtype(dtype))
        close(jax.jit(PRODUCTS[product])(jnp.asarray(x), matrix), x, expected, dtype)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("kind", "groups", "zeros"), CASES)
def test_a_weight_of_blocks_the_last_of_which_begins_early(kind, groups, zeros, product, monkeypatch):
    for name in ("CPU_BLOCK", "GPU_BLOCK"):
        monkeypatch.setattr(mixed_xla, name, 20 * E)
    matrix, expected = some_matrix(kind, groups, zeros=zeros, shape=(51, E))
    for num_tokens in (1, 70):
        x = np.random.default_rng(0).standard_normal((num_tokens, E)).astype(np.float32)
        close(jax.jit(PRODUCTS[product])(jnp.asarray(x), matrix), x, expected, "float32")


@pytest.mark.parametrize(("kind", "groups", "zeros"), CASES)
def test_scales_of_16_bits(kind, groups, zeros):
    matrix, _ = some_matrix(kind, groups, zeros=zeros)
    matrix = replace(matrix, scales=matrix.scales.astype(jnp.bfloat16))
    x = np.random.default_rng(0).standard_normal((3, E)).astype(np.float32)
    close(quantized_matmul(jnp.asarray(x), matrix), x, np.asarray(dequantize(matrix, jnp.float32)), "float32")


@pytest.mark.parametrize(("kind", "groups", "zeros"), CASES)
def test_dequantized_it_is_the_weights(kind, groups, zeros):
    matrix, expected = some_matrix(kind, groups, zeros=zeros)
    assert matrix.shape == (F, E)
    np.testing.assert_allclose(dequantize(matrix, jnp.float32), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_stored(kind):
    values = some_values(np.random.default_rng(0), kind, (64, 64))
    assert set(np.unique(values.astype(np.float32))) >= {-8, 7, 0} and len(np.unique(values)) > 15
    np.testing.assert_array_equal(np.asarray(unpack(kind, jnp.asarray(pack(kind, values)))), values)


def test_the_result_has_the_dtype_that_is_asked_for():
    matrix, _ = some_matrix("int8", 1, zeros=False)
    x = jnp.ones((2, E), jnp.bfloat16)
    assert quantized_matmul(x, matrix).dtype == jnp.bfloat16
    assert quantized_matmul(x, matrix, out_dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize(("kind", "groups", "zeros"), CASES)
def test_float32_is_multiplied_in_float32_on_a_gpu_too(kind, groups, zeros):
    """And not in TF32, of which a CPU shows nothing."""
    matrix, _ = some_matrix(kind, groups, zeros=zeros)
    for num_tokens in (1, 200):
        x = jnp.ones((num_tokens, E))
        dots = re.findall(r"dot_general\[.*?\n\s*\]", str(jax.make_jaxpr(as_on_a_gpu)(x, matrix)), re.DOTALL)
        assert dots and all("HIGHEST" in dot for dot in dots)


@pytest.mark.parametrize("cut", ["outputs", "inputs"])
@pytest.mark.parametrize(("kind", "groups", "zeros"), CASES)
def test_cut_over_devices(kind, groups, zeros, cut):
    """Inputs are cut with their groups; one group is each shard's own."""
    matrix, expected = some_matrix(kind, groups, zeros=zeros)
    tp = 4 if cut == "outputs" or groups in (1, 4, 8) else groups
    mesh = Mesh(np.array(jax.devices()[:tp]), ("tp",))
    if cut == "outputs":
        values = scales = PartitionSpec("tp", None)
        out, activations = PartitionSpec(None, "tp"), PartitionSpec()
    else:
        values = activations = PartitionSpec(None, "tp")
        scales, out = PartitionSpec(None, "tp") if groups > 1 else PartitionSpec(), PartitionSpec()
    specs = replace(matrix, values=values, scales=scales, zeros=None if matrix.zeros is None else scales)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(activations, specs), out_specs=out)
    def product(x, part):
        y = quantized_matmul(x, part)
        return jax.lax.psum(y, "tp") if cut == "inputs" else y

    x = np.random.default_rng(0).standard_normal((5, E)).astype(np.float32)
    close(product(jnp.asarray(x), matrix), x, expected, "float32")


def test_matrices_are_told_their_chip_and_nothing_else_is():
    matrix, _ = some_matrix("int4", 2, zeros=True)
    chip = Chip((9, 0), 132)
    told = on_chip({"a": {"weight": matrix}, "b": jnp.ones(3)}, chip)
    assert told["a"]["weight"].chip == chip and told["b"].shape == (3,)
    assert Chip.here() is None  # this is a CPU
