"""The persistent server: replicas (an engine each) behind gRPC, a router over them, an OpenAI front over that."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen_jax.serving.clients import AsyncClient, Client, client
    from fastgen_jax.serving.launch import serve

__all__ = ["AsyncClient", "Client", "client", "serve"]

# Imported when first asked for, so that a process imports what it is made of and no more.
_HOME = {"AsyncClient": "clients", "Client": "clients", "client": "clients", "serve": "launch"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        text = f"serving needs an extra: pip install 'fastgen-jax[serve]' ({error.name} is missing)"
        raise ImportError(text) from error
