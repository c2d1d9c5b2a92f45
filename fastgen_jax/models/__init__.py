"""Model families, one file each, named by Hugging Face's `model_type`.

A family's file has `from_hf(config_json) -> Config`, strict about fields it does not understand, and
`Model(config, backend)`, a Linen module whose submodules carry the checkpoint's names.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fastgen_jax.batch import RaggedBatch
from fastgen_jax.kernels import get_backend
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.layers import Params

SHARED = {"hf_config", "layers", "rope"}


def families() -> list[str]:
    """The `model_type`s there is a file for."""
    return sorted({m.name for m in pkgutil.iter_modules(__path__)} - SHARED)


def family(model_type: str) -> ModuleType:
    """The module of a `model_type`; ValueError naming the families there are."""
    if model_type not in (known := families()):
        raise ValueError(f"model_type={model_type!r} is not supported; the families are {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{model_type}")


def init_params(model: Any, key: jax.Array) -> Params:
    """Random float32 parameters; under `jax.eval_shape`, their shapes."""

    def everything(module: Any, batch: RaggedBatch, kv_pool: list[LayerKV]) -> jax.Array:
        return module.logits(module(batch, kv_pool)[0])

    # The parameters depend on no backend, and this one takes the float32 that they are made in.
    c, model = model.config, model.clone(backend=get_backend("xla"))
    kv_pool = [model.backend.allocate(2, 16, c.num_kv_heads, c.head_dim, jnp.float32) for _ in range(c.num_layers)]
    return nn.init(everything, model)(key, RaggedBatch.empty(16, 1, 1), kv_pool)["params"]
