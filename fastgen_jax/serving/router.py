"""The router: requests to the replicas that will be done with them soonest, and elsewhere if one is lost."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import grpc

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import wire
from fastgen_jax.serving.balance import Ticket, estimated_tokens, prompt_chunks
from fastgen_jax.serving.errors import Refusal, invalid, unavailable
from fastgen_jax.serving.fleet import Fleet
from fastgen_jax.serving.metrics import Metrics, Observed
from fastgen_jax.serving.remote import RemoteReplica

log = logging.getLogger("fastgen_jax.serving")

MAX_QUEUE = 256
REQUEST_TIMEOUT_S = 600.0

LOST_CODES = ("replica_lost", "engine_stopped", "draining", "starting")
"""Why a request that has told nothing yet is tried elsewhere."""


@dataclass(eq=False)
class _Asked:
    """A request that has been let in.

    make_ticket: for each replica that it is tried on. deadline: when its time is up, by the monotonic clock.
    replica, ticket: where it runs, and what it counts for there.
    is_accepted, has_told: whether its client knows that it was taken in, and has seen something of the answer.
    has_begun: whether it has, or once had, a token.
    """

    message: pb.GenerateRequest
    stream: bool
    chunks: Sequence[int]
    make_ticket: Callable[[], Ticket]
    deadline: float
    observed: Observed
    ticket: Ticket
    replica: RemoteReplica | None = None
    is_accepted: bool = False
    has_told: bool = False
    has_begun: bool = False

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)


class Router:
    """A `Backend` in front of replicas.

    max_queue: requests of a model that may wait for their first token; the next is refused (RESOURCE_EXHAUSTED).
    request_timeout: seconds that a request may take; one with a deadline of its own, no longer than that either.
    api_key: what the replicas want to see.
    log_prompts: put the text of every request into the log.
    on_terminate: called with `now` when a client wants everything to end.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        max_queue: int = MAX_QUEUE,
        request_timeout: float = REQUEST_TIMEOUT_S,
        api_key: str | None = None,
        log_prompts: bool = False,
        on_terminate: Callable[[bool], None] = lambda now: None,
    ) -> None:
        self.fleet = Fleet(addresses, api_key)
        self.metrics = Metrics()
        self.metrics.watch(lambda: self.stats(after_step=1 << 62))
        self.max_queue = max_queue
        self._request_timeout = request_timeout
        self._log_prompts = log_prompts
        self._on_terminate = on_terminate
        self._waiting = Counter[str]()
        self._live: dict[str, _Asked] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = self._closed = False

    async def start(self) -> None:
        """Look at every replica once, and keep looking."""
        await self.fleet.start()

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests, and every model that is known has a replica that does."""
        return not self._draining and self.fleet.is_ready

    @property
    def is_draining(self) -> bool:
        """Whether it finishes what runs and takes nothing new."""
        return self._draining

    async def generate(
        self, request: pb.GenerateRequest, *, stream: bool, timeout: float | None = None
    ) -> AsyncGenerator[pb.GenerateEvent]:
        asked = self._let_in(request, stream, timeout)
        try:
            async with aclosing(self._with_retries(asked)) as events:
                async for event in events:
                    if not event.HasField("delta"):
                        asked.observed.event(event)
                    yield event
            asked.observed.ended()
        except Refusal as refusal:
            asked.observed.refused(refusal)
            raise
        finally:
            self._let_go(asked)

    def _let_in(self, request: pb.GenerateRequest, stream: bool, timeout: float | None) -> _Asked:
        model = self._model(request.model)
        name = request.request_id or uuid.uuid4().hex
        if name in self._live:
            raise invalid(f"request_id={name!r:.80} is running already; give every request a name of its own")
        prompt = _flat(wire.from_prompt(request.prompt))
        params = wire.from_params(request.params)
        self._check_queue(model)
        make_ticket = partial(Ticket, estimated_tokens(prompt), params.get("max_tokens"), params.get("n") or 1)
        asked = _Asked(
            _copy(request, name, model),
            stream,
            prompt_chunks(prompt),
            make_ticket,
            time.monotonic() + min(self._request_timeout, self._request_timeout if timeout is None else timeout),
            self.metrics.request(model, name),
            make_ticket(),
        )
        if self._log_prompts:
            log.info("prompt", extra={"request_id": name, "model": model, "prompt": prompt})
        self._live[name] = asked
        self._idle.clear()
        self._waiting[model] += 1
        return asked

    def _let_go(self, asked: _Asked) -> None:
        asked.observed.close()
        if not asked.has_begun:
            self._waiting[asked.message.model] -= 1
        del self._live[asked.message.request_id]
        if not self._live:
            self._idle.set()

    async def _with_retries(self, asked: _Asked) -> AsyncGenerator[pb.GenerateEvent]:
        """The events of the first replica that is not lost before it has told the client something.

        Without `stream` there are no deltas, and nothing is told before everything is there.
        """
        tried: list[RemoteReplica] = []
        while True:
            message = asked.message
            asked.replica = self.fleet.choose(message.model, message.replica_class, asked.chunks, tried)
            tried.append(asked.replica)
            held: list[pb.GenerateEvent] = []
            try:
                async with aclosing(self._on(asked.replica, asked)) as events:
                    async for event in events:
                        if event.HasField("accepted"):
                            if not asked.is_accepted:
                                asked.is_accepted = True
                                yield event
                        elif asked.stream:
                            asked.has_told = True
                            yield event
                        elif event.HasField("response"):
                            held.append(event)
            except Refusal as refusal:
                self._check_can_retry(asked, refusal)
                continue
            for event in held:
                yield event
            return

    def _check_can_retry(self, asked: _Asked, refusal: Refusal) -> None:
        """Raise what ends a request, if it cannot be tried elsewhere."""
        if refusal.code not in LOST_CODES:
            raise refusal
        if self._closed:
            raise _shutting_down() from refusal
        if asked.has_told:
            raise unavailable(
                f"the replica that ran this request was lost after {asked.ticket.num_generated} tokens; "
                "what has come is right, and asking again begins anew",
                code="replica_lost",
            ) from refusal
        name = asked.message.request_id
        log.info("tried elsewhere: %s", refusal.message, extra={"request_id": name, "model": asked.message.model})
        self.metrics.retried(asked.message.model)

    async def _on(self, replica: RemoteReplica, asked: _Asked) -> AsyncGenerator[pb.GenerateEvent]:
        """A replica's events, which keep its load and the metrics true."""
        asked.ticket = ticket = asked.make_ticket()
        replica.load.update(ticket)
        try:
            told = replica.generate(asked.message, stream=asked.stream, timeout=asked.seconds_left)
            async with aclosing(told) as events:
                async for event in events:
                    if event.HasField("accepted"):
                        ticket.prompt_tokens = event.accepted.num_prompt_tokens
                    elif event.HasField("delta"):
                        self._note(asked, event)
                    replica.load.update(ticket)
                    yield event
            replica.load.ended(ticket)
        except Refusal as refusal:
            if refusal.status == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Refusal(refusal.status, "the request's time is up", code="timeout") from refusal
            raise
        finally:
            replica.load.remove(ticket)

    def _note(self, asked: _Asked, event: pb.GenerateEvent) -> None:
        """New tokens."""
        asked.ticket.prompt_tokens = 0
        asked.ticket.num_generated += len(event.delta.token_ids)
        asked.observed.event(event)
        if not asked.has_begun and event.delta.token_ids:
            asked.has_begun = True
            self._waiting[asked.message.model] -= 1

    def _model(self, name: str) -> str:
        """The model's name; what may be left out where there is one model."""
        if self._draining:
            raise _shutting_down()
        return self.fleet.find_model(name)

    def _check_queue(self, model: str) -> None:
        waiting = self._waiting[model]
        if waiting >= self.max_queue:
            self.metrics.rejected(model, "queue_full")
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{waiting} requests wait for {model} already, and no more may (--max-queue)",
                code="queue_full",
                retry_after=self.metrics.seconds_until_begun(model, waiting),
            )

    async def abort(self, request_id: str) -> bool:
        asked = self._live.get(request_id)
        return asked is not None and asked.replica is not None and await asked.replica.abort(request_id)

    def stats(self, after_step: int) -> list[pb.ReplicaStats]:
        return self.fleet.stats(after_step)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply:
        return await self.fleet.idlest(self._model(request.model)).tokenize(request)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
        return await self.fleet.idlest(self._model(request.model)).detokenize(request)

    def terminate(self, *, now: bool) -> None:
        self._on_terminate(now)

    async def drain(self) -> None:
        """Refuse what comes, and wait until what runs has ended."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End what still runs, and let go of the replicas, which go on."""
        self._draining = self._closed = True
        await self.fleet.close()


def _shutting_down() -> Refusal:
    return unavailable("the server is shutting down", code="draining", retry_after=10)


def _copy(request: pb.GenerateRequest, name: str, model: str) -> pb.GenerateRequest:
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    copy.request_id, copy.model = name, model
    return copy


def _flat(prompt: wire.Prompt) -> str | Sequence[int]:
    """A prompt as one string, or its token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return prompt  # type: ignore[return-value]
    return "\n".join(f"{message['role']}\n{message['content']}" for message in prompt)  # type: ignore[index]
