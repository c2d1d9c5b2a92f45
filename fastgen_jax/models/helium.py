"""Helium: Llama with neighbours rotated."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

DEFAULTS = {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | dict(hf))
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        rope_interleaved=True,
        qkv_bias=fields.take("attention_bias", False),
        mlp_bias=fields.take("mlp_bias", False),
    )
    fields.finish()
    return config
