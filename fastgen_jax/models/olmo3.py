"""OLMo 3: OLMo 2 with a window in three of four layers, whose rope is not scaled."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama, olmo2
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.rope import by_layer_type

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"rms_norm_eps": 1e-5} | dict(hf))
    num_layers, window = fields.count("num_hidden_layers"), fields.count("sliding_window", 4096)
    windowed = fields.windowed(num_layers, lambda layer: (layer + 1) % 4 != 0)
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=tuple(window if one else None for one in windowed),
        ropes=by_layer_type(fields, theta=5e5),
        layer_norms=olmo2.AFTER,
        head_norm="rms, all heads",
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.finish()
    return config
