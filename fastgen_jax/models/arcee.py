"""Arcee's AFM: Llama with an MLP without gate and the square of a ReLU."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"hidden_act": "relu2", "rms_norm_eps": 1e-5} | dict(hf))
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.take("mlp_bias", False),
    )
    fields.finish()
    return config
