"""The gRPC service of `fastgen.proto` over a `Backend`: a replica's engine, or a router that looks the same."""

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fastgen_jax.serving import errors, fastgen_pb2_grpc
from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.errors import Refusal

log = logging.getLogger("fastgen_jax.serving")

SERVICE = pb.DESCRIPTOR.services_by_name["FastGen"].full_name
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""Of both ends. A replica that comes back is found within half a second; connecting may take 2 s (the minimum)."""

MAX_MESSAGE = 500
"""Characters of a sentence that goes with a status: gRPC has little room there."""

FINISHING_S = 2.0
"""How long calls that are over have to say so when a server stops."""

STALLED_S = 60.0
"""How long a client may read nothing of what there is for it before its request is aborted."""

LONGEST_S = 1e9
"""The most that gRPC can wait: longer ones overflow, and are over at once."""

_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")
"""What an Authorization header can bring."""


class Backend(Protocol):
    """What a service does. Everything may raise a `Refusal`, or a ValueError or TypeError for a wrong request."""

    def generate(
        self, request: pb.GenerateRequest, *, stream: bool, timeout: float | None
    ) -> AsyncGenerator[pb.GenerateEvent]:
        """An `Accepted`, with `stream` deltas, and every sample's response. Closing it aborts the request.

        timeout: seconds that it may take; whoever calls breaks it off then in any case.
        """
        ...

    async def abort(self, request_id: str) -> bool: ...

    def stats(self, after_step: int) -> list[pb.ReplicaStats]: ...

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply: ...

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply: ...

    def terminate(self, *, now: bool) -> None:
        """Begin to end the process."""
        ...


class Service(fastgen_pb2_grpc.FastGenServicer):
    """gRPC's view of a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateReply:
        reply = pb.GenerateReply()
        async with _told(context), aclosing(self._generate(request, context, False)) as events:
            async for event in events:
                if event.HasField("accepted"):
                    reply.request_id = event.accepted.request_id
                elif event.HasField("response"):
                    reply.responses.append(event.response)
        reply.responses.sort(key=lambda response: response.index)
        return reply

    async def GenerateStream(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with _told(context), aclosing(self._generate(request, context, True)) as events:
            async for event in events:
                try:
                    async with asyncio.timeout(STALLED_S):
                        await context.write(event)
                except TimeoutError:
                    message = f"the client has read nothing for {STALLED_S:g} s"
                    raise Refusal(grpc.StatusCode.CANCELLED, message, code="client_stalled") from None

    def _generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, stream: bool
    ) -> AsyncGenerator[pb.GenerateEvent]:
        return self._backend.generate(request, stream=stream, timeout=context.time_remaining())

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortReply:
        async with _told(context):
            return pb.AbortReply(was_live=await self._backend.abort(request.request_id))

    async def Stats(self, request: pb.StatsRequest, context: grpc.aio.ServicerContext) -> pb.StatsReply:
        async with _told(context):
            return pb.StatsReply(replicas=self._backend.stats(request.after_step))

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeReply:
        async with _told(context):
            return await self._backend.tokenize(request)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizeReply:
        async with _told(context):
            return await self._backend.detokenize(request)

    async def Terminate(self, request: pb.TerminateRequest, context: grpc.aio.ServicerContext) -> pb.TerminateReply:
        self._backend.terminate(now=request.now)
        return pb.TerminateReply()


class _told:
    """What goes wrong inside becomes the call's status."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            refusal = refusal_of(error)
            await self._context.abort(refusal.status, refusal.message[:MAX_MESSAGE], errors.to_metadata(refusal))


def refusal_of(error: Exception) -> Refusal:
    """What to tell whoever asked; what is no fault of theirs is logged."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ValueError | TypeError | OverflowError):
        return errors.invalid(str(error), param=errors.field_in(str(error)))
    log.error("a request failed", exc_info=error)
    return Refusal(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


def seconds_of(timeout: float | None) -> float | None:
    """A timeout as gRPC takes it; None is no limit."""
    return None if timeout is None else min(timeout, LONGEST_S)


def check_keys(keys: Iterable[str]) -> None:
    """ValueError, which does not say it, for a key that no header could bring."""
    for key in keys:
        if not key:
            raise ValueError("an API key is empty")
        if not _KEY.fullmatch(key):
            raise ValueError("an API key has a character that is not ASCII, or a space or newline at an end")


def key_fits(authorization: str | None, keys: Sequence[str]) -> bool:
    """Whether an Authorization header, "Bearer KEY", brings one of `keys`; compared in constant time."""
    scheme, _, given = (authorization or "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    fits = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]  # all, whatever the first says
    return is_bearer and any(fits)


class _KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets in who brings a key; health checks need none."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = dict(details.invocation_metadata or ())
        is_open = details.method.startswith("/grpc.health.")
        if is_open or key_fits(errors.text_of(metadata.get("authorization")), self._keys):
            return await continuation(details)
        return _refuse_key


async def _no_key(_request: Any, context: grpc.aio.ServicerContext) -> Any:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong")


_refuse_key = grpc.unary_unary_rpc_method_handler(_no_key)


def address_of(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server:
    """A `Backend` on a port, with the standard health and reflection services."""

    def __init__(self, backend: Backend, host: str, port: int, api_keys: Sequence[str] = ()) -> None:
        """port: 0 is any free one. OSError if it is taken."""
        interceptors = [_KeyInterceptor(api_keys)] if api_keys else []
        # Without so_reuseport a second server on the same port fails instead of sharing it.
        options = (*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        fastgen_pb2_grpc.add_FastGenServicer_to_server(Service(backend), self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            self.port = self._server.add_insecure_port(address_of(host, port))
        except RuntimeError as error:
            raise OSError(f"{address_of(host, port)} cannot be listened on: {error}") from error
        self.address = address_of(host, self.port)

    async def start(self) -> None:
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, is_ready: bool) -> None:
        """What health checks are told."""
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Close the port, and break off what still runs."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(FINISHING_S)
