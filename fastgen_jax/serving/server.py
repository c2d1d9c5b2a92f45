"""The process in front: replicas of its own or elsewhere, a router over them, gRPC and HTTP over that."""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import uvicorn

from fastgen_jax.serving import deployments
from fastgen_jax.serving.app import MAX_REQUEST_BYTES, make_app
from fastgen_jax.serving.metrics import Metrics
from fastgen_jax.serving.process import Ending, start_logging
from fastgen_jax.serving.replica_process import STEP_TIMEOUT_S, ReplicaSettings, check_step_timeout
from fastgen_jax.serving.router import MAX_QUEUE, REQUEST_TIMEOUT_S, Router
from fastgen_jax.serving.service import Server, address_of, check_keys
from fastgen_jax.serving.supervisor import LocalReplica, share_gpus

log = logging.getLogger("fastgen_jax.serving")

STOP_REPLICA_S = 10.0
"""How long a local replica may take to end before it is killed; it has nothing to finish by then."""

LAG_EVERY_S = 0.05
"""Between two looks at how late the event loop is."""


@dataclass(frozen=True)
class ServerSettings:
    """What a server is. docs/serving.md explains the fields.

    model: of the local replicas; None where there are none. name: what clients call it, the same unless given.
    nodes: as `ReplicaSettings` has them. replicas: local ones. replica_classes: of each of them, or none.
    remote: addresses, host:port, of replicas elsewhere.
    deployment: the name by which `client` finds it.
    """

    model: str | None
    name: str = ""
    revision: str | None = None
    replicas: int = 1
    replica_classes: tuple[str, ...] = ()
    remote: tuple[str, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50050
    api_keys: tuple[str, ...] = ()
    replica_api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_queue: int = MAX_QUEUE
    request_timeout: float = REQUEST_TIMEOUT_S
    step_timeout: float = STEP_TIMEOUT_S
    max_request_bytes: int = MAX_REQUEST_BYTES
    log_level: str = "info"
    log_prompts: bool = False
    deployment: str = ""

    def __post_init__(self) -> None:
        if self.replicas < 0 or (self.model is None and self.replicas):
            raise ValueError(f"replicas={self.replicas} of model={self.model}; name a model, and at least 0 replicas")
        if not self.replicas and not self.remote:
            raise ValueError("there are no replicas: give a model, or the addresses of replicas elsewhere")
        if self.replica_classes and len(self.replica_classes) != self.replicas:
            raise ValueError(
                f"{len(self.replica_classes)} replica classes for {self.replicas} replicas; give one for each, or none"
            )
        if self.nodes and self.replicas != 1:
            raise ValueError(f"replicas={self.replicas} on several nodes; they share one replica")
        for name, value in (("port", self.port), ("grpc_port", self.grpc_port)):
            if not 0 <= value < 1 << 16:
                raise ValueError(f"{name}={value} is no port; they are 0 (any free one) to 65535")
        for name in ("max_queue", "request_timeout", "max_request_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        check_step_timeout(self.step_timeout)
        for address in self.remote:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"replica {address!r} is no address; give host:port")
        if len(set(self.remote)) < len(self.remote):
            raise ValueError(f"a replica is named twice: {', '.join(self.remote)}")
        check_keys(self.api_keys)
        check_keys([] if self.replica_api_key is None else [self.replica_api_key])

    def replica_settings(self) -> list[ReplicaSettings]:
        """Of each local replica."""
        classes = self.replica_classes or ("",) * self.replicas
        return [
            ReplicaSettings(
                self.model or "",
                name=self.name,
                revision=self.revision,
                engine=self.engine,
                nodes=self.nodes,
                replica_class=replica_class,
                step_timeout=self.step_timeout,
                log_level=self.log_level,
            )
            for replica_class in classes
        ]

    def dumps(self) -> str:
        """As JSON, for a process."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "ServerSettings":
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)


class _Http(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: ServerSettings) -> int:
    """Serve until asked to end; the exit status."""
    start_logging(settings.log_level, "server")
    return asyncio.run(serve(settings))


async def serve(settings: ServerSettings) -> int:
    """`run`, in an event loop."""
    tensor_parallel = settings.engine.get("tensor_parallel", 1)
    devices = [None] if settings.nodes else share_gpus(settings.replicas, tensor_parallel)
    ending = Ending()
    ending.listen()
    replica_key = settings.replica_api_key or secrets.token_urlsafe()  # nobody else on this machine has it
    local = [
        LocalReplica(
            replace(each, api_keys=(replica_key,)),
            devices=device,
            on_hopeless=ending.fail,
            restarts=not settings.nodes,  # the other hosts have ended with it
        )
        for each, device in zip(settings.replica_settings(), devices, strict=True)
    ]
    router = Router(
        [*(replica.address for replica in local), *settings.remote],
        max_queue=settings.max_queue,
        request_timeout=settings.request_timeout,
        api_key=replica_key,
        log_prompts=settings.log_prompts,
        on_terminate=ending.ask,
    )
    grpc_server = Server(router, settings.host, settings.grpc_port, settings.api_keys)
    with (
        socket.create_server((settings.host, settings.port), family=_family(settings.host)) as listener,
        deployments.recorded(
            settings.deployment,
            http_address := address_of(settings.host, listener.getsockname()[1]),
            grpc_server.address,
        ),
    ):
        app = make_app(
            router,
            api_keys=settings.api_keys,
            cors_origins=settings.cors_origins,
            max_request_bytes=settings.max_request_bytes,
        )
        http = _Http(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        )
        running = [asyncio.create_task(replica.run()) for replica in local]
        await router.start()
        await grpc_server.start()
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        watching = [
            asyncio.create_task(_tell_health(router, grpc_server)),
            asyncio.create_task(_measure_lag(router.metrics)),
        ]
        log.info("HTTP on http://%s, gRPC on %s", http_address, grpc_server.address)
        await ending.wait()
        log.info("ending: what runs is finished, what comes is refused; once more to stop at once")
        await ending.wait_for(router.drain())
        for task in (*running, *watching):
            task.cancel()
        http.should_exit = True
        await router.close()
        await asyncio.gather(serving, grpc_server.stop(), *running, *watching, return_exceptions=True)
        await asyncio.gather(*(replica.stop(seconds=STOP_REPLICA_S) for replica in local))
    return ending.status


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def _measure_lag(metrics: Metrics) -> None:
    """Note by how much this event loop is late."""
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        metrics.loop_lag.observe(max(time.monotonic() - due, 0.0))


async def _tell_health(router: Router, server: Server) -> None:
    """Keep gRPC's health service up to date."""
    was_ready = False
    while True:
        if router.is_ready is not was_ready:
            was_ready = router.is_ready
            await server.set_ready(was_ready)
            log.info("ready: %s", ", ".join(router.fleet.models) if was_ready else "no")
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    sys.exit(run(ServerSettings.loads(sys.stdin.read())))
