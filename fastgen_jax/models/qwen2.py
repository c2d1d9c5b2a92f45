"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows in the upper layers where it says so."""

from collections.abc import Callable, Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(hf)
    fields.only("use_mrope", False)
    config = llama.read_config(fields, windows=read_windows(fields), qkv_bias=True)
    fields.finish()
    return config


def read_windows(
    fields: HFConfig, is_windowed: Callable[[int, int], bool] = lambda layer, first: layer >= first
) -> tuple[int | None, ...]:
    """The window of each layer. is_windowed: of a layer and `max_window_layers`, where there are no `layer_types`."""
    num_layers = fields.count("num_hidden_layers")
    windowed = fields.take("use_sliding_window", False)
    window = fields.take("sliding_window", 4096, null=None)
    first = fields.take("max_window_layers", 28)
    kinds = fields.take("layer_types") or [
        "sliding_attention" if is_windowed(i, first) else "full_attention" for i in range(num_layers)
    ]
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise ValueError(f"layer_types has {unknown[0]!r}; it can have sliding_attention and full_attention")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries; it must have num_hidden_layers={num_layers}")
    return tuple(window if windowed and kind == "sliding_attention" else None for kind in kinds)
