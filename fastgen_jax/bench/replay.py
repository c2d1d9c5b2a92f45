"""A trace on a simulated engine: latencies, and what a step costs the host as the run goes on."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from fastgen_jax.bench.drive import open_loop
from fastgen_jax.bench.load import Request
from fastgen_jax.bench.metrics import PROMPT_SLA, effective_throughput, summarize
from fastgen_jax.bench.simulator import SimulatorConfig, System
from fastgen_jax.progress import Advance

PARTS = 10


def replay(
    system: System,
    config: SimulatorConfig,
    requests: Sequence[Request],
    *,
    sla: float,
    prompt_sla: float = PROMPT_SLA,
    advance: Advance = lambda _: None,
) -> dict[str, Any]:
    """Serve the requests as they arrive: a `Summary`'s fields and what the run took.

    virtual_s: of the run. steps, preemptions, cached_share: of it; the last is the share of prompt tokens that were
        found in the prefix cache.
    host_us: microseconds of this machine's CPU that the scheduler took for a step, mean of each tenth of the steps.
    advance: told how many more requests have ended.
    ValueError, before any is served, if a request can never run.
    """
    engine = system.engine(config)
    for request in requests:
        engine.check(request)
    records = open_loop(engine, requests, advance)
    return {
        "summary": asdict(summarize(records)),
        "sla": sla,
        "effective": effective_throughput(records, sla, prompt_sla),
        "virtual_s": engine.now(),
        "steps": engine.num_steps,
        "preemptions": engine.num_preemptions,
        "cached_share": engine.num_cached_tokens / sum(record.num_prompt_tokens for record in records),
        "host_us": [seconds * 1e6 for seconds in means(engine.host_times, PARTS)],
    }


def means(values: Sequence[float], parts: int) -> list[float]:
    """The mean of each of `parts` equal parts of the values, in order; of fewer where there are fewer values."""
    parts = min(parts, len(values))
    bounds = [len(values) * i // parts for i in range(parts + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
