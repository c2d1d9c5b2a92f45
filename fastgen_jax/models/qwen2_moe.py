"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with a mixture of experts and, beside it, an expert that every token takes."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama, qwen2
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.moe import Mixture

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(hf)
    num_layers = fields.count("num_hidden_layers")
    windows = qwen2.read_windows(fields, num_layers, lambda layer, first: layer % 2 == 0 and layer < first)
    mixture = read_mixture(fields, num_layers, shared=fields.count("shared_expert_intermediate_size"))
    config = llama.read_config(fields, windows=windows, qkv_bias=fields.take("qkv_bias", True), mixture=mixture)
    fields.finish()
    return config


def read_mixture(fields: HFConfig, num_layers: int, *, shared: int | None = None) -> Mixture:
    """What the Qwens' mixtures read alike. Layers have a plain MLP where the config says so."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    return Mixture(
        num_experts=fields.count("num_experts"),
        top_k=fields.count("num_experts_per_tok"),
        hidden=fields.count("moe_intermediate_size"),
        normalise=fields.take("norm_topk_prob", False),
        shared=shared,
        dense_layers=tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    )
