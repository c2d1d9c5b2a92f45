"""The scales that a checkpoint brings for a KV cache of 8 bits: two numbers a layer, beside its weights."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import traverse_util

from fastgen_jax.checkpoint.host_matrix import HostMatrix, QuantizedSource, scheme_of
from fastgen_jax.checkpoint.source import Region, TensorSource
from fastgen_jax.schemes import Scheme

# As llm-compressor, vLLM and compressed-tensors (`kv_cache_scheme` in config.json) call them:
# model.layers.0.self_attn.k_proj.k_scale, .self_attn.k_scale or .self_attn.attn.k_scale; once .k_proj.output_scale.
_SCALE = re.compile(
    r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)$"
)


class WithoutKVScales:
    """The tensors of `source`, quantised ones too, but these scales, which `scales` reads."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._scales = {name: match for name in source.names() if (match := _SCALE.search(name))}

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def names(self) -> list[str]:
        return [name for name in self._source.names() if name not in self._scales]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read_into(self, name: str, out: np.ndarray, region: Region | None = None) -> None:
        self._source.read_into(name, out, region)

    def read(self, name: str) -> np.ndarray:
        return self._source.read(name)

    def scheme(self, name: str) -> Scheme | None:
        return scheme_of(self._source, name)

    def read_quantized(self, name: str, out: HostMatrix, region: Region | None = None) -> None:
        assert isinstance(self._source, QuantizedSource)
        self._source.read_quantized(name, out, region)

    def scales(self) -> dict[tuple[int, str], float]:
        """(layer, "k_scale" or "v_scale") -> what a stored number times is the K or V.

        ValueError naming a tensor that is not one number above 0.
        """
        found = {}
        for name, match in self._scales.items():
            shape = self._source.shape(name)
            if math.prod(shape) != 1:
                raise ValueError(f"tensor {name!r} has shape {shape}; a layer's scale of its KV cache is one number")
            scale = float(self._source.read(name).reshape(()))
            if not 0 < scale < math.inf:
                raise ValueError(f"tensor {name!r} is {scale}; a scale is more than 0")
            found[int(match[1]), f"{match[2] or match[3]}_scale"] = scale
        return found


def with_kv_scales(
    params: dict[str, Any], scales: dict[tuple[int, str], float], place: Callable[[float], Any]
) -> dict[str, Any]:
    """`params` with the scales beside the projections of their layers, each as `place` makes it an array []."""
    leaves = traverse_util.flatten_dict(params)
    modules = {path[:-2] for path in leaves if path[-2] == "qkv_proj"}
    for module in modules:
        (layer,) = (int(name.removeprefix("layers_")) for name in module if name.startswith("layers_"))
        for name in ("k_scale", "v_scale"):
            if (scale := scales.get((layer, name))) is not None:
                leaves[*module, name] = place(scale)
    return traverse_util.unflatten_dict(leaves)
