"""The product of activations with a quantised weight, by XLA. What it makes of it: docs/quantized-matmul.md.

T tokens, F outputs, E inputs, G groups of E / G inputs that share a scale. A weight is (value - zero) * scale; its
values come as `quantization.pack` lays them out. Where there is one group, values are converted exactly and the scales
come to the sums; where there are several, to the values on a CPU and to each group's sums on a GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

CPU_BLOCK = 2**20
"""Values of a weight that a CPU converts at a time: few enough to be multiplied with before they leave its caches, many
enough that a round of the loop, some 10 us, hardly counts."""

FEW_TOKENS = 8
"""So many tokens take less time as integers, in three times as many rows, than converting an integer weight does."""

GPU_BLOCK = 2**22
"""The same for a GPU: 8 MiB of bfloat16, in an L2 cache of 40 MiB or more."""


def product(x: Array, values: Array, scales: Array, zeros: Array | None, *, kind: str, fuses: bool = True) -> Array:
    """x [T, E] times a weight [F, E], -> float32 [T, F].

    fuses: whether the GPU, if this is for one, can convert such values within a matmul.
    """
    cpu, gpu = partial(_on_cpu, kind=kind), partial(_on_gpu, kind=kind, fuses=fuses)
    return lax.platform_dependent(x, values, scales, zeros, cpu=cpu, default=gpu)


def _on_gpu(x: Array, values: Array, scales: Array, zeros: Array | None, *, kind: str, fuses: bool = True) -> Array:
    """Values are converted within the matmul, and scales and zeros come to what it leaves: float32 [T, F].

    XLA fuses a conversion into a matmul, but neither a subtraction nor a product with scales. So each group is a matmul
    of its own, and leaves T * F sums. From half a group's number of tokens on these would be more bytes than the weight
    has in bfloat16; blocks of it are made then.
    """
    num_tokens, num_groups = x.shape[0], scales.shape[1]
    x3 = x.reshape(num_tokens, num_groups, -1)
    scales = scales.astype(jnp.float32)

    def weight(values: Array) -> Array:
        return _whole(kind, values, x.dtype).reshape(-1, num_groups, x3.shape[2])

    if fuses and (num_groups == 1 or 2 * num_tokens < x3.shape[2]):
        y = _dot("tgi,fgi->gtf", x3, weight(values))
        if zeros is not None:
            sums = jnp.sum(x3, axis=2, dtype=jnp.float32)
            y = y - sums.T[:, :, None] * zeros.astype(jnp.float32).T[:, None, :]
        return jnp.sum(y * scales.T[:, None, :], axis=0)

    def outputs(values: Array, scales: Array, zeros: Array | None) -> Array:
        w = weight(values).astype(jnp.float32)
        if zeros is not None:
            w = w - zeros.astype(jnp.float32)[:, :, None]
        w = (w * scales[:, :, None]).astype(x.dtype).reshape(-1, x.shape[1])
        return _dot("fe,te->ft", lax.optimization_barrier(w), x)

    return _by_blocks(max(GPU_BLOCK // x.shape[1], 1), num_tokens, outputs, values, scales, zeros).T


def _whole(kind: str, values: Array, dtype: Any) -> Array:
    """Values [F, E], converted."""
    if kind == "int4":
        values = lax.bitcast_convert_type(values, jnp.int4).reshape(values.shape[0], -1)
        # XLA as of jax 0.11.2 aborts where it fuses this into a matmul; apart, it is no operation.
        return lax.optimization_barrier(values).astype(dtype)
    return values.astype(dtype)


def _on_cpu(x: Array, values: Array, scales: Array, zeros: Array | None, *, kind: str) -> Array:
    """Block after block of the weight is converted and multiplied with: float32 [T, F].

    One token is multiplied and summed up outright, for which XLA:CPU has a fast path that converts as it reads; its
    matmul would convert the block to float32 in memory first.
    """
    (num_tokens, num_inputs), num_groups = x.shape, scales.shape[1]
    if kind == "int8" and num_groups == num_tokens == 1 and zeros is None:
        # As fast as integers, and one kernel instead of ten small ones.
        y = jnp.sum(values.astype(jnp.float32) * x.astype(jnp.float32), axis=1)
        return (y * scales[:, 0].astype(jnp.float32))[None]
    if kind != "fp8" and num_groups == 1 and num_tokens <= FEW_TOKENS:
        return _in_integers(x, values, scales, zeros, kind=kind)
    alone = num_tokens == 1
    xs = lax.optimization_barrier(_inputs_of(kind, x.astype(jnp.float32) if alone else x))
    if kind == "fp8":
        values = lax.bitcast_convert_type(values, jnp.int8)  # a loop would take fp8 one value at a time

    def outputs(values: Array, scales: Array, zeros: Array | None) -> Array:
        y = jnp.zeros((), jnp.float32)
        for part, rows in zip(_parts(kind, values), xs, strict=True):
            w = _weights(part, scales, zeros, x.dtype)
            if alone:
                y = y + jnp.sum(lax.optimization_barrier(w).astype(jnp.float32) * rows, axis=1, keepdims=True)
            else:
                y = y + lax.optimization_barrier(_dot("fe,te->ft", _convert(w, x.dtype), rows))
        return y if num_groups > 1 else y * scales.astype(jnp.float32)

    return _by_blocks(max(CPU_BLOCK // num_inputs, 1), num_tokens, outputs, values, scales, zeros).T


def _in_integers(x: Array, values: Array, scales: Array, zeros: Array | None, *, kind: str) -> Array:
    """A few tokens with integers, multiplied and summed up exactly, for which a CPU has instructions: float32 [T, F].

    Each activation is the sum of three int8, of units that are 1/127, 1/254 of that and 1/254 of that of the largest of
    its token: to 2^-24 of that, as fine as a float32 of its size.
    """
    num_tokens, num_inputs = x.shape
    top = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1, keepdims=True)
    unit = jnp.where(top == 0, 1, top) / 127
    rest, planes = x.astype(jnp.float32) / unit, []
    for _ in range(3):
        planes.append(jnp.round(rest))
        rest = (rest - planes[-1]) * 254
    units = unit.T / jnp.array([[1.0], [254.0], [254.0**2]])
    xs = lax.optimization_barrier(_inputs_of(kind, jnp.concatenate(planes).astype(jnp.int8)))
    sums = sum(jnp.sum(part, axis=1, dtype=jnp.int32) for part in xs)

    def outputs(values: Array, scales: Array, zeros: Array | None) -> Array:
        y = jnp.zeros((), jnp.int32)
        for part, rows in zip(_parts(kind, values), xs, strict=True):
            y = y + jnp.einsum("te,fe->tf", rows, part, preferred_element_type=jnp.int32)
        if zeros is not None:
            y = y - sums[:, None] * zeros.T.astype(jnp.int32)
        y = y.astype(jnp.float32).reshape(3, num_tokens, -1) * units[:, :, None]
        return jnp.sum(y, axis=0).T * scales.astype(jnp.float32)

    rows = scales.shape[0] if kind == "int8" else max(CPU_BLOCK // num_inputs, 1)
    return _by_blocks(rows, num_tokens, outputs, values, scales, zeros).T


def _inputs_of(kind: str, x: Array) -> tuple[Array, ...]:
    """Activations in the parts of `_parts`."""
    return (x[:, ::2], x[:, 1::2]) if kind == "int4" else (x,)


def _parts(kind: str, values: Array) -> tuple[Array, ...]:
    """Values as a CPU takes them apart, exact and narrow; of int4 the even and the odd ones."""
    if kind == "int4":
        return (values << 4).astype(jnp.int8) >> 4, values.astype(jnp.int8) >> 4
    if kind == "int8":
        return (values,)
    # e4m3fn's bits in the places of float16's, whose exponents are biased by 8 more. NaN comes out as 480.
    bits = (values.astype(jnp.int16) << 7) & jnp.int16(-0x4080)
    return (_cut(lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**8),)


def _weights(values: Array, scales: Array, zeros: Array | None, dtype: Any) -> Array:
    """Values less zeros, exact and narrow; where there are several groups the weights, in `dtype`."""
    num_outputs, num_groups = scales.shape
    if zeros is None and num_groups == 1:
        return values
    w = values.astype(jnp.float32).reshape(num_outputs, num_groups, -1)
    if zeros is not None:
        w = w - zeros.astype(jnp.float32)[:, :, None]
    if num_groups == 1:
        return _cut(w).reshape(values.shape)
    return (w * scales.astype(jnp.float32)[:, :, None]).astype(dtype).reshape(values.shape)


def _convert(w: Array, dtype: Any) -> Array:
    """To a dtype that holds them exactly."""
    return _cut(w.astype(jnp.float32)) if dtype == jnp.bfloat16 and w.dtype == jnp.int8 else w.astype(dtype)


def _cut(w: Array) -> Array:
    """float32 that bfloat16 holds exactly (8 bits of mantissa do for integers up to 256, and for e4m3fn), to bfloat16:
    XLA:CPU takes half as long again to round."""
    return lax.bitcast_convert_type((lax.bitcast_convert_type(w, jnp.uint32) >> 16).astype(jnp.uint16), jnp.bfloat16)


def _dot(letters: str, a: Array, b: Array) -> Array:
    """A product in float32 is one of true float32, not of a GPU's TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(letters, a, b, precision=precision, preferred_element_type=jnp.float32)


def _by_blocks(
    rows: int, num_tokens: int, outputs: Callable[..., Array], values: Array, scales: Array, zeros: Array | None
) -> Array:
    """float32 [F, T]: `outputs` of about `rows` rows of a weight at a time."""
    num_outputs = scales.shape[0]
    count = max(round(num_outputs / rows), 1)
    if count == 1:
        return outputs(values, scales, zeros)
    rows = -(-num_outputs // count)
    rows = -(-rows // 64) * 64 if rows > 64 else rows  # whole tiles of a GPU's matmul

    def one(i: Array, y: Array) -> Array:
        # A slice is whole: the last one begins early, and has rows in common with the one before, which come out alike.
        start = i * rows
        take = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=rows)
        part = outputs(take(values), take(scales), None if zeros is None else take(zeros))
        return lax.dynamic_update_slice_in_dim(y, part, start, 0)

    y = jnp.zeros((num_outputs, num_tokens), jnp.float32)
    return lax.fori_loop(0, -(-num_outputs // rows), one, y)
