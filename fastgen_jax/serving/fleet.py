"""`Fleet`: the replicas behind a router, and which of them a request goes to."""

import asyncio
from collections.abc import Sequence

import grpc

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.balance import Balancer
from fastgen_jax.serving.errors import Refusal, invalid, unavailable
from fastgen_jax.serving.remote import RemoteReplica

DEFAULT_CLASS = "interactive"
"""What a request is of that names no class. A replica of no class serves every one."""

COME_BACK_S = 5.0
"""When to ask again that no replica takes just now."""


class Fleet:
    """Replicas by their addresses, which may change while requests run.

    replicas: those that get new requests, in order. api_key: what they want to see.
    """

    def __init__(self, addresses: Sequence[str], api_key: str | None = None) -> None:
        self._api_key = api_key
        self.replicas = [RemoteReplica(address, api_key) for address in addresses]
        self._balancer = Balancer()
        self._watches: dict[RemoteReplica, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

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

    async def close(self) -> None:
        """Break off what still runs, and let go of the replicas, which go on."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in {*self._watches, *self.replicas}), *self._closing)

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the replicas, those of lost ones included."""
        return list(dict.fromkeys(replica.stats.model for replica in self.replicas if replica.stats.model))

    @property
    def is_ready(self) -> bool:
        """Whether every model that is known has a replica that takes requests."""
        models = self.models
        return bool(models) and all(
            any(r.state == "ready" for r in self.replicas if r.stats.model == model) for model in models
        )

    def stats(self, after_step: int) -> list[pb.ReplicaStats]:
        """What each replica has last said of itself, with its steps after a number and what it has been sent."""
        return [_stats_of(replica, after_step) for replica in self.replicas]

    def find_model(self, name: str) -> str:
        """A model's name, which may be empty where there is one model. A `Refusal` if it is not served."""
        models = self.models
        if name in models:
            return name
        if not models:
            raise _come_back(f"no replica has been reached yet: {_states(self.replicas)}", "starting")
        if not name and len(models) == 1:
            return models[0]
        choices = ", ".join(models)
        if not name:
            raise invalid(f"the request names no model; the models are {choices}", param="model")
        sentence = f"model={name!r:.80} is not served here; the models are {choices}"
        self._check_all_are_known(sentence)
        raise Refusal(grpc.StatusCode.NOT_FOUND, sentence, param="model", code="model_not_found")

    def choose(
        self, model: str, replica_class: str, chunks: Sequence[int], tried: Sequence[RemoteReplica]
    ) -> RemoteReplica:
        """The replica, none of `tried`, for a prompt of these chunks; a `Refusal` if there is none.

        replica_class: empty is `DEFAULT_CLASS`.
        """
        wanted = replica_class or DEFAULT_CLASS
        ours = [replica for replica in self.replicas if replica.stats.model == model]
        fit = [replica for replica in ours if replica.stats.replica_class in ("", wanted)]
        if not fit:
            classes = sorted({replica.stats.replica_class for replica in ours})
            sentence = f"replica_class={wanted!r:.80} is not served; the classes are {', '.join(classes)}"
            self._check_all_are_known(sentence)
            raise invalid(sentence, param="replica_class")
        loads = {replica: replica.load for replica in fit if replica.state == "ready" and replica not in tried}
        if not loads:
            raise _come_back(f"no replica of {model} is ready: {_states(fit)}", "no_replica")
        return self._balancer.choose(loads, chunks)

    def idlest(self, model: str) -> RemoteReplica:
        """The replica of a model that has least to do; a `Refusal` if none is ready."""
        ours = [replica for replica in self.replicas if replica.stats.model == model]
        if ready := [replica for replica in ours if replica.state == "ready"]:
            return min(ready, key=lambda replica: replica.load.outstanding)
        raise _come_back(f"no replica of {model} is ready: {_states(ours)}", "no_replica")

    def _check_all_are_known(self, sentence: str) -> None:
        """A `Refusal` for now if there is a replica of which nobody knows yet what it serves."""
        if unknown := [replica.address for replica in self.replicas if not replica.stats.model]:
            raise _come_back(f"{sentence}, and {', '.join(unknown)} has not been reached yet", "starting")


def _stats_of(replica: RemoteReplica, after_step: int) -> pb.ReplicaStats:
    stats = pb.ReplicaStats()
    stats.CopyFrom(replica.stats)
    stats.outstanding_tokens = replica.load.outstanding
    stats.recent_steps.extend(step for step in replica.steps if step.number > after_step)
    return stats


def _come_back(message: str, code: str) -> Refusal:
    return unavailable(message, code=code, retry_after=COME_BACK_S)


def _states(replicas: Sequence[RemoteReplica]) -> str:
    return ", ".join(f"{replica.address} is {replica.state}" for replica in replicas) or "there are none"
