"""Mixtral: Mistral with a mixture of experts in every layer (arXiv 2401.04088)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.moe import Mixture

Model = llama.Model

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | dict(hf))
    window = fields.count_or_none("sliding_window")
    config = llama.read_config(fields, windows=(window,) * fields.count("num_hidden_layers"))
    mixture = Mixture(
        num_experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        hidden=config.intermediate_size,
        normalise=True,
        parts=("w1", "w3", "w2"),
    )
    fields.finish()
    return replace(config, mixture=mixture)
