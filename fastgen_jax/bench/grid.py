"""The FastGen paper's grid (arXiv 2401.08671), simulated: SplitFuse and its baselines under one load after another."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any

from fastgen_jax.bench.capacity import cut_requests
from fastgen_jax.bench.deployment import Deployment
from fastgen_jax.bench.drive import closed_loop
from fastgen_jax.bench.load import Request
from fastgen_jax.bench.metrics import effective_throughput, summarize
from fastgen_jax.bench.simulator import SimulatorConfig
from fastgen_jax.gpus import get_gpu
from fastgen_jax.types import POLICIES

MAX_MODEL_LEN = 4096
NUM_REQUESTS = 512
CLIENTS = (1, 2, 4, 8, 12, 16, 24, 32)
SLAS = (2, 4, 6)
"""Output tokens/s."""

CONFIGS = {
    "splitfuse": SimulatorConfig(max_num_batched_tokens=768, max_model_len=MAX_MODEL_LEN),
    "prefill_first": SimulatorConfig(
        max_num_batched_tokens=MAX_MODEL_LEN, max_model_len=MAX_MODEL_LEN, policy="prefill_first", pad=False
    ),
    "orca": SimulatorConfig(
        max_num_batched_tokens=MAX_MODEL_LEN, max_model_len=MAX_MODEL_LEN, policy="orca", pad=False
    ),
}
"""768 is FastGen's budget in its own benchmark. Whole prompts take a budget of the longest context, as in vLLM 0.2, and
are not padded, for nothing in those systems pads them to a bucket."""


@dataclass(frozen=True)
class Case:
    """A model on `tp` GPUs, and the mean lengths of its requests."""

    model: str
    gpu: str
    tp: int
    prompt_mean: int
    output_mean: int


CASES = tuple(
    Case(*system, *lengths)
    for system, lengths in product(
        [
            ("llama2-7b", "a6000", 1),
            ("llama2-7b", "a100-80", 1),
            ("llama2-7b", "h100", 1),
            ("llama2-13b", "a100-80", 1),
            ("llama2-70b", "a100-80", 4),
        ],
        product((1200, 2600), (60, 128)),
    )
)


@dataclass(frozen=True)
class Point:
    """A closed loop of `clients`."""

    case: Case
    policy: str
    clients: int


def points(cases: Sequence[Case] = CASES, clients: Sequence[int] = CLIENTS) -> list[Point]:
    return [Point(case, policy, n) for case in cases for policy in POLICIES for n in clients]


@cache
def deployment(model: str, gpu: str, tp: int) -> Deployment:
    return Deployment.of(model, get_gpu(gpu), tp=tp)


@lru_cache(maxsize=1)  # points of a case follow one another
def _requests(prompt_mean: int, output_mean: int, num_requests: int, seed: int) -> list[Request]:
    return cut_requests(prompt_mean, output_mean, num_requests, MAX_MODEL_LEN, seed)


def run_point(point: Point, num_requests: int = NUM_REQUESTS, seed: int = 0) -> dict[str, Any]:
    """Simulate a point: the fields of the case, the point and a `Summary`, `effective` by SLA, and `preemptions`."""
    case = point.case
    engine = deployment(case.model, case.gpu, case.tp).engine(CONFIGS[point.policy])
    requests = _requests(case.prompt_mean, case.output_mean, num_requests, seed)
    records = closed_loop(engine, requests, point.clients)
    return {
        **asdict(case),
        "policy": point.policy,
        "clients": point.clients,
        **asdict(summarize(records)),
        "effective": {str(sla): effective_throughput(records, sla) for sla in SLAS},
        "preemptions": engine.num_preemptions,
    }
