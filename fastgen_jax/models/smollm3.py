"""SmolLM3: Llama that rotates nothing in every fourth layer, and may have windows there."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama, qwen2
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model

DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "sliding_window": None, "tie_word_embeddings": True}
"""What Hugging Face takes where a config.json says nothing, and Llama's is another."""


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig(DEFAULTS | dict(hf))
    interval, num_layers = fields.count("no_rope_layer_interval", 4), fields.count("num_hidden_layers")
    rotates = fields.take("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if len(rotates) != num_layers:
        raise ValueError(f"no_rope_layers has {len(rotates)} entries; it must have num_hidden_layers={num_layers}")
    bias = fields.take("attention_bias", False)
    config = llama.read_config(
        fields,
        windows=qwen2.read_windows(fields, num_layers, lambda layer, _: not rotates[layer]),
        no_rope_layers=tuple(layer for layer in range(num_layers) if not rotates[layer]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.take("mlp_bias", False),
    )
    fields.finish()
    return config
