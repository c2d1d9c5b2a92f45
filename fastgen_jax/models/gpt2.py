"""GPT-2: an OPT with its positions from row 0 on, q, k and v in one tensor, and weights that lie [in, out]."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import opt
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layers import activation
from fastgen_jax.models.layout import Layout, in_turn

Model = opt.Model

UNREAD = (
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)
"""Fields of other tasks, and what is computed alike either way."""


def from_hf(hf: Mapping[str, Any]) -> opt.Config:
    fields = HFConfig(hf)
    hidden_size, num_heads = fields.count("n_embd"), fields.count("n_head")
    if hidden_size % num_heads:
        raise ValueError(f"n_embd={hidden_size} is no multiple of n_head={num_heads}")
    fields.only("tie_word_embeddings", True)
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    hidden_act = fields.take("activation_function", "gelu_new")
    activation(hidden_act)
    for name in UNREAD:
        fields.take(name)
    config = opt.Config(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        embed_dim=hidden_size,
        intermediate_size=fields.count("n_inner", 4 * hidden_size),
        num_layers=fields.count("n_layer"),
        num_heads=num_heads,
        max_position_embeddings=fields.count("n_positions"),
        hidden_act=hidden_act,
        norm_eps=fields.take("layer_norm_epsilon", 1e-5),
        position_offset=0,
    )
    fields.finish()
    return config


def layout(config: opt.Config) -> Layout:
    return Layout(
        names={
            r"^(transformer\.)?wte\.": "model.decoder.embed_tokens.",
            r"^(transformer\.)?wpe\.": "model.decoder.embed_positions.",
            r"^(transformer\.)?ln_f\.": "model.decoder.final_layer_norm.",
            r"^(transformer\.)?h\.": "model.decoder.layers.",
            r"\.ln_1\.": ".self_attn_layer_norm.",
            r"\.ln_2\.": ".final_layer_norm.",
            r"\.attn\.c_proj\.": ".self_attn.out_proj.",
            r"\.attn\.": ".self_attn.",
            r"\.mlp\.c_fc\.": ".fc1.",
            r"\.mlp\.c_proj\.": ".fc2.",
        },
        shared={"c_attn": in_turn(**dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.hidden_size))},
        transposed=("c_attn", "out_proj", "fc1", "fc2"),
        unread=r"\.attn\.(bias|masked_bias)$",  # masks, in old checkpoints
    )
