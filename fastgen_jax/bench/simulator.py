"""`SimulatedEngine`: the engine's own scheduler and block pool on a virtual clock, with a step model for a device."""

import itertools
import time
from array import array
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastgen_jax.bench.load import Request
from fastgen_jax.bench.metrics import Record
from fastgen_jax.bench.step_model import StepModel
from fastgen_jax.scheduler import BlockPool, Scheduler, Sequence, StepPlan
from fastgen_jax.types import POLICIES

SAMPLED_TOKEN = 0
"""What every simulated sample is: nothing depends on it."""


@dataclass(frozen=True)
class SimulatorConfig:
    """How a simulated engine runs; the names are those of `EngineConfig`.

    max_model_len: longest prompt + output; None is the model's own.
    policy: one of `fastgen_jax.types.POLICIES`.
    prefix_caching: share the KV of equal prefixes.
    overlap: dispatch a step before the tokens of the one before have come.
    pad: steps to the engine's buckets; otherwise they are of their exact size.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    max_model_len: int | None = None
    block_size: int = 64
    policy: str = "splitfuse"
    prefix_caching: bool = False
    overlap: bool = True
    pad: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is not known; choose {', '.join(POLICIES)}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name}={value!r} is out of range; for a simulation it must be a whole number from 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len} holds no prompt and token; it must be at least 2")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is more than max_num_batched_tokens={self.max_num_batched_tokens}: "
                "a step must have a token for every running sequence"
            )


class System(Protocol):
    """What can be simulated: a model on a device."""

    def engine(self, config: SimulatorConfig) -> "SimulatedEngine":
        """A new engine, its clock at 0; ValueError, one sentence, if the model does not fit."""
        ...


class _Pending(NamedTuple):
    """A dispatched step, and when its tokens reach the host."""

    plan: StepPlan
    done: float


class SimulatedEngine:
    """A benchmark's target in virtual time. It starts at 0 and stands still between calls.

    The loop is the engine's: plan and dispatch a step, then take in the tokens of the one before (overlapped), or of
    that one (plain). The device runs one step after the other; the host takes `StepModel.host_seconds` of each before
    it is dispatched. So a step costs the longer of the two where they overlap, and their sum where they do not.

    num_steps, num_tokens, num_cached_tokens, num_preemptions: so far, the tokens those computed and those of prompts
        found in the prefix cache.
    host_times: seconds of this machine's CPU that the scheduler took for each step.
    """

    def __init__(
        self,
        step_model: StepModel,
        config: SimulatorConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        window: int | None = None,
    ) -> None:
        """num_blocks: of the pool, the null block included. max_model_len: what counts if `config` has None.

        window: of a model all of whose layers have one, the widest.
        """
        self.config = config
        self.max_model_len = config.max_model_len or max_model_len
        self._model = step_model
        self.block_pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.block_pool,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            policy=config.policy,
            prefix_caching=config.prefix_caching,
            window=window,
        )
        self._clock = self._device_free = 0.0
        self._pending: _Pending | None = None
        self._seq_ids = itertools.count()
        self._sent: dict[int, float] = {}
        self._token_times: dict[int, list[float]] = {}
        self.num_steps = self.num_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.host_times = array("d")

    def now(self) -> float:
        """Virtual seconds."""
        return self._clock

    def wait(self, until: float) -> None:
        self._clock = max(self._clock, until)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pending is not None

    def check(self, request: Request) -> None:
        """ValueError, one sentence, if a request could never run."""
        self.scheduler.check_can_run(Sequence(-1, request.prompt_token_ids, max_tokens=request.max_tokens))

    def add(self, request: Request) -> int:
        """Queue a request; ValueError as `check`."""
        seq = Sequence(next(self._seq_ids), request.prompt_token_ids, max_tokens=request.max_tokens)
        self.scheduler.add(seq)
        self._sent[seq.seq_id] = self._clock
        self._token_times[seq.seq_id] = []
        return seq.seq_id

    def step(self) -> list[tuple[int, Record]]:
        """One turn of the engine's loop; the requests that have ended in it."""
        start = time.thread_time()
        plan = self.scheduler.schedule()
        host_time = time.thread_time() - start
        arrived = self._pending
        self._pending = self._dispatch(plan) if plan.rows else None
        if not self.config.overlap:
            arrived, self._pending = self._pending, None
        ended = []
        if arrived is not None:
            self._clock = max(self._clock, arrived.done)
            start = time.thread_time()
            updated = self.scheduler.update(arrived.plan, [SAMPLED_TOKEN] * len(arrived.plan.rows))
            host_time += time.thread_time() - start
            ended = self._take_in(updated)
        if self._pending is not None and not self.scheduler.has_work:  # nothing but dead rows
            self._clock, self._pending = max(self._clock, self._pending.done), None
        self.host_times.append(host_time)
        return ended

    def _dispatch(self, plan: StepPlan) -> _Pending:
        self._clock += self._model.host_seconds(plan.rows)
        self._device_free = max(self._device_free, self._clock) + self._model.device_seconds(plan.rows)
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.num_preemptions += len(plan.preempted)
        return _Pending(plan, self._device_free)

    def _take_in(self, updated: list[Sequence]) -> list[tuple[int, Record]]:
        """Note the time of each new token; the records of the sequences that have ended."""
        ended = []
        for seq in updated:
            times = self._token_times[seq.seq_id]
            times.append(self._clock)
            if seq.finish_reason is not None:
                del self._token_times[seq.seq_id]
                sent = self._sent.pop(seq.seq_id)
                self.num_cached_tokens += seq.num_cached_tokens
                ended.append((seq.seq_id, Record(sent, len(seq.prompt_token_ids), tuple(times))))
        return ended
