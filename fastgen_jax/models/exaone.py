"""EXAONE 3.0 and 3.5: Llama by other names."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.layout import Layout

Model = llama.Model

NEW_NAMES = {
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "num_layers": "num_hidden_layers",
}
"""What other families call the fields that EXAONE calls otherwise."""

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5}


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    return llama.from_hf(DEFAULTS | {NEW_NAMES.get(name, name): value for name, value in hf.items()})


def layout(config: llama.Config) -> Layout:
    return Layout(
        names={
            r"^transformer\.wte\.": "model.embed_tokens.",
            r"^transformer\.h\.": "model.layers.",
            r"^transformer\.ln_f\.": "model.norm.",
            r"\.attn\.attention\.": ".self_attn.",
            r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
            r"\.ln_1\.": ".input_layernorm.",
            r"\.ln_2\.": ".post_attention_layernorm.",
            r"\.c_fc_0\.": ".gate_proj.",
            r"\.c_fc_1\.": ".up_proj.",
            r"\.c_proj\.": ".down_proj.",
        }
    )
