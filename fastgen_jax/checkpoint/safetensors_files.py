"""Tensors from one or many safetensors files (https://huggingface.co/docs/safetensors, "Format")."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fastgen_jax.checkpoint.source import Region, as_rows, assign, fill, fill_from, read_exactly, row_chunks

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DTYPES: dict[str, np.dtype] = {
    **_FLOATS,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_STORED_AS = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    nbytes: int

    def rows(self, rows: slice) -> "_Entry":
        """The tensor of some rows, which lie together."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        count = rows.stop - rows.start
        return self._replace(
            shape=(count, *self.shape[1:]), start=self.start + rows.start * row_bytes, nbytes=count * row_bytes
        )


class SafetensorsSource:
    """The tensors of a folder in Hugging Face's layout.

    Reads every header at once, and raises a ValueError naming the file when one is damaged, cut short,
    missing from the index's list, or holds a tensor that is not floating point, unless it is `quantized`.
    """

    def __init__(self, directory: Path, *, quantized: bool = False) -> None:
        self.bytes_read = 0
        self._entries: dict[str, _Entry] = {}
        files, listed = _list_files(directory)
        for path in files:
            for name, entry in _read_header(path, _DTYPES if quantized else _FLOATS).items():
                if name in self._entries:
                    raise ValueError(f"tensor {name!r} is in both {self._entries[name].path} and {path}")
                self._entries[name] = entry
        for name, filename in listed.items():
            if name not in self._entries or self._entries[name].path.name != filename:
                raise ValueError(f"{directory / INDEX_NAME} lists tensor {name!r} in {filename}, which lacks it")

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> np.dtype:
        return self._entries[name].dtype

    def stored_as(self, name: str) -> str:
        """A tensor's dtype in the format's own words."""
        return _STORED_AS[self._entries[name].dtype]

    def holds_floats(self, name: str) -> bool:
        """Whether a tensor has floats of 16 bits or more."""
        return self.stored_as(name) in _FLOATS

    def read_into(self, name: str, out: np.ndarray, region: Region | None = None) -> None:
        entry = self._entries[name]
        if region is not None:
            if any(part != slice(0, n) for part, n in zip(region[1:], entry.shape[1:], strict=True)):
                self._read_columns(entry, out, region)
                return
            entry = entry.rows(region[0])
        out = as_rows(out)
        if out.dtype == entry.dtype and out.flags.c_contiguous:
            fill(entry.path, entry.start, out)
            self.bytes_read += entry.nbytes
            return
        num_rows, row_bytes = out.shape[0], out[0].size * entry.dtype.itemsize if out.shape[0] else 0
        for rows in row_chunks(num_rows, row_bytes):
            nbytes = (rows.stop - rows.start) * row_bytes
            data = read_exactly(entry.path, entry.start + rows.start * row_bytes, nbytes)
            self.bytes_read += nbytes
            assign(out, rows, data.view(entry.dtype).reshape(-1, *out.shape[1:]))

    def _read_columns(self, entry: _Entry, out: np.ndarray, region: Region) -> None:
        """A rectangle of a matrix: a few bytes of each row."""
        if len(entry.shape) != 2:
            raise ValueError(f"a tensor of shape {entry.shape} in {entry.path} is not a matrix to be cut by columns")
        rows, columns = region
        num_rows, width = rows.stop - rows.start, columns.stop - columns.start
        item = entry.dtype.itemsize
        with open(entry.path, "rb", buffering=0) as file:
            for chunk in row_chunks(num_rows, width * item):
                data = np.empty((chunk.stop - chunk.start, width), entry.dtype)
                for i, row in enumerate(data.view(np.uint8)):
                    position = (rows.start + chunk.start + i) * entry.shape[1] + columns.start
                    fill_from(file, entry.start + position * item, row)
                self.bytes_read += data.nbytes
                assign(out, chunk, data)

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        out = np.empty(entry.shape, entry.dtype)
        self.read_into(name, out)
        return out


def _list_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The folder's weight files, and the index's map of tensor to file (empty where there is none)."""
    index = directory / INDEX_NAME
    if (directory / "model.safetensors").is_file() and not index.is_file():
        return [directory / "model.safetensors"], {}
    if not index.is_file():
        return sorted(directory.glob("*.safetensors")), {}
    try:
        listed = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index: it has no weight_map") from error
    files = sorted({directory / filename for filename in listed.values()})
    for path in files:
        if not path.is_file():
            raise ValueError(f"{index} lists {path.name}, which is not there; download the checkpoint again")
    return files, listed


def _read_header(path: Path, dtypes: dict[str, np.dtype]) -> dict[str, _Entry]:
    """Where each tensor of a file lies, the order of the bytes kept."""
    file_bytes = path.stat().st_size
    if file_bytes < 8:
        raise ValueError(f"{path} is not a safetensors file: it has only {file_bytes} bytes")
    header_bytes = int(read_exactly(path, 0, 8).view("<u8")[0])
    if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
        hint = "it is a Git LFS pointer" if read_exactly(path, 0, 8).tobytes() == b"version " else "it is damaged"
        raise ValueError(f"{path} is not a whole safetensors file: {hint}; download it again")
    try:
        header = json.loads(read_exactly(path, 8, header_bytes).tobytes())
        header.pop("__metadata__", None)
        fields = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header is not valid JSON of tensors") from error
    entries = {}
    end = 0
    for name, field in fields:
        entry = _entry(path, name, field, dtypes, first_byte=8 + header_bytes, expected_start=end)
        entries[name] = entry
        end += entry.nbytes
    if 8 + header_bytes + end != file_bytes:
        raise ValueError(
            f"{path} has {file_bytes} bytes, its header describes {8 + header_bytes + end}; download it again"
        )
    return entries


def _entry(
    path: Path,
    name: str,
    field: dict[str, Any],
    dtypes: dict[str, np.dtype],
    *,
    first_byte: int,
    expected_start: int,
) -> _Entry:
    """One tensor of a header, checked: tensors follow one another without gaps, and their sizes add up."""
    if field.get("dtype") not in dtypes:
        hint = "" if dtypes is _DTYPES else ", unless config.json has a quantization_config that says what it means"
        raise ValueError(
            f"tensor {name!r} in {path} is stored as {field.get('dtype')}; only {', '.join(dtypes)} are read{hint}"
        )
    dtype, shape = dtypes[field["dtype"]], tuple(field.get("shape", ()))
    start, stop = field["data_offsets"]
    if start != expected_start or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} in {path} has bytes {start} to {stop}, which do not fit its shape {shape}")
    return _Entry(path, dtype, shape, first_byte + start, stop - start)
