"""Model families, one file each, named by Hugging Face's `model_type`.

A family's file has `from_hf(config_json) -> Config`, strict about fields it does not understand, and
`Model(config, backend, shards)`, a Linen module whose submodules carry the checkpoint's names. Where a family's
checkpoints have other names or another layout, `layout(config) -> Layout` says so.
"""

import importlib
import pkgutil
from dataclasses import replace
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fastgen_jax.batch import RaggedBatch
from fastgen_jax.kernels import get_backend
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.layers import Params

SHARED = {"hf_config", "layers", "layout", "moe", "norms", "rope"}


def families() -> list[str]:
    """The `model_type`s there is a file for."""
    return sorted({m.name for m in pkgutil.iter_modules(__path__)} - SHARED)


def family(model_type: str) -> ModuleType:
    """The module of a `model_type`; ValueError naming the families there are."""
    if model_type not in (known := families()):
        raise ValueError(f"model_type={model_type!r} is not supported; the families are {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{model_type}")


def init_params(model: Any, key: jax.Array) -> Params:
    """Random float32 parameters; of a model with shards, those of one of them."""
    return nn.meta.unbox(_init(model, key))


def param_shapes(model: Any) -> tuple[Params, Params]:
    """The shapes of `init_params`, and beside them each array's logical axes, None where it has none."""
    boxed = jax.eval_shape(lambda: _init(model, jax.random.key(0)))
    shapes = nn.meta.unbox(boxed)

    def axes(leaf: Any) -> tuple[str | None, ...]:
        return leaf.names if isinstance(leaf, nn.Partitioned) else (None,) * leaf.ndim

    return shapes, jax.tree.map(axes, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def _init(model: Any, key: jax.Array) -> Params:

    def everything(module: Any, batch: RaggedBatch, kv_pool: list[LayerKV]) -> jax.Array:
        return module.logits(module(batch, kv_pool)[0])

    # The parameters depend on no backend, and this one takes the float32 that they are made in.
    model = model.clone(backend=get_backend("xla"), shards=replace(model.shards, inside=False))
    c = model.config
    k = model.shards.local_kv_heads(c.num_kv_heads)
    kv_pool = [model.backend.allocate(2, 16, k, c.head_dim, jnp.float32) for _ in range(c.num_layers)]
    return nn.init(everything, model)(key, RaggedBatch.empty(16, 1, 1), kv_pool)["params"]
