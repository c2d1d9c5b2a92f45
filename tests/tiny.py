"""A tiny random Llama and engines around it, for tests of everything but the model."""

from functools import cache

import jax
import jax.numpy as jnp

from fastgen_jax import kernels
from fastgen_jax.engine import Engine
from fastgen_jax.models import init_params, llama

VOCAB_SIZE = 128
MAX_LEN = 256
EOS = 2

HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}


SMALL = {
    "block_size": 16,
    "num_blocks": 64,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "warm_up": False,
    "show_progress": False,
}


def tiny_model(backend: str = "xla") -> llama.Model:
    return llama.Model(llama.from_hf(HF_CONFIG), kernels.get_backend(backend))


@cache
def tiny_params(seed: int = 0) -> dict:
    """Weights large enough that greedy decoding wanders instead of repeating itself."""
    params = init_params(tiny_model(), jax.random.key(seed))
    return jax.tree.map(lambda w: w * 12 if w.ndim > 1 else w + 0.1 * jnp.sin(jnp.arange(w.size)), params)


def tiny_engine(tokenizer=None, backend: str = "xla", seed: int = 0, **config) -> Engine:
    """Small and quick to compile; `config` overrides."""
    config = {"eos_token_ids": (EOS,)} | SMALL | config
    return Engine(tiny_model(backend), tiny_params(seed), tokenizer, **config)
