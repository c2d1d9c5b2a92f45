"""Command R7B and its kin: LayerNorms without bias, a parallel block, windows in the layers that rotate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

ONLY = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
"""Fields of real configs that Hugging Face does not read, with the values that its code is right for."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"tie_word_embeddings": True} | dict(hf))
    longest = fields.count_or_none("model_max_length")  # as Command R has it
    num_layers, window = fields.count("num_hidden_layers"), fields.count_or_none("sliding_window", 4096)
    every = fields.count("sliding_window_pattern", 4)
    windowed = fields.windowed(num_layers, lambda layer: (layer + 1) % every != 0)
    for name, value in ONLY.items():
        fields.only(name, value)
    fields.only("layer_switch", every)
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=tuple(window if one else None for one in windowed),
        no_rope_layers=tuple(layer for layer in range(num_layers) if not windowed[layer] or window is None),
        norm="layer, no bias",
        norm_eps=fields.take("layer_norm_eps", 1e-5),
        parallel=True,
        layer_norms=llama.LayerNorms(mlp_in=None),
        rope_interleaved=True,
        logits_scale=fields.take("logit_scale", 0.0625),
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    return replace(config, max_position_embeddings=longest or config.max_position_embeddings)
