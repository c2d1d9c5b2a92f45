"""Command R, Command R+ and Aya 23: LayerNorms without bias, a parallel block, neighbours rotated."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

DEFAULTS = {"rope_theta": 5e5, "tie_word_embeddings": True}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | dict(hf))
    longest = fields.count_or_none("model_max_length")  # Command R's context, beside 8192 positions
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        norm="layer, no bias",
        norm_eps=fields.take("layer_norm_eps", 1e-5),
        parallel=True,
        layer_norms=llama.LayerNorms(mlp_in=None),
        head_norm="layer, each head" if fields.take("use_qk_norm", False) else None,
        rope_interleaved=True,
        logits_scale=fields.take("logit_scale", 0.0625),
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    return replace(config, max_position_embeddings=longest or config.max_position_embeddings)
