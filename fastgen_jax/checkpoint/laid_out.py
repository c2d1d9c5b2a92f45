"""A checkpoint that names or lays out its tensors otherwise than the model's modules do, read as if it did not."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fastgen_jax.checkpoint.host_matrix import HostMatrix, QuantizedSource, scheme_of
from fastgen_jax.checkpoint.source import Region, TensorSource
from fastgen_jax.models.layout import Layout, Rows
from fastgen_jax.schemes import Scheme


class _Place(NamedTuple):
    tensor: str
    shape: tuple[int, ...]  # of what lies there, [out, in]
    rows: Rows
    transposed: bool


class LaidOut:
    """The tensors of `source` as the model's modules would have them: a `TensorSource`."""

    def __init__(self, source: TensorSource, layout: Layout) -> None:
        self._source = source
        self._places: dict[str, _Place] = {}
        for tensor in source.names():
            if layout.unread is None or not re.search(layout.unread, tensor):
                is_quantized = scheme_of(source, tensor) is not None
                self._places |= dict(_places(tensor, source.shape(tensor), layout, is_quantized))

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def read_into(self, name: str, out: np.ndarray, region: Region | None = None) -> None:
        place = self._places[name]
        rows, *columns = region or tuple(slice(0, n) for n in place.shape)
        for here, there in place.rows.spans(rows):
            part, lies = out[here], (there, *columns)
            if place.transposed:
                part, lies = part.T, lies[::-1]
            self._source.read_into(place.tensor, part, lies)

    def scheme(self, name: str) -> Scheme | None:
        return scheme_of(self._source, self._places[name].tensor)

    def read_quantized(self, name: str, out: HostMatrix, region: Region | None = None) -> None:
        place = self._places[name]
        assert isinstance(self._source, QuantizedSource)
        rows, *columns = region or tuple(slice(0, n) for n in place.shape)
        for here, there in place.rows.spans(rows):
            self._source.read_quantized(place.tensor, out[here], (there, *columns))

    def read(self, name: str) -> np.ndarray:
        place = self._places[name]
        whole = np.atleast_1d(self._source.read(place.tensor))
        whole = whole.T if place.transposed else whole
        return np.concatenate([whole[there] for _, there in place.rows.spans(slice(0, place.shape[0]))])


def _places(tensor: str, shape: tuple[int, ...], layout: Layout, is_quantized: bool) -> Iterator[tuple[str, _Place]]:
    """The names that the model has for a tensor or for what lies in it."""
    name = tensor
    for pattern, replacement in layout.names.items():
        name = re.sub(pattern, replacement, name)
    *scopes, module, kind = ["", *name.split(".")]
    transposed = kind == "weight" and module in layout.transposed
    if transposed and is_quantized:
        raise ValueError(f"tensor {tensor!r} is quantised, which a family whose weights lie [in, out] cannot be")
    shape = (shape[::-1] if transposed else shape) or (1,)
    sharing = layout.shared.get(module, {module: Rows(shape[0], 0, shape[0], 0)})
    if (expected := sum(rows.total for rows in sharing.values())) != shape[0]:
        raise ValueError(f"tensor {tensor!r} has {shape[0]} outputs; the model expects {expected}")
    for part, rows in sharing.items():
        yield ".".join((*scopes, part, kind))[1:], _Place(tensor, (rows.total, *shape[1:]), rows, transposed)
