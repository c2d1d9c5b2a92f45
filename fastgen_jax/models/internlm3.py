"""InternLM3: Llama by other names."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama

Model = llama.Model

NEW_NAMES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
"""What Llama calls the fields that InternLM3 calls otherwise."""

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    return llama.from_hf(DEFAULTS | {NEW_NAMES.get(name, name): value for name, value in hf.items()})
