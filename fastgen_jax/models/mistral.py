"""Mistral: Llama with a sliding window in every layer, or none where config.json says null."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"num_key_value_heads": 8} | dict(hf))
    window = fields.count_or_none("sliding_window", 4096)
    config = llama.read_config(fields, windows=(window,) * fields.count("num_hidden_layers"))
    fields.finish()
    return config
