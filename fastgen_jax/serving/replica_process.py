"""The process of a replica: `python -m fastgen_jax.serving.replica_process`, its settings a line of JSON on stdin."""

import asyncio
import concurrent.futures
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from fastgen_jax.serving.process import Ending, end_with_parent, start_logging
from fastgen_jax.serving.replica import Replica
from fastgen_jax.serving.service import Server, check_keys

log = logging.getLogger("fastgen_jax.serving")

FAILED, USAGE_ERROR, CANNOT_LOAD = 1, 2, 3
"""Exit statuses: the engine stopped; there is no such model, or it cannot be run as asked; loading it failed."""

STEP_TIMEOUT_S = 300.0
"""After a step of so many seconds, the device counts as hung."""


def check_step_timeout(seconds: float) -> None:
    if not seconds > 0:
        raise ValueError(f"step_timeout={seconds} must be above 0; inf is no limit")


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica is.

    model: what `Engine.from_pretrained` loads. name: what clients call it, the same unless given.
    engine: fields of `EngineConfig`. log_level: of the JSON lines on stderr.
    nodes: what `multihost.join` takes, where the model is shared with processes on other hosts; empty if not.
    step_timeout: seconds after which a step counts as hung, and the process ends.
    owned: end when standard input closes.
    """

    model: str
    name: str = ""
    revision: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    replica_class: str = ""
    api_keys: tuple[str, ...] = ()
    step_timeout: float = STEP_TIMEOUT_S
    log_level: str = "info"
    owned: bool = False

    def __post_init__(self) -> None:
        check_step_timeout(self.step_timeout)
        check_keys(self.api_keys)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ReplicaSettings":
        fields = json.loads(text)
        return cls(**{**fields, "api_keys": tuple(fields.get("api_keys", ()))})

    @classmethod
    def from_stdin(cls) -> "ReplicaSettings":
        """Those on its first line; what is behind that stays unread."""
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
            return cls.from_json(stdin.readline().decode())


def run(settings: ReplicaSettings, load: Callable[[ReplicaSettings], Any] | None = None) -> int:
    """Serve until asked to end; the exit status. load: makes the engine."""
    start_logging(settings.log_level, f"replica:{settings.port}")
    return asyncio.run(_serve(settings, load or load_engine))


def load_engine(settings: ReplicaSettings) -> Any:
    """The engine. Without a seed in the settings it draws one, for replicas that share one give the same answers."""
    from fastgen_jax import Engine, multihost

    group = multihost.join(**settings.nodes) if settings.nodes else None
    fields = {"seed": secrets.randbelow(2**31)} | settings.engine
    return Engine.from_pretrained(
        settings.model, revision=settings.revision, group=group, show_progress=False, **fields
    )


async def _serve(settings: ReplicaSettings, load: Callable[[ReplicaSettings], Any]) -> int:
    ending = Ending()
    ending.listen()
    if settings.owned:
        end_with_parent(ending.ask)
    replica = Replica(
        settings.name or settings.model,
        replica_class=settings.replica_class,
        on_terminate=ending.ask,
        on_failure=lambda: ending.fail(FAILED),
    )
    server = Server(replica, settings.host, settings.port, settings.api_keys)
    await server.start()
    log.info("listening on %s, loading %s", server.address, settings.model)
    loading = asyncio.ensure_future(_in_thread(lambda: load(settings)))
    await asyncio.wait({loading, asyncio.ensure_future(ending.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        try:
            replica.serve(loading.result())
        except Exception as error:
            is_mistake = isinstance(error, ValueError | TypeError | OSError)
            log.error("%s", error, exc_info=None if is_mistake else error)
            await server.stop()
            return USAGE_ERROR if is_mistake else CANNOT_LOAD
        watch = asyncio.ensure_future(_watch_steps(replica, settings.step_timeout))
        await server.set_ready(True)
        log.info("ready: %s on %s", replica.model, server.address)
        await ending.wait()
        await server.set_ready(False)
        await ending.wait_for(replica.drain())
        await replica.close()
        if settings.nodes:
            await asyncio.to_thread(loading.result().close)
        watch.cancel()
    await server.stop()
    return ending.status


async def _watch_steps(replica: Replica, longest: float) -> None:
    """End the process, and with it every request, when a step takes longer: its device hangs, and would for ever."""
    while True:
        await asyncio.sleep(min(longest / 4, 1.0))
        if replica.step_seconds > longest:
            log.error("a step has taken more than %g s (--step-timeout): the device hangs", longest)
            os._exit(FAILED)  # an orderly end would wait for the step


async def _in_thread[T](function: Callable[[], T]) -> T:
    """On a thread that does not keep the process from ending."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)


if __name__ == "__main__":
    sys.exit(run(ReplicaSettings.from_stdin()))
