"""The router: requests to the replicas that will be done with them soonest, and elsewhere if one is lost."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import grpc

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import wire
from fastgen_jax.serving.balance import Balancer, Ticket, estimated_tokens, prompt_chunks
from fastgen_jax.serving.errors import Refusal, invalid, unavailable
from fastgen_jax.serving.metrics import Metrics, Observed
from fastgen_jax.serving.remote import RemoteReplica

log = logging.getLogger("fastgen_jax.serving")

DEFAULT_CLASS = "interactive"
"""What a request is of that names no class. A replica of no class serves every one."""

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
    request_timeout: seconds for a request that names no deadline of its own.
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
        metrics: Metrics | None = None,
        log_prompts: bool = False,
        on_terminate: Callable[[bool], None] = lambda now: None,
    ) -> None:
        self._api_key = api_key
        self.replicas = [RemoteReplica(address, api_key) for address in addresses]
        self.metrics = metrics or Metrics()
        self.metrics.watch(_Live(lambda: self.stats(after_step=1 << 62)))
        self.max_queue = max_queue
        self._request_timeout = request_timeout
        self._log_prompts = log_prompts
        self._on_terminate = on_terminate
        self._balancer = Balancer()
        self._waiting = Counter[str]()
        self._live: dict[str, _Asked] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._watches: dict[RemoteReplica, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Look at every replica once, and keep looking."""
        await asyncio.gather(*(replica.look() for replica in self.replicas))
        self._watches = {replica: asyncio.create_task(replica.watch()) for replica in self.replicas}

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Have these replicas from now on. One that is left out gets no new request, and finishes what it has."""
        known = {replica.address: replica for replica in (*self._watches, *self.replicas)}
        self.replicas = [known.get(address) or RemoteReplica(address, self._api_key) for address in addresses]
        for replica in self.replicas:
            if replica not in self._watches:
                self._watches[replica] = asyncio.create_task(replica.watch())
        for replica in [replica for replica in self._watches if replica not in self.replicas and not len(replica.load)]:
            self._watches.pop(replica).cancel()
            self._closing.add(task := asyncio.create_task(replica.close()))
            task.add_done_callback(self._closing.discard)

    @property
    def is_ready(self) -> bool:
        """Whether every model that is known has a replica that takes requests."""
        return (
            not self._draining
            and bool(self.models)
            and all(any(r.state == "ready" for r in self.replicas if r.stats.model == model) for model in self.models)
        )

    @property
    def is_draining(self) -> bool:
        """Whether it finishes what runs and takes nothing new."""
        return self._draining

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the replicas, those of lost ones included."""
        return list(dict.fromkeys(replica.stats.model for replica in self.replicas if replica.stats.model))

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
            asked.replica = self._choose(asked.message, asked.chunks, tried)
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

    def _choose(
        self, request: pb.GenerateRequest, chunks: Sequence[int], tried: Sequence[RemoteReplica]
    ) -> RemoteReplica:
        wanted = request.replica_class or DEFAULT_CLASS
        ours = [replica for replica in self.replicas if request.model in ("", replica.stats.model)]
        fit = [replica for replica in ours if replica.stats.replica_class in ("", wanted)]
        if not fit:
            classes = sorted({replica.stats.replica_class for replica in ours})
            raise invalid(
                f"replica_class={wanted!r:.80} is not served; the classes are {', '.join(classes)}",
                param="replica_class",
            )
        loads = {replica: replica.load for replica in fit if replica.state == "ready" and replica not in tried}
        if not loads:
            raise unavailable(
                f"no replica of {request.model or 'the model'} is ready: {_states(fit)}",
                code="no_replica",
                retry_after=5,
            )
        return self._balancer.choose(loads, chunks)

    def _model(self, name: str) -> str:
        """The model's name; what may be left out where there is one model."""
        if self._draining:
            raise _shutting_down()
        models = self.models
        if name in models:
            return name
        if not models:
            raise unavailable(
                f"no replica has been reached yet: {_states(self.replicas)}", code="starting", retry_after=5
            )
        if not name and len(models) == 1:
            return models[0]
        choices = ", ".join(models)
        if not name:
            raise invalid(f"the request names no model; the models are {choices}", param="model")
        raise Refusal(
            grpc.StatusCode.NOT_FOUND,
            f"model={name!r:.80} is not served here; the models are {choices}",
            param="model",
            code="model_not_found",
        )

    def _check_queue(self, model: str) -> None:
        waiting = self._waiting[model]
        if waiting >= self.max_queue:
            self.metrics.rejected(model, "queue_full")
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{waiting} requests wait for {model} already, and no more may (--max-queue)",
                code="queue_full",
                retry_after=self.metrics.seconds_until_begun(waiting),
            )

    async def abort(self, request_id: str) -> bool:
        asked = self._live.get(request_id)
        return asked is not None and asked.replica is not None and await asked.replica.abort(request_id)

    def stats(self, after_step: int) -> list[pb.ReplicaStats]:
        return [self._stats_of(replica, after_step) for replica in self.replicas]

    def _stats_of(self, replica: RemoteReplica, after_step: int) -> pb.ReplicaStats:
        stats = pb.ReplicaStats()
        stats.CopyFrom(replica.stats)
        stats.outstanding_tokens = replica.load.outstanding
        stats.recent_steps.extend(step for step in replica.steps if step.number > after_step)
        return stats

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeReply:
        return await self._any_of(self._model(request.model)).tokenize(request)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeReply:
        return await self._any_of(self._model(request.model)).detokenize(request)

    def _any_of(self, model: str) -> RemoteReplica:
        ours = [replica for replica in self.replicas if replica.stats.model == model]
        if ready := [replica for replica in ours if replica.state == "ready"]:
            return min(ready, key=lambda replica: replica.load.outstanding)
        raise unavailable(f"no replica of {model} is ready: {_states(ours)}", code="no_replica", retry_after=5)

    def terminate(self, *, now: bool) -> None:
        self._on_terminate(now)

    async def drain(self) -> None:
        """Refuse what comes, and wait until what runs has ended."""
        self._draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End what still runs, and let go of the replicas, which go on."""
        self._draining = self._closed = True
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in {*self._watches, *self.replicas}), *self._closing)


def _shutting_down() -> Refusal:
    return unavailable("the server is shutting down", code="draining", retry_after=10)


class _Live:
    """What `make` makes, each time it is iterated."""

    def __init__(self, make: Callable[[], list[pb.ReplicaStats]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[pb.ReplicaStats]:
        return iter(self._make())


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


def _states(replicas: Sequence[RemoteReplica]) -> str:
    return ", ".join(f"{replica.address} is {replica.state}" for replica in replicas) or "there are none"
