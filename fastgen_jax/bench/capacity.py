"""What a model on a device can serve: the highest rate at an SLA, the replicas for a rate, the best settings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from fastgen_jax.bench.drive import open_loop
from fastgen_jax.bench.load import Lengths, Request, check_mean, make_requests, poisson, random_corpus
from fastgen_jax.bench.metrics import PROMPT_SLA, Record, check_sla, meets_sla, summarize
from fastgen_jax.bench.simulator import SimulatorConfig, System
from fastgen_jax.progress import Advance

PASSING_SHARE = 0.99
"""Of the requests, how many must meet the SLA for a rate to count as served."""

BISECTIONS = 8
MARGIN = 1.25
BUDGETS = (128, 256, 512, 768, 1024, 2048)
BLOCK_SIZES = (16, 32, 64, 128)

NUM_SEARCHES = 1 + len(BUDGETS) + len(BLOCK_SIZES)

Passes = Callable[[Sequence[Record]], bool]
Run = Callable[[float], Sequence[Record]]


def cut_requests(
    prompt_mean: float, output_mean: float, num_requests: int, max_model_len: int, seed: int
) -> list[Request]:
    """Requests of prompt + output <= `max_model_len`, outputs of at most twice their mean.

    ValueError if that leaves less for prompts than their mean.
    """
    check_mean(prompt_mean)
    check_mean(output_mean)
    longest_output = int(2 * output_mean)
    longest_prompt = max_model_len - longest_output
    if longest_prompt < prompt_mean:
        raise ValueError(
            f"prompts of {prompt_mean:g} tokens and outputs of up to {longest_output} are more than "
            f"max_model_len={max_model_len}; shorten them or choose a model with more positions"
        )
    prompt, output = Lengths(prompt_mean, longest_prompt), Lengths(output_mean, longest_output)
    return make_requests(num_requests, prompt, output, random_corpus(seed=seed), seed=seed)


def meets(sla: float, prompt_sla: float = PROMPT_SLA, share: float = PASSING_SHARE) -> Passes:
    """Whether at least `share` of the requests meet the SLA, in tokens/s."""
    check_sla(sla)

    def passes(records: Sequence[Record]) -> bool:
        return sum(meets_sla(record, sla, prompt_sla) for record in records) >= share * len(records)

    return passes


def max_rate(run: Run, passes: Passes) -> float:
    """The highest Poisson rate, in requests/s, whose run passes, by bisection; 0 if not even a low one does.

    run: from a rate to the records of a run; at an infinite one, all requests come at once. Looked for up to `MARGIN`
    times the throughput of that, in steps of 1/2**`BISECTIONS` of it: what comes faster can only pile up. If all at
    once pass, that throughput is the answer.
    """
    records = run(math.inf)
    throughput = summarize(records).requests_per_s
    if passes(records):
        return throughput
    low, high = 0.0, MARGIN * throughput
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(run(middle)) else (low, middle)
    return low


def poisson_runs(system: System, config: SimulatorConfig, requests: Sequence[Request], seed: int) -> Run:
    """From a rate to the records of these requests arriving at it, each time at a new engine."""
    return lambda rate: open_loop(system.engine(config), poisson(requests, rate, seed=seed))


def capacity(
    system: System,
    config: SimulatorConfig,
    requests: Sequence[Request],
    *,
    seed: int = 0,
    sla: float,
    prompt_sla: float = PROMPT_SLA,
    rate: float | None = None,
    advance: Advance = lambda _: None,
) -> dict[str, Any]:
    """The highest rate at an SLA, the replicas that `rate` takes, and what other budgets and block sizes would do.

    requests: what arrives, at Poisson times of `seed`. sla, prompt_sla: tokens/s of outputs and prompts.
    advance: told of each of the `NUM_SEARCHES` searches.
    Rates are requests/s of one replica. In the sweeps, None is a setting that cannot run.
    """
    passes = meets(sla, prompt_sla)
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate} requests/s is impossible; it must be above 0")

    def search(**changes: Any) -> float | None:
        try:
            return max_rate(poisson_runs(system, replace(config, **changes), requests, seed), passes)
        except ValueError:  # as a budget that holds no whole prompt, under a policy that splits none
            return None
        finally:
            advance(1)

    run = poisson_runs(system, config, requests, seed)
    highest = max_rate(run, passes)
    advance(1)
    budgets = {budget: search(**_budget(config, budget)) for budget in BUDGETS}
    block_sizes = {block_size: search(block_size=block_size) for block_size in BLOCK_SIZES}
    return {
        "config": asdict(config),
        "sla": sla,
        "prompt_sla": prompt_sla,
        "max_rate": highest,
        "at_max_rate": asdict(summarize(run(highest))) if highest else None,
        "rate": rate,
        "replicas": math.ceil(rate / highest) if rate and highest else None,
        "by_budget": budgets,
        "by_block_size": block_sizes,
    }


def _budget(config: SimulatorConfig, budget: int) -> dict[str, Any]:
    """A budget, and as many sequences as it has tokens for."""
    return {"max_num_batched_tokens": budget, "max_num_seqs": min(config.max_num_seqs, budget)}
