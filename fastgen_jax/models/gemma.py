"""Gemma, the first: Llama with scaled embeddings, scales less 1 and a GELU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    # Nobody reads "hidden_activation", and by "gelu" the official configs mean the approximation.
    act = hf.get("hidden_act") or "gelu"
    fields = HFConfig(DEFAULTS | dict(hf) | {"hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act})
    fields.take("hidden_activation")
    fields.only("use_bidirectional_attention", None, False)
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        norm="rms, less 1",
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    return replace(config, embedding_scale=config.hidden_size**0.5)
