"""A quantised checkpoint, read as if its modules had the weights that they stand for."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from fastgen_jax.checkpoint.formats import Format, method, read_format
from fastgen_jax.checkpoint.host_matrix import HostMatrix
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.checkpoint.source import Region
from fastgen_jax.models.hf_config import read_json
from fastgen_jax.schemes import Scheme

_OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ used to write what config.json now has, and the method that the file is of."""


def with_quantization(folder: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a folder, with the `quantization_config` that may lie beside it."""
    if hf_config.get("quantization_config"):
        return hf_config
    for name, of in _OLD_CONFIGS.items():
        if (folder / name).is_file():
            return hf_config | {"quantization_config": {"quant_method": of} | read_json(folder / name)}
    return hf_config


def check_quantization(quantization: str | None, hf_config: dict[str, Any], model_config: Any) -> None:
    """ValueError for a checkpoint that is to be quantised and is already, and for a mixture of experts.

    quantization: the kind that it is to be quantised to. model_config: a family's.
    """
    stored = _method_of_weights(hf_config.get("quantization_config"))
    if quantization is not None and stored is not None:
        raise ValueError(
            f"quantization={quantization!r} is for a checkpoint that is not quantised, and this one is ({stored}); "
            "leave it out"
        )
    how = quantization or stored
    if how is not None and getattr(model_config, "mixture", None) is not None:
        raise ValueError(f"a mixture of experts cannot be quantised ({how}); its experts are held in 16 or 32 bits")


def _method_of_weights(config: Any) -> str | None:
    """The method of a `quantization_config`; None without any, and of compressed-tensors for a KV cache alone."""
    if not config:
        return None
    name = method(config)
    return None if config.get("config_groups") == {} else name


class QuantizedTensors:
    """The tensors of `source`, each quantised module's one named weight: a `QuantizedSource`.

    ValueError naming the tensor if one of a quantised module is missing or does not fit the others.
    """

    def __init__(self, source: SafetensorsSource, format: Format) -> None:
        self._source, self._format = source, format
        self._names: list[str] = []
        self._schemes: dict[str, tuple[Scheme, tuple[int, int]]] = {}
        modules = {
            module
            for module, kind in map(_split, source.names())
            if kind in format.marks and not (kind == "weight" and source.holds_floats(f"{module}.weight"))
        }
        for name in source.names():
            module, kind = _split(name)
            if module in modules and kind in format.parts:
                weight = f"{module}.weight"
                if weight not in self._schemes:
                    self._schemes[weight] = format.scheme(source, module)
                    self._names.append(weight)
            elif format.unread is None or not re.search(format.unread, name):
                self._names.append(name)

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._schemes[name][1] if name in self._schemes else self._source.shape(name)

    def scheme(self, name: str) -> Scheme | None:
        return self._schemes[name][0] if name in self._schemes else None

    def read_into(self, name: str, out: np.ndarray, region: Region | None = None) -> None:
        self._source.read_into(name, out, region)

    def read(self, name: str) -> np.ndarray:
        return self._source.read(name)

    def read_quantized(self, name: str, out: HostMatrix, region: Region | None = None) -> None:
        rows, columns = region or tuple(slice(0, n) for n in self.shape(name))
        self._format.read(self._source, _split(name)[0], out, rows, columns)


def open_quantized(folder: Path, config: dict[str, Any]) -> QuantizedTensors:
    """A folder of safetensors, quantised as its `quantization_config` says."""
    format = read_format(config)
    return QuantizedTensors(SafetensorsSource(folder, quantized=True), format)


def _split(name: str) -> tuple[str, str]:
    """A tensor's module, and what of it the tensor is."""
    module, _, kind = name.rpartition(".")
    return module, kind
