"""EXAONE 4.0: norms after attention and MLP and on heads; of the large one, windows where it rotates, all else none."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama, olmo2
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"num_key_value_heads": 32, "rms_norm_eps": 1e-5} | dict(hf))
    num_layers, window = fields.count("num_hidden_layers"), fields.count_or_none("sliding_window", 4096)
    pattern = fields.take("sliding_window_pattern", 4, null=0)
    windowed = fields.windowed(num_layers, lambda layer: window is not None and _is_local(layer, pattern))
    config = llama.read_config(
        fields,
        windows=tuple(window if one else None for one in windowed),
        no_rope_layers=tuple(i for i, one in enumerate(windowed) if window is not None and not one),
        layer_norms=olmo2.AFTER,
        head_norm="rms",
    )
    fields.finish()
    return config


def _is_local(layer: int, pattern: int | str) -> bool:
    """Whether a layer has a window by a pattern that repeats: "LLLG", or 4, which means the same."""
    if isinstance(pattern, str):
        return pattern[layer % len(pattern)] == "L"
    return pattern > 0 and (layer + 1) % pattern != 0
