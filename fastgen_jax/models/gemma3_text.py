"""Gemma 3 of 270M and 1B: Gemma 2 with head norms, no caps, and windows with a rope of theirs in five of six layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import gemma2, llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.rope import by_layer_type

Model = llama.Model

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
"""What Hugging Face takes where a config.json says nothing, as the text's part of a model with images often does."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | gemma2.with_one_activation(hf))
    fields.only("use_bidirectional_attention", False, None)
    fields.only("attn_logit_softcapping", None)  # which nobody reads
    num_layers, window = fields.count("num_hidden_layers"), fields.count("sliding_window", 4096)
    every = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6))
    windowed = fields.windowed(num_layers, lambda layer: (layer + 1) % every != 0)
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=tuple(window if one else None for one in windowed),
        ropes=by_layer_type(fields, theta=1e6, window_theta=1e4),
        norm="rms, less 1",
        layer_norms=gemma2.NORMS,
        head_norm="rms, less 1",
        attention_scale=fields.take("query_pre_attn_scalar", 256) ** -0.5,
        logits_softcap=fields.take("final_logit_softcapping"),
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    rope = config.rope
    if rope.rope_type == "linear":  # whose outcome max_position_embeddings is
        rope = replace(rope, original_max_len=int(config.max_position_embeddings / rope.factor))
    return replace(config, rope=rope, embedding_scale=config.hidden_size**0.5)
