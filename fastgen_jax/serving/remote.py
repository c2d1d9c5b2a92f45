"""A replica as a router sees it: a connection, its last word, and what it has been sent."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator

import grpc

from fastgen_jax.serving import errors, fastgen_pb2_grpc
from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.balance import Load
from fastgen_jax.serving.errors import Refusal
from fastgen_jax.serving.replica import KEPT_STEPS
from fastgen_jax.serving.service import CHANNEL_OPTIONS, seconds_of

log = logging.getLogger("fastgen_jax.serving")

POLL_S = 0.25
"""Between two looks at a replica."""

SILENCE_S = 1.0
"""How long a replica may take to say how it is; twice in a row, and it counts as lost."""

GIVEN_UP_S = 10.0
"""After so long without a word from a lost replica, all its requests end; those that told nothing end at once."""

LOST = "lost"

_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""How calls end whose connection or server ends; a replica that refuses a request says why with a code."""


class RemoteReplica:
    """One replica of a router's. `watch` has to run for it to be found and found again.

    address: host:port. state: "starting", "ready", "draining", or "lost" (not to be reached, or not yet).
    """

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.address = address
        self.load = Load()
        self.stats = pb.ReplicaStats(address=address, state=LOST)
        self.steps: deque[pb.Step] = deque(maxlen=KEPT_STEPS)
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = fastgen_pb2_grpc.FastGenStub(self._channel)
        self._calls: dict[grpc.aio.Call, bool] = {}  # whether the client has seen something of the answer
        self._look_now = asyncio.Event()
        self._silences = 0
        self._last_word = 0.0

    @property
    def state(self) -> str:
        return self.stats.state

    async def watch(self) -> None:
        """Ask it how it is, for ever."""
        while True:
            await self.look()
            self._look_now.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), POLL_S)

    async def look(self) -> None:
        """Ask it once."""
        last = self.steps[-1].number if self.steps else 0
        try:
            reply = await self._stub.Stats(pb.StatsRequest(after_step=last), timeout=SILENCE_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            self._silences += 1
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED or self._silences > 1:
                self._lost(error.details() or error.code().name)
            return
        self._silences = 0
        self._last_word = time.monotonic()
        if len(reply.replicas) != 1:
            self._lost("it is a router; name its replicas instead")
            return
        self._take(reply.replicas[0])

    def _take(self, stats: pb.ReplicaStats) -> None:
        if stats.started != self.stats.started:  # another process than before
            self.load.forget()
            if self.steps:  # so it was asked for steps after another's last one; the next look brings them all
                self.steps.clear()
                stats.ClearField("recent_steps")
        self.steps.extend(stats.recent_steps)
        stats.ClearField("recent_steps")
        stats.address = self.address
        if stats.state != self.state:
            log.info("replica %s is %s", self.address, stats.state, extra={"replica": self.address})
        self.stats = stats

    def _lost(self, why: str) -> None:
        """Take no more requests to it, and break off those that can be tried elsewhere."""
        if self.state != LOST:
            log.warning("replica %s is lost: %s", self.address, why, extra={"replica": self.address})
        self.stats.state = LOST
        self.stats.running = self.stats.waiting = 0  # as far as one knows
        self.stats.free_blocks = self.stats.blocks
        is_given_up = time.monotonic() - self._last_word > GIVEN_UP_S
        for call, has_told in list(self._calls.items()):
            if is_given_up or not has_told:
                call.cancel()

    async def generate(
        self, request: pb.GenerateRequest, *, stream: bool, timeout: float | None
    ) -> AsyncGenerator[pb.GenerateEvent]:
        """Its events; a `Refusal` of its own, or code "replica_lost" if it went away. Closing it aborts the request.

        stream: the client sees events as they come, so that it cannot be tried elsewhere after the first of them.
        """
        call = self._stub.GenerateStream(request, timeout=seconds_of(timeout), metadata=self._metadata)
        self._calls[call] = False
        try:
            async for event in call:
                if stream and not event.HasField("accepted"):
                    self._calls[call] = True
                yield event
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise _lost_refusal() from None
        finally:
            del self._calls[call]
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        return (await self._ask(self._stub.Abort, pb.AbortRequest(request_id=request_id))).was_live

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply:
        return await self._ask(self._stub.Tokenize, request)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
        return await self._ask(self._stub.Detokenize, request)

    async def close(self) -> None:
        """Break off what runs there, and the connection."""
        for call in list(self._calls):
            call.cancel()
        await self._channel.close()

    async def _ask(self, method, request):  # type: ignore[no-untyped-def]
        try:
            return await method(request, timeout=30, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise _lost_refusal() from None

    def _refusal(self, error: grpc.aio.AioRpcError) -> Refusal:
        refusal = errors.from_rpc(error)
        reset = error.code() == grpc.StatusCode.INTERNAL and "RST_STREAM" in (error.details() or "")
        if refusal.code is None and (error.code() in _BROKEN or reset):
            self._lost(refusal.message)
            self._look_now.set()
            return _lost_refusal()
        return refusal


def _is_cancelled() -> bool:
    """Whether somebody has cancelled this task, and not its call alone, as `_lost` and `close` do."""
    return (task := asyncio.current_task()) is None or task.cancelling() > 0


def _lost_refusal() -> Refusal:
    return errors.unavailable("the replica that ran this request was lost", code="replica_lost")
