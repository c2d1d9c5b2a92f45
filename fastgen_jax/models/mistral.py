"""Mistral: Llama with a sliding window in every layer, or none where config.json says null."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(hf)
    window = fields.take("sliding_window", 4096, null=None)
    config = llama.read_config(fields, windows=(window,) * fields.count("num_hidden_layers"))
    fields.finish()
    return config
