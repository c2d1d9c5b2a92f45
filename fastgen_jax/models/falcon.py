"""Falcon: LayerNorms, a parallel block, an MLP without gate, few KV heads; those with alibi are refused."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layout import Layout, in_turn

Model = llama.Model

NEW_NAMES = {"activation": "hidden_act", "ffn_hidden_size": "intermediate_size", "num_kv_heads": "num_key_value_heads"}
"""What other families call the fields that Falcon calls otherwise."""

DEFAULTS: dict[str, Any] = {"hidden_act": "gelu", "max_position_embeddings": 2048, "tie_word_embeddings": True}


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    hf = DEFAULTS | {NEW_NAMES.get(name, name): value for name, value in hf.items()}
    new, multi_query = hf.pop("new_decoder_architecture", None), hf.pop("multi_query", True)
    if multi_query and not new:
        hf["num_key_value_heads"] = 1
    if hf.get("intermediate_size") is None:
        hf["intermediate_size"] = 4 * (hf.get("hidden_size") or 0)
    fields = HFConfig(hf)
    fields.only("alibi", False, None)
    fields.only("apply_residual_connection_post_layernorm", False)
    if new:
        fields.only("parallel_attn", True)
    parallel, bias = fields.take("parallel_attn", True), fields.take("bias", False)
    norms_before = fields.take("num_ln_in_parallel_attn", 2 if new else 1)
    if new and norms_before == 2:
        norms = llama.LayerNorms("ln_attn", None, "ln_mlp")
    else:
        norms = llama.LayerNorms(mlp_in=None) if parallel else llama.LayerNorms()
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        norm="layer",
        norm_eps=fields.take("layer_norm_epsilon", 1e-5),
        parallel=parallel,
        layer_norms=norms,
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
    fields.finish()
    return config


def layout(config: llama.Config) -> Layout:
    d, groups = config.head_dim, config.num_kv_heads
    return Layout(
        names={
            r"^transformer\.": "model.",
            r"\bword_embeddings\.": "embed_tokens.",
            r"\bln_f\.": "norm.",
            r"\bh\.(\d+)\.": r"layers.\1.",
            r"\.self_attention\.dense\.": ".self_attn.o_proj.",
            r"\.self_attention\.": ".self_attn.",
            r"\.dense_h_to_4h\.": ".up_proj.",
            r"\.dense_4h_to_h\.": ".down_proj.",
        },
        shared={"query_key_value": in_turn(times=groups, q_proj=config.num_heads // groups * d, k_proj=d, v_proj=d)},
    )
