"""LLM text generation in JAX: Dynamic SplitFuse, a paged KV pool, a few compiled programs for every step."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen_jax.async_engine import AsyncEngine
    from fastgen_jax.engine import Engine
    from fastgen_jax.kernels import ragged_attention
    from fastgen_jax.pipelines import pipeline
    from fastgen_jax.serving import AsyncClient, Client, client, serve
    from fastgen_jax.types import EngineConfig, Response, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncEngine",
    "Client",
    "Engine",
    "EngineConfig",
    "Response",
    "SamplingParams",
    "client",
    "pipeline",
    "ragged_attention",
    "serve",
]

# Imported when first asked for, so that `import fastgen_jax.scheduler` imports no JAX.
_HOME = {
    "AsyncClient": "serving",
    "AsyncEngine": "async_engine",
    "Client": "serving",
    "Engine": "engine",
    "EngineConfig": "types",
    "Response": "types",
    "SamplingParams": "types",
    "client": "serving",
    "pipeline": "pipelines",
    "ragged_attention": "kernels",
    "serve": "serving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
