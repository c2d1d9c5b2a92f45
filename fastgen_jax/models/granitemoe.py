"""Granite 3.x with experts: Granite with a mixture of experts in every layer, each layer's in one tensor."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import granite, llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layout import Layout
from fastgen_jax.models.moe import Mixture

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(hf)
    config = granite.read_config(fields)
    mixture = Mixture(
        num_experts=fields.count("num_local_experts", 8),
        top_k=fields.count("num_experts_per_tok", 2),
        hidden=config.intermediate_size,
        normalise=True,
    )
    fields.finish()
    return replace(config, mixture=mixture)


def layout(config: llama.Config) -> Layout:
    return Layout(
        names={
            r"\.block_sparse_moe\.": ".mlp.",
            r"\.router(\.layer)?\.": ".gate.",
            r"\.input_linear\.weight$": ".experts.gate_up_proj",
            r"\.output_linear\.weight$": ".experts.down_proj",
        }
    )
