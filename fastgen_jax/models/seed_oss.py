"""Seed-OSS: Llama with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"num_key_value_heads": 8, "head_dim": 128} | dict(hf))
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        qkv_bias=fields.take("attention_bias", True),
        out_bias=fields.take("attention_out_bias", False),
        mlp_bias=fields.take("mlp_bias", False),
    )
    fields.finish()
    return config
