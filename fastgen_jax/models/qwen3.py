"""Qwen3: Qwen2 with norms on the heads of q and k, and biases only where it says so."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama, qwen2
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"head_dim": 128} | dict(hf))
    bias = fields.take("attention_bias", False)
    windows = qwen2.read_windows(fields, fields.count("num_hidden_layers"))
    config = llama.read_config(fields, windows=windows, qkv_bias=bias, out_bias=bias, head_norm="rms")
    fields.finish()
    return config
