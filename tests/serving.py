"""A whole server in one process, for tests: replicas over engines that speak a script, the router, HTTP and gRPC."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from fastgen_jax.serving.app import make_app
from fastgen_jax.serving.replica import Replica
from fastgen_jax.serving.router import Router
from fastgen_jax.serving.server import _Http
from fastgen_jax.serving.service import Server

TIMEOUT = 60
"""Seconds after which a test says that something hangs."""


@dataclass
class Served:
    """What a test talks to. url: of HTTP; grpc: host:port of the router."""

    url: str
    grpc: str
    router: Router
    replicas: list[Replica]
    servers: list[Server]


@contextlib.asynccontextmanager
async def replica_server(engine: Any, model: str = "tiny", **options: Any) -> AsyncIterator[tuple[Replica, Server]]:
    """One replica of `engine` behind gRPC."""
    api_keys = options.pop("api_keys", ())
    replica = Replica(model, **options)
    server = Server(replica, "127.0.0.1", 0, api_keys)
    await server.start()
    replica.serve(engine)
    await server.set_ready(True)
    try:
        yield replica, server
    finally:
        await server.stop()
        await replica.close()


@contextlib.asynccontextmanager
async def served(
    engines: Sequence[Any], *, app: Any = None, classes: Sequence[str] = (), models: Sequence[str] = (), **options: Any
) -> AsyncIterator[Served]:
    """A router over a replica for each engine. app: options of `make_app`; options: of `Router`."""
    async with contextlib.AsyncExitStack() as stack:
        each = [
            await stack.enter_async_context(
                replica_server(
                    engine,
                    models[i] if models else "tiny",
                    replica_class=classes[i] if classes else "",
                )
            )
            for i, engine in enumerate(engines)
        ]
        router = Router([server.address for _, server in each], **options)
        await router.start()
        stack.push_async_callback(router.close)
        front = Server(router, "127.0.0.1", 0, (app or {}).get("api_keys", ()))
        await front.start()
        await front.set_ready(True)
        stack.push_async_callback(front.stop)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        http = _Http(
            uvicorn.Config(
                make_app(router, **(app or {})), log_config=None, lifespan="off", timeout_graceful_shutdown=1
            )
        )
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        while not http.started:
            await asyncio.sleep(0.01)
        try:
            yield Served(
                f"http://127.0.0.1:{listener.getsockname()[1]}",
                front.address,
                router,
                [replica for replica, _ in each],
                [server for _, server in each],
            )
        finally:
            http.should_exit = True
            await serving


def run(main: Any) -> Any:
    """Run a coroutine, for so long and no longer."""
    return asyncio.run(asyncio.wait_for(main, TIMEOUT))
