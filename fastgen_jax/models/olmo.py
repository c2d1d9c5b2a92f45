"""OLMo, the first: Llama with LayerNorms that have no weights; one that clips q, k and v is refused."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(hf)
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        norm="layer, no weights",
        norm_eps=1e-5,
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    return config
