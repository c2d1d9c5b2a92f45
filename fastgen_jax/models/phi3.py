"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with q, k, v and gate, up each in one tensor, a window, and longrope."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layout import Layout, in_turn

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"rms_norm_eps": 1e-5} | _with_longrope(hf))
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini's
        fields.only(name, 1)
    config = llama.read_config(
        fields,
        windows=(fields.count_or_none("sliding_window"),) * fields.count("num_hidden_layers"),
        rotary=1.0,
    )
    fields.finish()
    return config


def layout(config: llama.Config) -> Layout:
    q, kv, mlp = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    return Layout(
        shared={
            "qkv_proj": in_turn(q_proj=q, k_proj=kv, v_proj=kv),
            "gate_up_proj": in_turn(gate_proj=mlp, up_proj=mlp),
        }
    )


def _with_longrope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the fields of "longrope", which may bear its old names, where `Rope` looks for them."""
    hf = dict(hf)
    original = hf.pop("original_max_position_embeddings", None) or 4096
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    scaling = dict(hf.get(name) or {})
    kind = scaling.pop("type", scaling.get("rope_type", "default"))
    if kind in ("su", "yarn", "longrope"):
        scaling |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        hf[name] = scaling
    return hf
