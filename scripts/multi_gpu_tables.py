"""The tables of docs/multi-gpu.md: models shared by several GPUs as the compiler sees them, and how that scales.

python scripts/multi_gpu_tables.py programs    # compiled for GPUs that need not be here; takes the extra `plan`
python scripts/multi_gpu_tables.py scaling     # simulated
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is first imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from plan_table import header, line

from fastgen_jax.gpus import GPUS
from fastgen_jax.plan import MEM_FRACTION

TOKENS, ROWS = 512, 64
"""Of the step and of the head that are compiled."""

PROMPT, OUTPUT, REQUESTS, SLA, BUDGET = 2600, 60, 400, 4.0, 768
"""The load of the scaling table, the paper's, and the token budget of a step."""

DOLLARS_AN_HOUR = {"a100-80": 1.8, "h100": 3.0}
"""Of one GPU, rented. Assumed, for the shape of the figures: put in your own."""

REPLICAS = (1, 2, 4, 8, 16, 32, 64)


class Case(NamedTuple):
    """A model on `tp` GPUs."""

    model: str
    gpu: str
    tp: int


SHARED = [
    *[Case("llama2-13b", gpu, 2) for gpu in ("h100", "a100-80")],
    *[Case("llama2-70b", gpu, tp) for gpu in ("h100", "a100-80") for tp in (4, 8)],
    *[Case("mixtral-8x7b", gpu, tp) for gpu in ("h100", "a100-80") for tp in (2, 4)],
]
SCALED = [Case("llama2-70b", gpu, tp) for gpu in ("a100-80", "h100") for tp in (4, 8)]


def compiled(case: Case) -> tuple[Any, ...]:
    """A line of the table of programs. In a process of its own: one compiles for one GPU only."""
    import jax

    from fastgen_jax.checkpoint.config_only import read_config
    from fastgen_jax.compiler_output import exchanged, link_seconds
    from fastgen_jax.deviceless import compile_only_devices
    from fastgen_jax.sizing import Sizing
    from fastgen_jax.types import EngineConfig

    gpu = GPUS[case.gpu]
    devices = compile_only_devices(gpu, case.tp)
    sizing = Sizing(
        read_config(case.model), gpu, EngineConfig(), tp=case.tp, mem_fraction=MEM_FRACTION, devices=devices
    )
    step_bytes = 0

    def largest_step(num_blocks: int) -> int:
        nonlocal step_bytes
        with jax.default_device(devices[0]):
            step_bytes = sizing.programs(num_blocks, sizing.wanted_len).largest_step_bytes()
        return step_bytes

    num_blocks = sizing.fit_blocks(largest_step)
    programs = sizing.programs(num_blocks, sizing.max_model_len(num_blocks))
    with jax.default_device(devices[0]):
        step, head = programs.get("backbone", TOKENS), programs.get("sample_logprobs", ROWS)
    memory, sent, ends = step.memory_analysis(), exchanged(step.as_text()), exchanged(head.as_text())
    num_layers = sizing.model_config.num_layers
    sums, sum_bytes = sent.pop("all-reduce")
    return (
        *case,
        f"{sizing.weights_bytes / 1e9:.2f}",
        f"{(num_blocks * sizing.block_bytes) / 1e9:.2f}",
        f"{memory.temp_size_in_bytes / 1e6:.0f}",
        "yes" if memory.alias_size_in_bytes == programs.reused_bytes() else "no",
        f"2 x {num_layers} + {sums - 2 * num_layers}",
        ", ".join(sent) or "none",
        f"{sum_bytes / 1e6:.0f}",
        f"{link_seconds({'all-reduce': (sums, sum_bytes)}, case.tp, gpu.link_bandwidth) * 1e3:.2f}",
        ", ".join(f"{count} {kind}" for kind, (count, _) in sorted(ends.items())),
        f"{sum(total for _, total in ends.values()) / 1e6:.2f}",
    )


PROGRAMS_HEAD = (
    *("model", "GPU", "tp", "weights GB", "pool GB", "temporaries MB", "pool in place", "all-reduces", "other"),
    *("MB", "ms at least", "with the logits", "MB"),
)


def programs_table() -> Iterator[str]:
    yield from header(PROGRAMS_HEAD)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from map(line, pool.map(compiled, SHARED))


def scaling_table() -> Iterator[str]:
    """Requests/s that meet the SLA, tokens/s and what a million of them costs."""
    yield from header(
        ("model", "GPU", "tp", *(f"{n} replicas" for n in REPLICAS), "output tokens/s of one", "$ a million")
    )
    for case in SCALED:
        rate, tokens_s = capacity_of(case)
        dollars = DOLLARS_AN_HOUR[case.gpu] * case.tp / 3600 / tokens_s * 1e6
        yield line((*case, *(f"{rate * n:.1f}" for n in REPLICAS), f"{tokens_s:.0f}", f"{dollars:.2f}"))


def capacity_of(case: Case) -> tuple[float, float]:
    """The highest rate at the SLA of one replica, requests/s, and its output tokens/s there."""
    from fastgen_jax.bench.capacity import cut_requests, max_rate, meets, poisson_runs
    from fastgen_jax.bench.deployment import Deployment
    from fastgen_jax.bench.metrics import summarize
    from fastgen_jax.bench.simulator import SimulatorConfig

    system = Deployment.of(case.model, GPUS[case.gpu], tp=case.tp)
    requests = cut_requests(PROMPT, OUTPUT, REQUESTS, system.max_positions, 0)
    config = SimulatorConfig(max_num_batched_tokens=BUDGET, max_num_seqs=256)
    run = poisson_runs(system, config, requests, 0)
    rate = max_rate(run, meets(SLA))
    return rate, summarize(run(rate)).output_tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("programs", "scaling"))
    for text in {"programs": programs_table, "scaling": scaling_table}[parser.parse_args().table]():
        print(text, flush=True)


if __name__ == "__main__":
    main()
