"""A tiny random Llama whose vocabulary is the byte-level tokenizer's: real logits, and any Unicode text."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from scripted import NUM_TOKENS, TOKENIZER
from tiny import EOS, HF_CONFIG, SMALL

from fastgen_jax import kernels
from fastgen_jax.engine import Engine
from fastgen_jax.models import init_params, llama


@cache
def wide_model() -> tuple[llama.Model, dict]:
    """It, and its parameters."""
    model = llama.Model(llama.from_hf(HF_CONFIG | {"vocab_size": NUM_TOKENS}), kernels.get_backend("xla"))
    params = init_params(model, jax.random.key(0))
    return model, jax.tree.map(lambda w: w * 12 if w.ndim > 1 else w + 0.1 * jnp.sin(jnp.arange(w.size)), params)


def wide_engine(**config: Any) -> Engine:
    """As `tiny.tiny_engine`; engines made with the same `config` give the same tokens."""
    return Engine(*wide_model(), TOKENIZER, **{"eos_token_ids": (EOS,)} | SMALL | config)
