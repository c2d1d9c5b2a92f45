"""StableLM: Llama with LayerNorms, a part of each head rotated and, perhaps, a parallel block or head norms."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import llama
from fastgen_jax.models.hf_config import HFConfig

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    fields = HFConfig({"num_key_value_heads": 32} | dict(hf))
    parallel = fields.take("use_parallel_residual", False)
    config = llama.read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        norm="layer",
        norm_eps=fields.take("layer_norm_eps", 1e-5),
        rotary=0.25,
        parallel=parallel,
        layer_norms=llama.LayerNorms(mlp_in=None) if parallel else llama.LayerNorms(),
        head_norm="layer, each head apart" if fields.take("qk_layernorm", False) else None,
        qkv_bias=fields.take("use_qkv_bias", False),
    )
    fields.finish()
    return config
