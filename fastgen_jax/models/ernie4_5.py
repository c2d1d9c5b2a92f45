"""ERNIE 4.5, dense: Llama with neighbours rotated."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | dict(hf))
    bias = fields.take("use_bias", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        rope_interleaved=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
    fields.finish()
    return config
