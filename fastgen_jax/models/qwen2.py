"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows in the upper layers where it says so."""

from collections.abc import Callable, Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(hf)
    fields.only("use_mrope", False)
    config = llama.read_config(fields, windows=read_windows(fields, fields.count("num_hidden_layers")), qkv_bias=True)
    fields.finish()
    return config


def read_windows(
    fields: HFConfig, num_layers: int, is_windowed: Callable[[int, int], bool] = lambda layer, first: layer >= first
) -> tuple[int | None, ...]:
    """The window of each layer. is_windowed: of a layer and `max_window_layers`, where there are no `layer_types`."""
    window = read_window(fields)
    first = fields.take("max_window_layers", 28)
    windowed = fields.windowed(num_layers, lambda layer: is_windowed(layer, first))
    return tuple(window if one else None for one in windowed)


def read_window(fields: HFConfig) -> int | None:
    """That of the layers which have one; None where none has, for there `sliding_window` may be anything."""
    if fields.take("use_sliding_window", False):
        return fields.count_or_none("sliding_window", 4096)
    fields.take("sliding_window")
    return None
