"""Doubles and helpers for tests of what stands in front of engines: replicas that a test moves, slow engines, calls."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from scripted import tokens

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import fastgen_pb2_grpc, wire
from fastgen_jax.serving.balance import Load
from fastgen_jax.serving.errors import Refusal, unavailable

ENDLESS = {"max_tokens": None}


def request(prompt: Any = "hello", **fields: Any) -> pb.GenerateRequest:
    """A request; `fields` are its own, or those of `SamplingParams`."""
    own = {name: fields.pop(name) for name in ("request_id", "model", "replica_class", "priority") if name in fields}
    return pb.GenerateRequest(prompt=wire.to_prompt(prompt), params=wire.to_params(fields), **own)


def kinds(events: list[pb.GenerateEvent]) -> list[str]:
    return [event.WhichOneof("kind") for event in events]


def text_of(events: list[pb.GenerateEvent]) -> str:
    """What the deltas say."""
    return "".join(event.delta.text for event in events)


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], Any]) -> None:
    """`until`, where there are no coroutines."""
    asyncio.run(until(condition))


class Stub:
    """A gRPC client of `address`, for a test to be exact with."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self.raw = fastgen_pb2_grpc.FastGenStub(self.channel)

    async def __aenter__(self) -> "Stub":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def generate(self, asked: pb.GenerateRequest, **options: Any) -> pb.GenerateReply:
        return await self.raw.Generate(asked, metadata=self.metadata, **options)

    async def stream(self, asked: pb.GenerateRequest, **options: Any) -> list[pb.GenerateEvent]:
        return [event async for event in self.raw.GenerateStream(asked, metadata=self.metadata, **options)]


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def slowed(engine: Any, seconds: float = 0.002) -> Any:
    """`engine`, scripted, with tokens that take time, so that what is done meanwhile is done during a request."""
    runner = vars(engine)["_runner"]
    script = runner.script

    def slow(seq: Any, index: int) -> int:
        time.sleep(seconds)
        return script(seq, index)

    runner.script = slow
    return engine


class Gate:
    """A script that says "x" without end, once it is open."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def __call__(self, seq: Any, index: int) -> int:
        assert self._opened.wait(60)
        return tokens("x")[0]

    def open(self) -> None:
        self._opened.set()


class FakeReplica:
    """To a router what a `RemoteReplica` is; a test makes every move of it.

    calls: what each running request is about to be told. tried: every request that has come.
    is_gone: it has died, and nobody knows yet.
    """

    def __init__(self, address: str, *, model: str = "tiny", replica_class: str = "") -> None:
        self.address = address
        self.load = Load()
        self.steps: deque[pb.Step] = deque()
        self.stats = pb.ReplicaStats(model=model, replica_class=replica_class, address=address, state="ready")
        self.calls: dict[str, asyncio.Queue[Any]] = {}
        self.tried: list[str] = []
        self.timeouts: list[float | None] = []
        self.is_gone = False
        self._told: dict[str, list[str]] = {}

    @property
    def state(self) -> str:
        return self.stats.state

    async def generate(
        self, asked: pb.GenerateRequest, *, stream: bool, timeout: float | None
    ) -> AsyncGenerator[pb.GenerateEvent]:
        name = asked.request_id
        self.tried.append(name)
        self.timeouts.append(timeout)
        if self.is_gone:
            self.stats.state = "lost"
            raise LOST
        moves = self.calls[name] = asyncio.Queue()
        self._told[name] = []
        try:
            while (move := await moves.get()) is not None:
                if isinstance(move, Exception):
                    raise move
                yield move
        finally:
            del self.calls[name]

    def advance(self, name: str) -> bool:
        """Accept a request, or give it its next token; whether it was a token."""
        told = self._told[name]
        told.append(f"{self.address}{len(told)} " if told else "")
        is_token = len(told) > 1
        accepted = pb.Accepted(request_id=name, num_prompt_tokens=7)
        delta = pb.Delta(text=told[-1], token_ids=[len(told)])
        event = pb.GenerateEvent(delta=delta) if is_token else pb.GenerateEvent(accepted=accepted)
        self.calls[name].put_nowait(event)
        return is_token

    def finish(self, name: str, reason: str = "stop") -> None:
        """End a request with what it has been told."""
        if not self._told[name]:
            self.advance(name)
        text, num_tokens = "".join(self._told[name]), len(self._told[name]) - 1
        response = pb.Response(text=text, token_ids=range(num_tokens), finish_reason=reason)
        self.calls[name].put_nowait(pb.GenerateEvent(response=response))
        self.calls[name].put_nowait(None)

    def fail(self, name: str, refusal: Refusal) -> None:
        self.calls[name].put_nowait(refusal)

    def die(self) -> None:
        """All at once, and everybody knows."""
        self.stats.state = "lost"
        for name in self.calls:
            self.fail(name, LOST)

    async def abort(self, name: str) -> bool:
        if name in self.calls:
            self.finish(name, "abort")
        return name in self.calls

    async def close(self) -> None:
        pass


LOST = unavailable("the replica that ran this request was lost", code="replica_lost")


class Asking:
    """A client of a backend: one request, and what it has heard so far."""

    def __init__(self, backend: Any, asked: pb.GenerateRequest, *, stream: bool, timeout: float | None = None) -> None:
        self.asked, self.stream = asked, stream
        self.events: list[pb.GenerateEvent] = []
        self.error: Refusal | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(backend, timeout))

    async def _run(self, backend: Any, timeout: float | None) -> None:
        try:
            told = backend.generate(self.asked, stream=self.stream, timeout=timeout)
            async with aclosing(told) as events:
                async for event in events:
                    self.events.append(event)
        except Refusal as refusal:
            self.error = refusal

    @property
    def has_seen_answer(self) -> bool:
        return any(kind != "accepted" for kind in kinds(self.events))
