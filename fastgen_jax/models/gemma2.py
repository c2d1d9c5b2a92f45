"""Gemma 2: soft caps, a window in every second layer, norms before and after, scaled embeddings, scales less 1."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""

NORMS = llama.LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | with_one_activation(hf))
    fields.only("use_bidirectional_attention", None, False)
    num_layers, window = fields.count("num_hidden_layers"), fields.count_or_none("sliding_window", 4096)
    fields.only("sliding_window_size", window)  # an older name
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=tuple(
            window if windowed else None for windowed in fields.windowed(num_layers, lambda layer: layer % 2 == 0)
        ),
        norm="rms, less 1",
        layer_norms=NORMS,
        attention_scale=fields.take("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=fields.take("attn_logit_softcapping", 50.0, null=None),
        logits_softcap=fields.take("final_logit_softcapping", 30.0, null=None),
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    return replace(config, embedding_scale=config.hidden_size**0.5)


def with_one_activation(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its `hidden_activation` where `hidden_act` is, which older ones have too and nobody reads."""
    return dict(hf) | {"hidden_act": hf.get("hidden_activation") or "gelu_pytorch_tanh", "hidden_activation": None}
