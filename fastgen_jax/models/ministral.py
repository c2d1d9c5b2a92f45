"""Ministral: Mistral with a window in the layers that `layer_types` says."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"num_key_value_heads": 8} | dict(hf))
    window = fields.count_or_none("sliding_window", 4096)
    windowed = fields.windowed(fields.count("num_hidden_layers"), lambda layer: True)
    config = llama.read_config(fields, windows=tuple(window if one else None for one in windowed))
    fields.finish()
    return config
