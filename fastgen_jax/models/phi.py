"""Phi-1, Phi-1.5 and Phi-2: LayerNorms, a parallel block, half of each head rotated, biases, an MLP without gate."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layout import Layout

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"hidden_act": "gelu_new"} | dict(hf))
    fields.only("tie_word_embeddings", False)  # its output weights have a bias
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        norm="layer",
        norm_eps=fields.take("layer_norm_eps", 1e-5),
        rotary=0.5,
        parallel=True,
        layer_norms=llama.LayerNorms(mlp_in=None),
        head_norm="layer" if fields.take("qk_layernorm", False) else None,
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )
    fields.finish()
    return config


def layout(config: llama.Config) -> Layout:
    return Layout(
        names={
            r"\bfinal_layernorm\.": "norm.",
            r"\.dense\.": ".o_proj.",
            r"\.([qk])_layernorm\.": r".\1_norm.",
            r"\.fc1\.": ".up_proj.",
            r"\.fc2\.": ".down_proj.",
        }
    )
