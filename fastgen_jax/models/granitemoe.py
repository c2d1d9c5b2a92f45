"""Granite 3.x with experts: Granite with a mixture of experts in every layer, each layer's in one tensor."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import granite, llama
from fastgen_jax.models.layout import Layout
from fastgen_jax.models.moe import Mixture

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    hf = dict(hf)
    experts, top_k = hf.pop("num_local_experts", 8), hf.pop("num_experts_per_tok", 2)
    config = granite.from_hf(hf)
    return replace(config, mixture=Mixture(experts, top_k, config.intermediate_size, normalise=True))


def layout(config: llama.Config) -> Layout:
    return Layout(
        names={
            r"\.block_sparse_moe\.": ".mlp.",
            r"\.router(\.layer)?\.": ".gate.",
            r"\.input_linear\.weight$": ".experts.gate_up_proj",
            r"\.output_linear\.weight$": ".experts.down_proj",
        }
    )
