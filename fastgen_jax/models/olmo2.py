"""OLMo 2: Llama with norms after attention and MLP, not before, and one over all heads of q and one over k's."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

AFTER = llama.LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"rms_norm_eps": 1e-5} | dict(hf))
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        layer_norms=AFTER,
        head_norm="rms, all heads",
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    return config
