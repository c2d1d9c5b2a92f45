"""GLM-4-0414: norms before and after attention and MLP, neighbours in half a head rotated, gate and up in one."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layout import Layout, in_turn

Model = llama.Model

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 0.00000015625}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""

NORMS = llama.LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | dict(hf))
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        layer_norms=NORMS,
        rotary=0.5,
        rope_interleaved=True,
        qkv_bias=fields.take("attention_bias", True),
    )
    fields.finish()
    return config


def layout(config: llama.Config) -> Layout:
    mlp = config.intermediate_size
    return Layout(shared={"gate_up_proj": in_turn(gate_proj=mlp, up_proj=mlp)})
