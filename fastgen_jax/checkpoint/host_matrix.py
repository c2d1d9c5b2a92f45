"""A quantised matrix in the host's memory, and how one is made of a matrix that is not.

F outputs, E inputs, G groups of inputs.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fastgen_jax.checkpoint.source import Region, TensorSource, aligned_empty, row_chunks
from fastgen_jax.quantization import QuantizedMatrix, pack
from fastgen_jax.schemes import Scheme

_INT8, _FP8, _INT4 = 127.0, 448.0, 15.0  # the largest value; of int4, the number of steps
_CHUNK_BYTES = 1 << 20  # of float32, quantised at once: its temporaries stay in cache


@dataclass(frozen=True)
class HostMatrix:
    """values: int8, or float8_e4m3fn, [F, E]. scales: float [F, G]. zeros: int8 [F, G] or None."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    kind: str

    @classmethod
    def empty(cls, scheme: Scheme, shape: tuple[int, ...]) -> "HostMatrix":
        groups = (shape[0], scheme.num_groups(shape[1]))
        values = aligned_empty(shape, np.dtype(ml_dtypes.float8_e4m3fn if scheme.kind == "fp8" else np.int8))
        zeros = np.empty(groups, np.int8) if scheme.zeros else None
        return cls(values, np.empty(groups, jnp.dtype(scheme.scale_dtype)), zeros, scheme.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __getitem__(self, rows: slice | tuple[int | slice, ...]) -> "HostMatrix":
        """Some of its rows, in the same memory."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return HostMatrix(self.values[rows], self.scales[rows], zeros, self.kind)

    def fill(self, value: int) -> None:
        for array in (self.values, self.scales, self.zeros):
            if array is not None:
                array.fill(value)

    def packed(self) -> QuantizedMatrix:
        """As the device has it."""
        return QuantizedMatrix(pack(self.kind, self.values), self.scales, self.zeros, self.kind)


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A checkpoint some of whose tensors are quantised; their shapes are those of the matrices that they stand for."""

    def scheme(self, name: str) -> Scheme | None:
        """How a tensor is quantised; None: it is not."""
        ...

    def read_quantized(self, name: str, out: HostMatrix, region: Region | None = None) -> None:
        """`read_into` for a tensor that has a scheme: `out` is made for it."""
        ...


def scheme_of(source: TensorSource, name: str) -> Scheme | None:
    """How a tensor of `source` is quantised; None: it is not."""
    return source.scheme(name) if isinstance(source, QuantizedSource) else None


def quantize_into(source: TensorSource, name: str, out: HostMatrix, region: Region | None = None) -> None:
    """Fill `out` with a tensor of floats, or a region of it, a small piece at a time."""
    region = region or tuple(slice(0, n) for n in source.shape(name))
    for chunk in row_chunks(out.shape[0], 4 * out.shape[1], _CHUNK_BYTES):
        piece = np.empty((chunk.stop - chunk.start, out.shape[1]), np.float32)
        first = region[0].start
        source.read_into(name, piece, (slice(first + chunk.start, first + chunk.stop), *region[1:]))
        quantize(piece, out[chunk])


def quantize(weights: np.ndarray, out: HostMatrix) -> None:
    """Fill `out` with float32 weights [F, E], which are overwritten."""
    grouped = weights.reshape(*out.scales.shape, -1)
    values = out.values.reshape(grouped.shape)
    if out.kind == "int4":
        _to_int4(grouped, values, out)
        return
    largest = np.maximum(grouped.max(axis=-1), -grouped.min(axis=-1))
    out.scales[...] = np.where(largest > 0, largest, 1) / (_FP8 if out.kind == "fp8" else _INT8)
    np.multiply(grouped, 1 / out.scales.astype(np.float32)[:, :, None], out=grouped)
    if out.kind == "fp8":
        values.view(np.uint8)[...] = to_e4m3(grouped)
    else:
        values[...] = np.rint(grouped, out=grouped)


def _to_int4(weights: np.ndarray, values: np.ndarray, out: HostMatrix) -> None:
    """weights float32 [F, G, E / G]: each group to 16 steps from its least to its greatest weight, 0 one of them.

    All of the range: to cut outliers off lessens the squared error and makes the text worse (docs/quantization.md).
    """
    low, high = np.minimum(weights.min(axis=-1), 0), np.maximum(weights.max(axis=-1), 0)
    out.scales[...] = np.where(high > low, high - low, 1) / _INT4
    scales = out.scales.astype(np.float32)
    scales[scales == 0] = 1
    zeros = np.clip(np.rint(-low / scales), 0, _INT4)
    weights *= (1 / scales)[:, :, None]
    np.rint(weights, out=weights)
    weights += zeros[:, :, None]
    np.clip(weights, 0, _INT4, out=weights)
    weights -= 8
    values[...] = weights
    assert out.zeros is not None
    out.zeros[...] = zeros - 8


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32, at most 448 in size, as the bits of the nearest float8_e4m3fn, ties to even.

    ml_dtypes does the same in four times the time.
    """
    bits = x.view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    size = bits & np.uint32(0x7FFFFFFF)
    # 20 of float32's 23 bits of mantissa go, and the exponent's bias of 127 becomes 7.
    rounded = size + (np.uint32(0x7FFFF) + ((size >> 20) & 1))
    normal = (rounded >> 20) - np.uint32(120 << 3)
    # Below 2**-6 the values are multiples of 2**-9.
    small = size < np.uint32(121 << 23)
    normal[small] = np.rint(size.view(np.float32)[small] * np.float32(512)).astype(np.uint32)
    return normal.astype(np.uint8) | sign
