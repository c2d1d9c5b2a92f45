"""How long steps take: run steps of given rows on a `ModelRunner`, as the engine would, and time them."""

import itertools
import random
import time
from collections.abc import Callable

from fastgen_jax.batch import Settings
from fastgen_jax.runner import ModelRunner
from fastgen_jax.scheduler import Row, Sequence, StepPlan


class Steps:
    """Steps of made-up rows. They overwrite the KV pool's blocks, so run them while nobody uses it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._seq_ids = itertools.count(1 << 40)  # none of the engine's own

    def plan(self, rows: list[tuple[int, int]]) -> StepPlan:
        """A step of rows of (new tokens, tokens before them), each sampled.

        Where the pool has too few blocks, later rows share those of earlier ones.
        """
        block_size = self._runner.programs.layout.block_size
        blocks = itertools.cycle(range(1, self._runner.num_blocks))
        planned = []
        for slot, (num_new, context) in enumerate(rows):
            seq = Sequence(next(self._seq_ids), self._prompt(context + num_new), max_tokens=1, slot=slot)
            seq.block_table = list(itertools.islice(blocks, -(-(context + num_new) // block_size)))
            planned.append(Row(seq, context, num_new, True))
        return StepPlan(planned)

    def run(self, plan: StepPlan, times: int = 1) -> float:
        """Run a step so many times and wait for the last; seconds until the last was dispatched."""
        start = time.perf_counter()
        for _ in range(times):
            pending = self._runner.dispatch(
                plan,
                lambda seq: Settings(num_prompt_tokens=len(seq.prompt_token_ids)),
                report=False,
                wants_prompt=lambda _: False,
            )
        dispatched = time.perf_counter() - start
        pending.tokens()
        return dispatched

    def seconds(
        self, rows: list[tuple[int, int]], repeats: int = 3, pick: Callable[[list[float]], float] = min
    ) -> float:
        """Seconds of a step of such rows, from dispatch to its tokens: one of `repeats` after one unmeasured.

        pick: which; the least, since what else the machine does can only add to it.
        """
        plan = self.plan(rows)
        self.run(plan)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.run(plan)
            times.append(time.perf_counter() - start)
        return pick(times)

    def _prompt(self, num_tokens: int) -> list[int]:
        rng = random.Random(num_tokens)
        return [rng.randrange(self._runner.model.config.vocab_size) for _ in range(num_tokens)]
