"""What a checkpoint format offers the loader: `TensorSource`, and the row-wise reading they share."""

import math
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np

CHUNK_BYTES = 1 << 20  # of the file, held in memory at once; more leaves the cache and reads slower

_ALIGNMENT = 64  # bytes; a CPU device takes a host array that is so aligned as it is, and copies any other

Region = tuple[slice, ...]
"""A part of a tensor: a slice of each axis, with its start and stop."""


class TensorSource(Protocol):
    """The tensors of one checkpoint under Hugging Face's names and in its orientation ([out, in]).

    bytes_read: bytes of tensor data read from disk so far.
    """

    @property
    def bytes_read(self) -> int: ...

    def names(self) -> list[str]:
        """Every tensor, in the order they lie on disk."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header."""
        ...

    def read_into(self, name: str, out: np.ndarray, region: Region | None = None) -> None:
        """Fill `out` (any float dtype, any strides), casting, a small piece at a time.

        out has the shape of `region`, or without one the tensor's. A region reads its own bytes where the format
        allows it.
        """
        ...

    def read(self, name: str) -> np.ndarray:
        """A tensor as a new array: in the file's dtype, or float32 where the file is quantised."""
        ...


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -data.ctypes.data % _ALIGNMENT
    return data[first : first + nbytes].view(dtype).reshape(shape)


def read_exactly(path: Path, start: int, nbytes: int) -> np.ndarray:
    """Bytes [start, start + nbytes) of a file as uint8."""
    data = np.empty(nbytes, np.uint8)
    fill(path, start, data)
    return data


def fill(path: Path, start: int, out: np.ndarray) -> None:
    """Fill `out`, C-contiguous, with the bytes of a file from `start` on.

    Read, not mapped: pages of a mapping would count as the process's own memory.
    """
    with open(path, "rb", buffering=0) as file:
        fill_from(file, start, out)


def fill_from(file: FileIO, start: int, out: np.ndarray) -> None:
    """`fill` from a file that is open already."""
    view, filled = memoryview(out.reshape(-1).view(np.uint8)), 0
    file.seek(start)
    while filled < out.nbytes:
        count = file.readinto(view[filled:])
        if not count:
            raise ValueError(f"{file.name} ended at byte {start + filled}, {out.nbytes - filled} bytes too soon")
        filled += count


def as_rows(array: np.ndarray) -> np.ndarray:
    """A view with at least two axes, the first of which can be read in pieces."""
    return array if array.ndim >= 2 else array.reshape(1, -1)


def row_chunks(num_rows: int, row_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices that cover `num_rows` rows in pieces of about `chunk_bytes`."""
    step = max(1, chunk_bytes // max(1, row_bytes))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def assign(out: np.ndarray, where: slice | np.ndarray, values: np.ndarray) -> None:
    """out[where] = values, cast to out's dtype. Copied as bits: NumPy does that fast for any dtype."""
    bits = f"u{out.dtype.itemsize}"
    out.view(bits)[where] = values.astype(out.dtype, copy=False).view(bits)
