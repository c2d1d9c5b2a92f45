"""Qwen3-MoE: Qwen3 with a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.qwen2 import read_window
from fastgen_jax.models.qwen2_moe import read_mixture

Model = llama.Model

NEW_NAMES = {"num_local_experts": "num_experts"}
"""transformers 5 writes the one and reads both."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"num_key_value_heads": 4} | {NEW_NAMES.get(name, name): value for name, value in hf.items()})
    bias = fields.take("attention_bias", False)
    fields.take("max_window_layers")  # real configs have it, and no layer differs by it
    num_layers, window = fields.count("num_hidden_layers"), read_window(fields)
    mixture = read_mixture(fields, num_layers)
    config = llama.read_config(
        fields, windows=(window,) * num_layers, qkv_bias=bias, out_bias=bias, head_norm="rms", mixture=mixture
    )
    fields.finish()
    return config
