"""Ray Serve: the same replicas, placed by Ray and as many as the outstanding tokens want, behind the same HTTP routes.

    serve run fastgen_jax.serving.ray_app:app model=llama2-7b max_replicas=4      # docs/serving.md

Ray starts, places, heals and scales the replicas; each tells a registry its gRPC address, and the front's router sends
requests there itself, as it does without Ray: by outstanding tokens and prefix, with retries and deadlines.
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveFloat, PositiveInt
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen_jax.serving.app import make_app
from fastgen_jax.serving.discovery import BEAT_S, METRIC, OutstandingTokens, Registry
from fastgen_jax.serving.process import start_logging
from fastgen_jax.serving.replica import Replica
from fastgen_jax.serving.replica_process import ReplicaSettings, load_engine
from fastgen_jax.serving.router import MAX_QUEUE, REQUEST_TIMEOUT_S, Router
from fastgen_jax.serving.service import Server
from fastgen_jax.types import DEFAULT_MODEL, EngineConfig

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
    from ray.serve.exceptions import RayServeException
except ModuleNotFoundError as error:
    raise ImportError(f"Ray Serve needs an extra: pip install 'fastgen-jax[ray]' ({error.name} is missing)") from error

_FOR_NOW = (RayError, RayServeException)
"""What calls of another deployment end with while Ray replaces it."""


_NO_ACCESS_LOG = {"enable_access_log": False}
"""The front logs requests itself, and calls of the registry, several a second, say nothing."""

_PAGE_S = 60.0
"""Ray ends a front when all its requests have ended, those of open pages too; so these may not last."""


def _fields(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _words(value: Any) -> Any:
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


class Options(BaseModel):
    """What `app` takes: name=value on the command line, or `args` in a config file. docs/serving.md explains them.

    engine: fields of `EngineConfig`, or JSON of them. api_keys: a list, or text with commas.
    tokens_per_replica: outstanding tokens for which one replica is right; Ray aims at that.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = DEFAULT_MODEL
    name: str = ""
    revision: str | None = None
    engine: Annotated[dict[str, Any], BeforeValidator(_fields)] = {}
    gpus_per_replica: float | None = None
    cpus_per_replica: float = 1
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1
    tokens_per_replica: PositiveInt = 20_000
    upscale_delay_s: float = 10
    downscale_delay_s: float = 300
    drain_s: PositiveFloat = 600
    api_keys: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    max_queue: PositiveInt = MAX_QUEUE
    request_timeout: PositiveFloat = REQUEST_TIMEOUT_S
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def app(args: Options) -> serve.Application:
    """The application, for `serve run` and `serve deploy`."""
    EngineConfig(**args.engine)
    settings = ReplicaSettings(
        args.model,
        name=args.name,
        revision=args.revision,
        engine=args.engine,
        api_keys=args.api_keys,
        log_level=args.log_level,
    )
    registry = serve.deployment(Registry).options(ray_actor_options={"num_cpus": 0}, logging_config=_NO_ACCESS_LOG)
    replicas = serve.deployment(ModelReplica).options(
        autoscaling_config=_scaling(args),
        ray_actor_options={"num_cpus": args.cpus_per_replica, "num_gpus": _gpus(args)},
        graceful_shutdown_timeout_s=args.drain_s,
        health_check_period_s=2,
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        ray_actor_options={"num_cpus": 0},
        logging_config=_NO_ACCESS_LOG,
        graceful_shutdown_timeout_s=args.drain_s,
        max_ongoing_requests=100_000,  # the router says when there are too many
    )
    found = registry.bind()
    return front.bind(
        replicas.bind(settings, found),
        found,
        api_keys=args.api_keys,
        max_queue=args.max_queue,
        request_timeout=args.request_timeout,
        log_level=args.log_level,
    )


def _gpus(args: Options) -> float:
    """What a replica takes; ValueError if that is less than its engine wants."""
    wanted = args.engine.get("tensor_parallel", 1)
    given = wanted if args.gpus_per_replica is None else args.gpus_per_replica
    if given and given < wanted and wanted > 1:
        raise ValueError(f"gpus_per_replica={given:g} is less than tensor_parallel={wanted}; leave it out, or raise it")
    return given


def _scaling(args: Options) -> AutoscalingConfig:
    policy = AutoscalingPolicy(
        policy_function=OutstandingTokens, policy_kwargs={"per_replica": args.tokens_per_replica}
    )
    return AutoscalingConfig(
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        upscale_delay_s=args.upscale_delay_s,
        downscale_delay_s=args.downscale_delay_s,
        metrics_interval_s=1,
        look_back_period_s=5,
        policy=policy,
    )


class ModelReplica:
    """One replica: what `fastgen serve --only-replica` is, in an actor of Ray's."""

    async def __init__(self, settings: ReplicaSettings, registry: Any) -> None:  # type: ignore[misc]
        start_logging(settings.log_level, "replica")
        self._registry = registry
        self._has_failed = self._is_loaded = False
        self._replica = Replica(settings.name or settings.model, on_failure=self._fail)
        self._server = Server(self._replica, ray.util.get_node_ip_address(), 0, settings.api_keys)
        await self._server.start()
        self._beating = asyncio.create_task(self._beat())
        engine = await asyncio.to_thread(load_engine, settings)
        self._replica.serve(engine)
        self._is_loaded = True
        await self._server.set_ready(True)

    def _fail(self) -> None:
        self._has_failed = True

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(*_FOR_NOW):
                await self._registry.beat.remote(self._server.address)
            await asyncio.sleep(BEAT_S)

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if self._has_failed:
            raise RuntimeError("the engine has stopped")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray hands to `OutstandingTokens`."""
        return {METRIC: self._replica.outstanding_tokens}

    async def __del__(self) -> None:
        """Ray is about to end this replica: nobody finds it any more, and what runs is finished."""
        self._beating.cancel()
        with contextlib.suppress(*_FOR_NOW, TimeoutError):  # the registry may have been ended before
            await asyncio.wait_for(self._registry.leave.remote(self._server.address), BEAT_S)
        if self._is_loaded:
            await self._replica.drain()
            await self._replica.close()
        await self._server.stop()


class Front:
    """The HTTP front over a router that follows the registry."""

    async def __init__(  # type: ignore[misc]
        self, _replicas: Any, registry: Any, *, api_keys: Sequence[str], log_level: str, **options: Any
    ) -> None:
        """_replicas: makes them part of the application; they are not called through Ray. options: of `Router`."""
        start_logging(log_level, "front")
        self._api_keys = api_keys
        self._router = Router([], api_key=next(iter(api_keys), None), **options)
        await self._router.start()
        self._following = asyncio.create_task(self._follow(registry))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        app = make_app(self._router, api_keys=self._api_keys, page_s=_PAGE_S)
        app.add_middleware(_WithoutRequestId)
        return app

    async def _follow(self, registry: Any) -> None:
        while True:
            with contextlib.suppress(*_FOR_NOW):
                # None at all: the registry has just been started again, and will hear of them within a second.
                if addresses := await registry.addresses.remote():
                    self._router.fleet.set_addresses(addresses)
            await asyncio.sleep(BEAT_S / 2)

    async def __del__(self) -> None:
        """Ray has waited for what runs."""
        self._following.cancel()
        await self._router.close()


class _WithoutRequestId:
    """Leaves out of answers the header that Ray's proxy adds to them, so that it is there once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_without)
