"""A replica: one engine on a thread of its own, behind gRPC."""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING

import grpc

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import wire
from fastgen_jax.serving.balance import Load, Ticket
from fastgen_jax.serving.errors import Refusal, unavailable
from fastgen_jax.types import Delta, Response, SamplingParams

if TYPE_CHECKING:
    from fastgen_jax import Engine

log = logging.getLogger("fastgen_jax.serving")

KEPT_STEPS = 512
"""How many of the last steps a replica can tell about."""


class StepLog:
    """What an engine's steps were: the last `KEPT_STEPS` one by one, and the time of all by bucket."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._before = engine.stats()
        self._steps: deque[pb.Step] = deque(maxlen=KEPT_STEPS)
        self._by_bucket: dict[int, pb.BucketTime] = {}
        self._lock = threading.Lock()

    def note(self, seconds: float) -> None:
        """Take in the step that has just ended, on the engine's thread."""
        before, after = self._before, self._engine.stats()
        self._before = after
        if after.steps == before.steps:
            return
        decodes = after.decode_tokens - before.decode_tokens
        step = pb.Step(
            number=after.steps,
            time=time.time(),
            seconds=seconds,
            decode_tokens=decodes,
            prompt_tokens=after.tokens - before.tokens - decodes,
            padding=after.padding - before.padding,
        )
        bucket = after.tokens - before.tokens + step.padding
        with self._lock:
            self._steps.append(step)
            total = self._by_bucket.setdefault(bucket, pb.BucketTime(tokens=bucket))
            total.steps += 1
            total.seconds += seconds

    def fill(self, stats: pb.ReplicaStats, after_step: int) -> None:
        """Add to `stats` the steps after a number, and the times."""
        with self._lock:
            steps = list(itertools.takewhile(lambda step: step.number > after_step, reversed(self._steps)))
            stats.recent_steps.extend(reversed(steps))
            stats.bucket_times.extend(self._by_bucket[tokens] for tokens in sorted(self._by_bucket))


class Replica:
    """A `Backend` that generates. Until `serve` brings an engine it is starting, and refuses requests.

    model: its name to clients. on_terminate: called with `now` when a client wants the process to end.
    on_failure: called when the engine has stopped, after which every request is refused.
    """

    def __init__(
        self,
        model: str,
        *,
        replica_class: str = "",
        on_terminate: Callable[[bool], None] = lambda now: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.replica_class = replica_class
        self._on_terminate = on_terminate
        self._on_failure = on_failure
        self._state = "starting"
        self._started = time.time()
        self._live: dict[str, asyncio.Future[int]] = {}
        self._load = Load()
        self._idle = asyncio.Event()
        self._idle.set()

    def serve(self, engine: "Engine") -> None:
        """Begin to take requests. Called in the event loop."""
        from fastgen_jax import AsyncEngine

        loop = asyncio.get_running_loop()

        def fail(error: BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody asks any more
                loop.call_soon_threadsafe(self._fail, error)

        self._engine = engine
        self._steps = StepLog(engine)
        self._async_engine = AsyncEngine(engine, on_step=self._steps.note, on_failure=fail)
        self._state = "ready"

    def _fail(self, error: BaseException) -> None:
        self._state = "draining"
        log.error("the engine stopped: %r", error, exc_info=error)
        self._on_failure()

    async def generate(
        self, request: pb.GenerateRequest, *, stream: bool, timeout: float | None = None
    ) -> AsyncGenerator[pb.GenerateEvent]:
        self._check_model(request.model)
        name = request.request_id or uuid.uuid4().hex
        if name in self._live:
            raise ValueError(f"request_id={name!r:.80} is running already; give every request a name of its own")
        prompt = wire.from_prompt(request.prompt)
        params = self._engine.default_params.replace(**wire.from_params(request.params))
        ticket: Ticket | None = None
        number: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._live[name] = number
        self._idle.clear()
        try:
            token_ids, echo = await asyncio.to_thread(self._read, prompt, params)
            ticket = Ticket(len(token_ids), params.max_tokens, params.n)
            self._load.update(ticket)
            prompt = prompt if isinstance(prompt, str) else token_ids
            events = self._async_engine.events(
                prompt, params, priority=request.priority, token_ids=token_ids, on_added=number.set_result
            )
            async with aclosing(events) as batches:
                async for batch in batches:
                    if not batch:
                        accepted = pb.Accepted(request_id=name, num_prompt_tokens=len(token_ids), echo=echo)
                        yield pb.GenerateEvent(accepted=accepted)
                    self._count(ticket, batch)
                    for event in self._events(batch, stream):
                        yield event
            self._load.ended(ticket)
        except RuntimeError as error:
            if not self._async_engine.is_stopped:
                raise
            raise unavailable(f"the engine stopped: {error.__cause__ or error}", code="engine_stopped") from error
        finally:
            if ticket is not None:
                self._load.remove(ticket)
            del self._live[name]
            number.cancel()
            if not self._live:
                self._idle.set()

    def _count(self, ticket: Ticket, batch: list[Delta | Response]) -> None:
        """Keep the load true to what has come."""
        if num_new := sum(len(item.token_ids) for item in batch if isinstance(item, Delta)):
            ticket.prompt_tokens = 0
            ticket.num_generated += num_new
            self._load.update(ticket)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of prompts that are not computed yet, and of outputs that are still expected."""
        return self._load.outstanding

    @property
    def step_seconds(self) -> float:
        """For how long the engine has been at the step that it is at."""
        return self._async_engine.step_seconds

    def _read(self, prompt: wire.Prompt, params: SamplingParams) -> tuple[list[int], str]:
        """A prompt's token ids, and what echo puts in front of the answer."""
        token_ids = self._engine.reader.encode(prompt)
        text = prompt if isinstance(prompt, str) else token_ids
        return token_ids, self._engine.reader.text(text, params) if params.full_text else ""

    def _events(self, batch: list[Delta | Response], stream: bool) -> list[pb.GenerateEvent]:
        token_bytes = self._engine.reader.token_bytes
        events: list[pb.GenerateEvent] = []
        if stream:
            deltas = wire.merged(item for item in batch if isinstance(item, Delta))
            events += [pb.GenerateEvent(delta=wire.to_delta(delta, token_bytes)) for delta in deltas]
        responses = [item for item in batch if isinstance(item, Response)]
        return events + [pb.GenerateEvent(response=wire.to_response(item, token_bytes)) for item in responses]

    async def abort(self, request_id: str) -> bool:
        if (number := self._live.get(request_id)) is None:
            return False
        await asyncio.wait([number])
        return not number.cancelled() and await self._async_engine.abort(number.result())

    def stats(self, after_step: int) -> list[pb.ReplicaStats]:
        stats = pb.ReplicaStats(
            model=self.model, replica_class=self.replica_class, state=self._state, started=self._started
        )
        if self._state != "starting":
            engine = self._engine
            for name, value in asdict(engine.stats()).items():
                setattr(stats, name, value)
            stats.max_num_batched_tokens = engine.max_num_batched_tokens
            stats.max_num_seqs = engine.max_num_seqs
            stats.max_model_len = engine.max_model_len
            stats.default_params.CopyFrom(wire.to_params(asdict(engine.default_params)))
            stats.outstanding_tokens = self.outstanding_tokens
            self._steps.fill(stats, after_step)
        return [stats]

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply:
        self._check_model(request.model)
        token_ids = await asyncio.to_thread(self._engine.reader.encode, wire.from_prompt(request.prompt))
        return pb.TokenizeReply(token_ids=token_ids, max_model_len=self._engine.max_model_len)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
        self._check_model(request.model)
        return pb.DetokenizeReply(text=await asyncio.to_thread(self._engine.reader.decode, list(request.token_ids)))

    def terminate(self, *, now: bool) -> None:
        self._on_terminate(now)

    async def drain(self) -> None:
        """Refuse what comes, and wait until what runs has ended."""
        self._state = "draining"
        await self._idle.wait()

    async def close(self) -> None:
        """Abort what still runs and let go of the engine."""
        if self._state != "starting":
            self._state = "draining"
            await self._async_engine.close()

    def _check_model(self, model: str) -> None:
        if self._state != "ready":
            raise unavailable(f"this replica is {self._state}", code=self._state, retry_after=1)
        if model not in ("", self.model):
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"model={model!r:.80} is not served here; the model is {self.model}",
                param="model",
                code="model_not_found",
            )
