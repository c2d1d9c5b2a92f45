"""GLM-4 of 2024: Llama with neighbours in half a head rotated, biases on q, k and v, gate and up in one."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import glm4, llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

layout = glm4.layout


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(glm4.DEFAULTS | dict(hf))
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        rotary=0.5,
        rope_interleaved=True,
        qkv_bias=fields.take("attention_bias", True),
    )
    fields.finish()
    return config
