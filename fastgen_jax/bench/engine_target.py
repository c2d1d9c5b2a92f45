"""An `Engine` of this process as a benchmark's target, in real time."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastgen_jax.bench.load import Request
from fastgen_jax.bench.metrics import Record
from fastgen_jax.bench.result import Step
from fastgen_jax.types import EngineStats, Response, SamplingParams

if TYPE_CHECKING:
    from fastgen_jax import Engine


class EngineTarget:
    """Drives an engine nobody else uses. steps: what each step computed, in order."""

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self._sent: dict[int, float] = {}
        self.steps: list[Step] = []

    def check(self, requests: Sequence[Request]) -> None:
        """ValueError if the engine can never run one of the requests; none is run."""
        for request in requests:
            self._engine.abort(self._engine.add(request.prompt_token_ids, _params(request)))
        while self._engine.has_work:
            self._engine.step()

    def now(self) -> float:
        return time.perf_counter()

    def add(self, request: Request) -> int:
        sent = self.now()
        number = self._engine.add(request.prompt_token_ids, _params(request))
        self._sent[number] = sent
        return number

    def step(self) -> list[tuple[int, Record]]:
        before = self._engine.stats()
        responses = self._engine.step()
        after = self._engine.stats()
        if after.steps > before.steps:
            self.steps.append(_difference(self.now(), before, after))
        return [(response.request_id, self._record(response)) for response in responses]

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def wait(self, until: float) -> None:
        time.sleep(max(until - self.now(), 0.0))

    def _record(self, response: Response) -> Record:
        sent = self._sent.pop(response.request_id)
        times = tuple(sent + seconds for seconds in response.timings.tokens)
        error = "the engine aborted it" if response.finish_reason == "abort" else None
        return Record(sent, response.num_prompt_tokens, times, error)


def describe(engine: "Engine") -> dict[str, Any]:
    """An engine's configuration as it came out, and its device, for the results."""
    import jax

    pool = {"blocks": engine.stats().blocks, "max_model_len": engine.max_model_len}
    return {**asdict(engine.config), **pool, "device": jax.devices()[0].device_kind}


def _params(request: Request) -> SamplingParams:
    return SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)


def _difference(now: float, before: EngineStats, after: EngineStats) -> Step:
    decode = after.decode_tokens - before.decode_tokens
    tokens = after.tokens - before.tokens
    return Step(now, decode=decode, prompt=tokens - decode, padding=after.padding - before.padding)
