"""An engine without a model: the real scheduler, steps that only take time. For what stands in front of engines."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastgen_jax.scheduler import BlockPool, Scheduler
from fastgen_jax.scheduler import Sequence as Generation
from fastgen_jax.types import Delta, EngineStats, Response, SamplingParams, Timings

BLOCK_SIZE = 16
WORD = "word "


@dataclass(frozen=True)
class Speed:
    """How long a step takes, in seconds: for itself, and for each token."""

    step: float = 0.002
    token: float = 0.00001


class Reader:
    """A character is a token."""

    def encode(self, prompt: Any) -> list[int]:
        return [ord(c) % 256 for c in prompt] if isinstance(prompt, str) else list(prompt)

    def text(self, prompt: Any, params: SamplingParams) -> str:
        return prompt if isinstance(prompt, str) else ""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return WORD * len(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return WORD.encode()


@dataclass
class _Live:
    request_id: int
    seq: Generation
    params: SamplingParams
    on_delta: Any
    added: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    times: list[float] = field(default_factory=list)


class StubEngine:
    """What a replica uses of `Engine`. Every token is the same word, and EOS never comes."""

    default_params = SamplingParams()
    reader = Reader()
    tokenizer = reader

    def __init__(
        self,
        speed: Speed | None = None,
        *,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 256,
        max_model_len: int = 4096,
        num_blocks: int = 8192,
    ) -> None:
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_model_len = max_model_len
        self._speed = speed or Speed()
        self._pool = BlockPool(num_blocks, BLOCK_SIZE)
        self._scheduler = Scheduler(
            self._pool,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prefix_caching=True,
        )
        self._ids = itertools.count()
        self._live: dict[int, _Live] = {}
        self._done: list[Response] = []
        self._steps = self._tokens = self._decodes = self._generated = 0

    def add(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        token_ids: list[int] | None = None,
        on_delta: Any = None,
    ) -> int:
        params = params or self.default_params
        number = next(self._ids)
        seq = Generation(number, token_ids or self.reader.encode(prompt), params.max_tokens or 128, priority=priority)
        self._scheduler.check_can_run(seq)
        self._scheduler.add(seq)
        self._live[number] = _Live(number, seq, params, on_delta)
        return number

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._done)

    def step(self) -> list[Response]:
        plan = self._scheduler.schedule()
        if plan.rows:
            time.sleep(self._speed.step + self._speed.token * plan.num_tokens)
            now = time.perf_counter()
            self._steps += 1
            self._tokens += plan.num_tokens
            for row in plan.rows:
                live = self._live[row.seq.seq_id]
                live.scheduled = live.scheduled or now
                self._decodes += row.num_new_tokens == 1 and row.start >= len(row.seq.prompt_token_ids)
            for seq in self._scheduler.update(plan, [1] * len(plan.rows)):
                self._take(self._live[seq.seq_id], now)
        done, self._done = self._done, []
        return done

    def _take(self, live: _Live, now: float) -> None:
        self._generated += 1
        live.times.append(now)
        if live.on_delta is not None:
            live.on_delta(Delta(0, WORD, (1,)))
        if live.seq.is_finished:
            self._close(live)

    def _close(self, live: _Live) -> None:
        del self._live[live.request_id]
        seq = live.seq
        timings = Timings(
            None if live.scheduled is None else live.scheduled - live.added,
            tuple(moment - live.added for moment in live.times),
            time.perf_counter() - live.added,
        )
        self._done.append(
            Response(
                WORD * len(seq.output_token_ids),
                tuple(seq.output_token_ids),
                tuple(seq.prompt_token_ids),
                seq.finish_reason or "abort",
                request_id=live.request_id,
                cached_tokens=seq.num_cached_tokens,
                timings=timings,
            )
        )

    def abort(self, request_id: int) -> bool:
        if (live := self._live.get(request_id)) is None:
            return False
        self._scheduler.finish(live.seq, "abort")
        self._close(live)
        return True

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            blocks=self._pool.num_blocks - 1,
            free_blocks=self._pool.num_free,
            steps=self._steps,
            tokens=self._tokens,
            decode_tokens=self._decodes,
            padding=0,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=self._generated,
            preemptions=0,
            dead_rows=0,
            compiled=0,
            compiled_after_warm_up=0,
        )
