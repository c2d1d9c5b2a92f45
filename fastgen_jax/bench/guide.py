"""A limit on the time per token, as the Dynamic SplitKV guide sets one: what each policy can serve within it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastgen_jax.bench.capacity import Run, cut_requests, max_rate, poisson_runs
from fastgen_jax.bench.grid import CONFIGS, MAX_MODEL_LEN, deployment
from fastgen_jax.bench.metrics import Record, percentile
from fastgen_jax.bench.simulator import SimulatorConfig
from fastgen_jax.types import POLICIES

SYSTEMS = (
    ("llama3-8b", "a100-80", 1),
    ("llama3-8b", "h100", 1),
    ("llama2-70b", "a100-80", 8),
    ("llama2-70b", "h100", 8),
)
"""Model, GPU and how many share it. 70B on 4 A100s takes longer than the limit for the step of a single sequence."""

TPOT_LIMIT_S = 0.025
PROMPT_MEAN, OUTPUT_MEAN, NUM_REQUESTS, SEED = 1200, 128, 400, 0
BUDGETS = (64, 128, 256, 512, 768)
"""Of SplitFuse: the limit decides, and the best one counts."""

HEAD = ("model, GPUs", "policy", "budget", "goodput/s", "at requests/s", "P90 TTFT", "P99 per token", "P99 gap")


def tpot_p99(records: Sequence[Record]) -> float:
    """P99 of the requests' mean seconds per token after the first."""
    return percentile([record.tpot for record in records], 99) or 0.0


def is_within(records: Sequence[Record]) -> bool:
    return tpot_p99(records) <= TPOT_LIMIT_S


def configs(policy: str) -> list[SimulatorConfig]:
    """What is tried of a policy."""
    config = CONFIGS[policy]
    if policy != POLICIES[0]:
        return [config]
    return [
        replace(config, max_num_batched_tokens=budget, max_num_seqs=min(budget, config.max_num_seqs))
        for budget in BUDGETS
    ]


def goodput(system: tuple[str, str, int], config: SimulatorConfig) -> float:
    """The highest Poisson rate, in requests/s, at which P99 of the time per token keeps the limit."""
    return max_rate(_runs(system, config), is_within)


def search(task: tuple[tuple[str, str, int], str]) -> dict[str, Any]:
    """The best of a policy's configurations on a system: its budget and its goodput."""
    system, policy = task
    found = [(goodput(system, config), config.max_num_batched_tokens) for config in configs(policy)]
    best, budget = max(found)
    return {"system": system, "policy": policy, "budget": budget, "goodput": best}


def compare(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each result of `search` with what its policy does at the rate that is the system's highest goodput."""
    rates = {
        one["system"]: max(other["goodput"] for other in found if other["system"] == one["system"]) for one in found
    }
    return [{**one, "rate": rates[one["system"]], **at_rate(one, rates[one["system"]])} for one in found]


def at_rate(one: dict[str, Any], rate: float) -> dict[str, float]:
    """Latencies in seconds at a rate; none where that is 0."""
    if not rate:
        return {}
    config = next(c for c in configs(one["policy"]) if c.max_num_batched_tokens == one["budget"])
    records = _runs(one["system"], config)(rate)
    return {
        "ttft_p90": percentile([record.ttft for record in records], 90) or 0.0,
        "tpot_p99": tpot_p99(records),
        "gap_p99": percentile([gap for record in records for gap in record.gaps], 99) or 0.0,
    }


def rows(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for one in found:
        model, gpu, tp = one["system"]
        name = f"{model}, {tp} {gpu}" if tp > 1 else f"{model}, {gpu}"
        times = (f"{one[key] * 1e3:,.0f} ms" if key in one else "-" for key in ("ttft_p90", "tpot_p99", "gap_p99"))
        yield name, one["policy"], str(one["budget"]), f"{one['goodput']:.2f}", f"{one['rate']:.2f}", *times


def _runs(system: tuple[str, str, int], config: SimulatorConfig) -> Run:
    requests = cut_requests(PROMPT_MEAN, OUTPUT_MEAN, NUM_REQUESTS, MAX_MODEL_LEN, SEED)
    return poisson_runs(deployment(*system), config, requests, SEED)
