"""Stage `gaps`: how long decodes wait between two tokens while a long prompt comes in beside them."""

import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

from fastgen_jax import Engine, SamplingParams
from fastgen_jax.batch import bucket_for, bucket_ladder
from fastgen_jax.bench.device.record import Stage
from fastgen_jax.bench.device.whole_engine import Session, compile_programs

SETTLING_STEPS = 8


def measure(stage: Stage, session: Session) -> None:
    """A row a number of decodes and budget: seconds between two tokens `before`, `during` and `after` the prompt."""
    sizes = session.sizes
    _measure_budget(stage, session, session.engine, sizes.budget, cut=True)
    if "engine" in vars(session):
        del session.engine  # makes room for another pool
    gc.collect()
    block_size = session.model.backend.DEFAULT_BLOCK_SIZE
    most_tokens = [sizes.gap_context + 8 * sizes.gap_steps] * max(sizes.gap_rows) + [sizes.max_model_len]
    reserve = max(sizes.gap_rows)  # what the scheduler keeps free for decodes before it lets the prompt in
    num_blocks = 1 + reserve + sum(-(-tokens // block_size) for tokens in most_tokens)
    _measure_budget(stage, session, session.new_engine(sizes.whole_budget, num_blocks), sizes.whole_budget, cut=False)


def _measure_budget(stage: Stage, session: Session, engine: Engine, budget: int, *, cut: bool) -> None:
    """cut: whether the prompt comes in chunks, whose last may be of any size."""
    sizes = session.sizes
    stage.check_time()
    few = bucket_for(bucket_ladder(budget), max(sizes.gap_rows) + 1)
    buckets = bucket_ladder(budget) if cut else sorted({few, budget})
    compile_programs(engine, [*(("backbone", bucket) for bucket in buckets), ("sample", few)])
    _gaps(session, engine, min(sizes.gap_rows))  # loads the programs
    for num_decodes in sizes.gap_rows:
        stage.check_time()
        stage.add(decodes=num_decodes, prompt=sizes.gap_prompt, budget=budget, **_gaps(session, engine, num_decodes))


def _gaps(session: Session, engine: Engine, num_decodes: int) -> dict[str, Any]:
    """`before`, `during` and `after`: seconds between steps that brought every decode a token.

    During: from the prompt's arrival to its first output token. compiled: programs that had to be, on the way.
    """
    sizes, compiled = session.sizes, engine.stats().compiled

    def add(num_prompt: int) -> int:
        endless = SamplingParams(max_tokens=sizes.max_model_len - num_prompt, ignore_eos=True)
        return engine.add(session.prompt(num_prompt), endless)

    requests = [add(sizes.gap_context) for _ in range(num_decodes)]
    steps = _timed_steps(engine, num_decodes)
    for _ in range(num_decodes + SETTLING_STEPS):  # of a prompt each at least
        next(steps)
    before = [gap for gap, _ in itertools.islice(steps, sizes.gap_steps)]
    requests.append(add(sizes.gap_prompt))
    during = []
    for gap, num_tokens in steps:
        during.append(gap)
        if num_tokens > num_decodes:
            break
    after = [gap for gap, _ in itertools.islice(steps, sizes.gap_steps)]
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    return {"before": before, "during": during, "after": after, "compiled": engine.stats().compiled - compiled}


def _timed_steps(engine: Engine, num_decodes: int) -> Iterator[tuple[float, int]]:
    """Step for ever; whenever `num_decodes` tokens or more have come: seconds since the last time, and how many.

    RuntimeError when there is no work left.
    """
    last, num_before = time.perf_counter(), engine.stats().generated_tokens
    while engine.has_work:
        engine.step()
        num_tokens = engine.stats().generated_tokens - num_before
        if num_tokens >= num_decodes:
            now = time.perf_counter()
            yield now - last, num_tokens
            last, num_before = now, num_before + num_tokens
    raise RuntimeError("the engine ran out of work before what was waited for: its pool is too small")
