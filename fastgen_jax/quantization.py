"""Matrices that stay quantised in memory, and their product with activations.

F outputs, E inputs, G groups of inputs that share a scale: E / G of them, one after the other.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fastgen_jax.kernels.mixed import Chip, product

KINDS = ("int8", "int4", "fp8")
"""What a value is stored as: a signed integer, or a float of 4 exponent and 3 mantissa bits (OCP FP8, arXiv
2209.05433: `float8_e4m3fn`)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight [F, E]: (value - zero) * scale. One node of a tree of params; the shared matmul takes it as a weight.

    values: as `pack` lays them out. scales: float [F, G]. zeros: int8 [F, G], or None where all are 0.
    """

    values: Array
    scales: Array
    zeros: Array | None
    kind: str = field(metadata={"static": True})
    chip: Chip | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(F, E), unpacked."""
        f, stored = self.values.shape
        return f, stored * values_per_byte(self.kind)


def values_per_byte(kind: str) -> int:
    return 2 if kind == "int4" else 1


def pack(kind: str, values: np.ndarray) -> np.ndarray:
    """Values [F, E] as they are stored: int8 of "int8", `float8_e4m3fn` of "fp8" as they are, and int8 from -8 to 7 of
    "int4" as uint8 [F, E / 2], in byte j value 2 j in the low half."""
    if kind != "int4":
        return values
    nibbles = values.view(np.uint8) & 15
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpack(kind: str, stored: Array) -> Array:
    """`pack` undone, on the device."""
    if kind != "int4":
        return stored
    low, high = (stored << 4).astype(jnp.int8) >> 4, stored.astype(jnp.int8) >> 4
    return jnp.stack((low, high), axis=-1).reshape(stored.shape[0], -1)


def dequantize(matrix: QuantizedMatrix, dtype: DTypeLike) -> Array:
    """The weight [F, E], computed in float32."""
    f, e = matrix.shape
    values = unpack(matrix.kind, matrix.values).astype(jnp.float32).reshape(f, matrix.scales.shape[1], -1)
    if matrix.zeros is not None:
        values = values - matrix.zeros[:, :, None].astype(jnp.float32)
    return (values * matrix.scales[:, :, None].astype(jnp.float32)).reshape(f, e).astype(dtype)


def quantized_matmul(x: Array, weight: QuantizedMatrix, *, out_dtype: DTypeLike | None = None) -> Array:
    """x [T, E] times weight [F, E], -> [T, F] in `out_dtype`, x's if None; sums are in float32."""
    return product(
        x,
        weight.values,
        weight.scales,
        weight.zeros,
        kind=weight.kind,
        chip=weight.chip,
        out_dtype=x.dtype if out_dtype is None else out_dtype,
    )


def on_chip(params: Any, chip: Chip | None) -> Any:
    """A tree whose quantised matrices know that they are multiplied on `chip`."""
    return jax.tree.map(
        lambda leaf: replace(leaf, chip=chip) if isinstance(leaf, QuantizedMatrix) else leaf,
        params,
        is_leaf=lambda node: isinstance(node, QuantizedMatrix),
    )
