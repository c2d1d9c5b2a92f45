"""A table of docs/simulate.md: prefill_first in the paper's case on a host that the GPUs wait for in every step.

python scripts/simulate_host.py    # a minute on one core
"""

import os
from collections.abc import Sequence

os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is first imported

from dataclasses import replace

from fastgen_jax.bench.capacity import cut_requests
from fastgen_jax.bench.drive import closed_loop
from fastgen_jax.bench.grid import CLIENTS, CONFIGS, MAX_MODEL_LEN, NUM_REQUESTS, deployment
from fastgen_jax.bench.grid_report import LATENCY_S, PAPER_CASE, crossing
from fastgen_jax.bench.metrics import effective_throughput, summarize
from fastgen_jax.bench.simulator import SimulatedEngine
from fastgen_jax.bench.step_model import StepModel
from fastgen_jax.cli_plan import table
from fastgen_jax.scheduler import Row

HOST_MS = (0, 10, 20, 40, 60, 80)
HEAD = ("host ms a step", "effective/s at 4 tokens/s", f"requests/s at {LATENCY_S:g} s", "highest requests/s")
CONFIG = replace(CONFIGS["prefill_first"], overlap=False)


class SlowHost:
    """Steps of another model with so many seconds of the host before each."""

    def __init__(self, model: StepModel, host_s: float) -> None:
        self._model, self._host_s = model, host_s

    def device_seconds(self, rows: Sequence[Row]) -> float:
        return self._model.device_seconds(rows)

    def host_seconds(self, rows: Sequence[Row]) -> float:
        return self._host_s


def row(host_ms: int) -> tuple[str, ...]:
    case = PAPER_CASE
    there = deployment(case.model, case.gpu, case.tp)
    steps = SlowHost(there.roofline(CONFIG), host_ms / 1e3)
    requests = cut_requests(case.prompt_mean, case.output_mean, NUM_REQUESTS, MAX_MODEL_LEN, seed=0)
    curve, effective = [], []
    for clients in CLIENTS:
        num_blocks = there.num_blocks(CONFIG.block_size)
        engine = SimulatedEngine(steps, CONFIG, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN)
        records = closed_loop(engine, requests, clients)
        summary = summarize(records)
        curve.append({"requests_per_s": summary.requests_per_s, "latency_mean": summary.latency_mean})
        effective.append(effective_throughput(records, 4))
    rate = crossing(curve, "latency_mean", "requests_per_s", LATENCY_S)
    highest = max(point["requests_per_s"] or 0.0 for point in curve)
    return str(host_ms), f"{max(effective):.2f}", "-" if rate is None else f"{rate:.2f}", f"{highest:.2f}"


if __name__ == "__main__":
    print("\n".join(table(HEAD, map(row, HOST_MS))))
