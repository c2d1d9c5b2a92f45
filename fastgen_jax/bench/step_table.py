"""Measures a `StepTable` on an engine."""

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastgen_jax.bench.machine import about
from fastgen_jax.bench.measured_steps import Curve, MeasuredSteps, StepTable, interpolate
from fastgen_jax.bench.simulator import SimulatorConfig
from fastgen_jax.bench.step_model import padded
from fastgen_jax.progress import Advance
from fastgen_jax.scheduler import Row, Sequence
from fastgen_jax.step_times import Steps
from fastgen_jax.types import SamplingParams

if TYPE_CHECKING:
    from fastgen_jax import Engine

REPEATS = 5
SETTLING_STEPS, COUNTED_STEPS = 8, 24
SHORT_CONTEXT = 32
MANY_ROWS = 32
"""Tokens before a decode, and decodes in a step, where their number does not matter much."""

SHORTEST = SHORT_CONTEXT + SETTLING_STEPS + COUNTED_STEPS + 3
"""The least max_model_len: a prompt, the steps that are counted, and that none of them is a sequence's last."""

FEW_TOKENS, MANY_TOKENS = 16, 64
"""Of a short prompt, and of several such together."""


def num_measurements(engine: "Engine") -> int:
    """How often `measure_table` tells of its progress."""
    measuring = _Measuring(engine, lambda _: None)
    return 8 + len(measuring.buckets) + len(measuring.row_buckets) + 2


def measure_table(engine: "Engine", advance: Advance = lambda _: None) -> dict[str, Any]:
    """The step table of an idle engine, as `StepTable.to_json` gives it. Takes some 100 steps.

    It overwrites the engine's KV pool and forgets its prefix cache.
    """
    if engine.has_work:
        raise ValueError("a step table is measured on an idle engine; step until has_work is False")
    if engine.max_model_len < SHORTEST:
        raise ValueError(f"max_model_len={engine.max_model_len} is too short to time; it takes {SHORTEST}")
    measuring = _Measuring(engine, advance)
    try:
        pair_s = measuring.pair_s()
        table = StepTable(
            bucket_s=((1, 0.0),),
            row_s=((1, 0.0),),
            key_s=measuring.key_s(),
            pair_s=pair_s,
            prompt_s=measuring.prompt_s(),
            tile_tokens=measuring.tile_tokens(pair_s),
            step_s=0.0,
            step_row_s=0.0,
            **measuring.sizes(),
            about=about(),
        )
        table = replace(table, bucket_s=measuring.bucket_s(table))
        table = replace(table, row_s=measuring.row_s(table))
        return replace(table, **measuring.beyond(table)).to_json()
    finally:
        engine._scheduler.forget_cache()


class _Measuring:
    """The parts of a table, one from another."""

    def __init__(self, engine: "Engine", advance: Advance) -> None:
        runner = engine._runner
        self._engine, self._advance = engine, advance
        self._steps = Steps(runner)
        self.buckets, self.row_buckets = runner.programs.buckets, runner.programs.row_buckets
        self.longest = engine.max_model_len - 1

    def seconds(self, rows: list[tuple[int, int]]) -> float:
        """Of a step of rows of (new tokens, tokens before them): the median, for what is simulated is no best case."""
        seconds = self._steps.seconds(rows, REPEATS, statistics.median)
        self._advance(1)
        return seconds

    def pair_s(self) -> float:
        """From a chunk of a prompt at its beginning, and the same one behind as many tokens as there is room for."""
        num_new = min(self.buckets[-1], (self.longest + 1) // 2)
        before = self.longest - num_new
        return max(self.seconds([(num_new, before)]) - self.seconds([(num_new, 0)]), 0.0) / (num_new * before)

    def key_s(self) -> float:
        """From decodes at a short and at a long context."""
        num_rows = min(MANY_ROWS, self.row_buckets[-1])
        short, long = ([(1, context - 1)] * num_rows for context in (SHORT_CONTEXT, self.longest))
        difference = max(self.seconds(long) - self.seconds(short), 0.0)
        return difference / (num_rows * (self.longest - SHORT_CONTEXT))

    def prompt_s(self) -> float:
        """From one short prompt, and as many tokens of several."""
        num_tokens = min(MANY_TOKENS, self.buckets[-1], self.longest)
        num_rows = min(max(num_tokens // FEW_TOKENS, 1), self.row_buckets[-1])
        few = num_tokens // num_rows
        difference = self.seconds([(few, 0)] * num_rows) - self.seconds([(few * num_rows, 0)])
        return max(difference, 0.0) / (num_rows - 1) if num_rows > 1 else 0.0

    def tile_tokens(self, pair_s: float) -> float:
        """From a few tokens of a prompt at its beginning, and behind as many as there is room for."""
        few = min(FEW_TOKENS, self.buckets[-1], (self.longest + 1) // 2)
        before = self.longest - few
        difference = self.seconds([(few, before)]) - self.seconds([(few, 0)])
        return min(max(difference / (before * pair_s), 0.0), self.buckets[-1]) if pair_s else 0.0

    def bucket_s(self, table: StepTable) -> Curve:
        return tuple((bucket, self._bucket_s(bucket, table)) for bucket in self.buckets)

    def _bucket_s(self, bucket: int, table: StepTable) -> float:
        rows = [(self.longest, 0)] * (bucket // self.longest)
        if rest := bucket % self.longest:
            rows.append((rest, 0))
        prompts_s = sum(table.prompt_row_s(0, num_new) for num_new, _ in rows if num_new > 1)
        return max(self.seconds(rows) - prompts_s, 0.0)

    def row_s(self, table: StepTable) -> Curve:
        curve = []
        for num_rows in self.row_buckets:
            step = self.seconds([(1, SHORT_CONTEXT - 1)] * num_rows)
            bucket = interpolate(table.bucket_s, padded(self.buckets, num_rows))
            curve.append((num_rows, step - bucket - num_rows * SHORT_CONTEXT * table.key_s))
        return tuple(curve)

    def sizes(self) -> dict[str, int]:
        runner = self._engine._runner
        return {
            "num_blocks": runner.num_blocks,
            "block_size": runner.programs.layout.block_size,
            "max_num_batched_tokens": self.buckets[-1],
            "max_num_seqs": self.row_buckets[-1],
            "max_model_len": self._engine.max_model_len,
        }

    def beyond(self, table: StepTable) -> dict[str, Any]:
        """step_s and step_row_s: what the running engine's steps of one row and of many take beyond the table."""
        config = SimulatorConfig(max_num_batched_tokens=table.max_num_batched_tokens, max_num_seqs=table.max_num_seqs)
        model = MeasuredSteps(table, config)
        many = min(MANY_ROWS, self.row_buckets[-1])
        rest = {}
        for num_rows in (1, many):
            seconds, context = self.engine_step(num_rows)
            row = Row(Sequence(0, [0], 1), context, 1, True)
            rest[num_rows] = seconds - model.device_seconds([row] * num_rows)
        step_row_s = (rest[many] - rest[1]) / (many - 1) if many > 1 else 0.0
        return {"step_s": rest[1] - step_row_s, "step_row_s": step_row_s}

    def engine_step(self, num_rows: int) -> tuple[float, int]:
        """Seconds of a step of so many decodes in the running engine: the median; and about their context."""
        engine = self._engine
        params = SamplingParams(max_tokens=self.longest - SHORT_CONTEXT, ignore_eos=True)
        vocab_size = engine._runner.model.config.vocab_size
        requests = [engine.add([(17 * i + 1) % vocab_size] * SHORT_CONTEXT, params) for i in range(num_rows)]
        before = engine.stats().generated_tokens
        while engine.stats().generated_tokens < before + num_rows * SETTLING_STEPS:
            engine.step()
        seconds = []
        for _ in range(COUNTED_STEPS):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        for request in requests:
            engine.abort(request)
        while engine.has_work:
            engine.step()
        self._advance(1)
        return statistics.median(seconds), SHORT_CONTEXT + SETTLING_STEPS + COUNTED_STEPS // 2
