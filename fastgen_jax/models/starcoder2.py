"""StarCoder2: Llama with LayerNorms, biases, an MLP without gate and, where it says so, windows."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layout import Layout

Model = llama.Model

DEFAULTS = {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | dict(hf))
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    bias = fields.take("use_bias", True)
    config = llama.read_config(
        fields,
        windows=(fields.count_or_none("sliding_window"),) * fields.count("num_hidden_layers"),
        norm="layer",
        norm_eps=fields.take("norm_epsilon", 1e-5),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
    fields.finish()
    return config


def layout(config: llama.Config) -> Layout:
    return Layout(names={r"\.c_fc\.": ".up_proj.", r"\.c_proj\.": ".down_proj."})
