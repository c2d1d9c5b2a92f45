"""From a model's name to everything an engine is made of."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastgen_jax import checkpoint, defaults, kernels, models
from fastgen_jax.models.layers import Params
from fastgen_jax.types import EngineConfig


class Pretrained(NamedTuple):
    """What `Engine` takes of the same names."""

    model: Any
    params: Params
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    default_params: dict[str, Any]


def load(name: str, config: EngineConfig, *, revision: str | None, show_progress: bool | None) -> Pretrained:
    """Find a model and load it; a model that is not supported is refused before its tensors are read."""
    found = checkpoint.resolve(name, revision=revision)
    family = models.family(found.hf_config.get("model_type", ""))
    model_config = family.from_hf(found.hf_config)
    dtype = config.dtype or defaults.dtype()
    backend = kernels.choose_backend(
        config.backend,
        head_dim=model_config.head_dim,
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        block_size=config.block_size,
        dtype=jnp.dtype(dtype),
    )
    model = family.Model(model_config, backend)
    shapes = jax.eval_shape(partial(models.init_params, model), jax.random.key(0))
    tokenizer = found.tokenizer()
    params = checkpoint.load_params(
        found.open(),
        shapes,
        dtype=dtype,
        fused=model_config.fused,
        tied=model_config.tie_word_embeddings,
        progress=show_progress,
    )
    eos = defaults.eos_token_ids(found.generation_config, found.hf_config, {"eos_token_id": tokenizer.eos_token_id})
    return Pretrained(model, params, tokenizer, eos, defaults.sampling(found.generation_config))
