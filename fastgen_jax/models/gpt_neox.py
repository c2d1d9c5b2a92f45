"""GPT-NeoX and Pythia: LayerNorms, a part of each head rotated, an MLP without gate, biases; mostly parallel."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layout import Layout, in_turn

Model = llama.Model

OLD_NAMES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"hidden_act": "gelu"} | {OLD_NAMES.get(name, name): value for name, value in hf.items()})
    for name in ("head_dim", "num_key_value_heads"):  # every head has its own K and V
        fields.only(name, None)
    bias = fields.take("attention_bias", True)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        norm="layer",
        norm_eps=fields.take("layer_norm_eps", 1e-5),
        rotary=0.25,
        parallel=fields.take("use_parallel_residual", True),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
    )
    fields.finish()
    return config


def layout(config: llama.Config) -> Layout:
    d = config.head_dim
    return Layout(
        names={
            r"^gpt_neox\.": "model.",
            r"\bembed_in\.": "embed_tokens.",
            r"^embed_out\.": "lm_head.",
            r"\bfinal_layer_norm\.": "norm.",
            r"\.attention\.dense\.": ".self_attn.o_proj.",
            r"\.attention\.": ".self_attn.",
            r"\.dense_h_to_4h\.": ".up_proj.",
            r"\.dense_4h_to_h\.": ".down_proj.",
        },
        shared={"query_key_value": in_turn(times=config.num_heads, q_proj=d, k_proj=d, v_proj=d)},
        unread=r"\.attention\.(bias|masked_bias)$",  # masks, in old checkpoints
    )
