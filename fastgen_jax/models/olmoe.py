"""OLMoE: Llama with a mixture of experts and one norm over all heads of q and one over k's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.moe import Mixture
from fastgen_jax.models.qwen3_moe import NEW_NAMES

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"rms_norm_eps": 1e-5} | {NEW_NAMES.get(name, name): value for name, value in hf.items()})
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        head_norm="rms, all heads",
        qkv_bias=bias,
        out_bias=bias,
    )
    mixture = Mixture(
        num_experts=fields.count("num_experts", 64),
        top_k=fields.count("num_experts_per_tok", 8),
        hidden=config.intermediate_size,
        normalise=fields.take("norm_topk_prob", False),
    )
    fields.finish()
    return replace(config, mixture=mixture)
