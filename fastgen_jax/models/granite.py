"""Granite 3.x, dense: Llama with multipliers of its embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(hf)
    config = read_config(fields)
    fields.finish()
    return config


def read_config(fields: HFConfig) -> llama.Config:
    """What the Granites read alike; the caller calls `finish`."""
    bias = fields.take("attention_bias", False)
    return llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        attention_scale=fields.take("attention_multiplier", 1.0),
        embedding_scale=fields.take("embedding_multiplier", 1.0),
        residual_scale=fields.take("residual_multiplier", 1.0),
        logits_scale=1 / fields.take("logits_scaling", 1.0),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.take("mlp_bias", False),
    )
