"""The product with a quantised weight against one worked out in NumPy, and how a weight is cut over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from fastgen_jax.kernels import mixed_xla
from fastgen_jax.quantization import KINDS, QuantizedMatrix, dequantize, pack, quantized_matmul, unpack

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


@pytest.mark.parametrize("on", ["here", "as on a gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "groups", "zeros"), CASES)
def test_the_product_is_that_of_the_weights_it_stands_for(kind, groups, zeros, dtype, on):
    matrix, expected = some_matrix(kind, groups, zeros=zeros)
    product = quantized_matmul
    if on != "here":  # what XLA is given on a GPU means the same on a CPU

        def product(x, m):
            return mixed_xla._on_gpu(x, m.values, m.scales, m.zeros, kind=m.kind)

    for num_tokens in (1, 5, 40):
        x = np.random.default_rng(num_tokens).standard_normal((num_tokens, E)).astype(jnp.dtype(dtype))
        close(jax.jit(product)(jnp.asarray(x), matrix), x, expected, dtype)
