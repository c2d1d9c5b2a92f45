"""K and V in 8 bits: `float8_e4m3fn` (OCP FP8, arXiv 2209.05433), 4 exponent and 3 mantissa bits, up to 448.

A pool of them holds x / scale of every number x, one scale for a layer's K and one for its V. It has no infinity:
what is more than 448 becomes 448, as in vLLM, and an infinity NaN, so that it is seen.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

FP8 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0


def to_stored(x: Array, dtype: DTypeLike, scale: Array | None = None) -> Array:
    """x as a pool of `dtype` holds it. scale: of a pool of `FP8`, float32 []; None is 1."""
    if jnp.dtype(dtype) != FP8:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    if scale is not None:
        x = x / scale
    # XLA's conversion alone makes NaN of what is too large.
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.clip(x, -LARGEST, LARGEST)).astype(FP8)


def as_bits(x: Array) -> Array:
    """The bytes of `FP8`; any other array as it is. XLA:CPU moves `FP8` by way of float16, whole pools with it."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == FP8 else x


def from_bits(x: Array, dtype: DTypeLike) -> Array:
    """`as_bits` of an array of `dtype` undone."""
    return lax.bitcast_convert_type(x, FP8) if dtype == FP8 else x


def times(x: float | Array, scale: Array | None) -> float | Array:
    """x * scale, where None is 1."""
    return x if scale is None else x * scale
