"""The simulator against the engine it stands for: the same requests on both."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastgen_jax.bench.drive import closed_loop
from fastgen_jax.bench.engine_target import EngineTarget
from fastgen_jax.bench.load import Request
from fastgen_jax.bench.measured_steps import StepTable
from fastgen_jax.bench.metrics import summarize
from fastgen_jax.bench.simulator import SimulatorConfig
from fastgen_jax.progress import Advance

if TYPE_CHECKING:
    from fastgen_jax import Engine

COMPARED = ("requests_per_s", "output_tokens_per_s", "latency_mean", "ttft_mean", "gap_p50", "gap_p95")


def validate(
    engine: "Engine",
    table: StepTable,
    requests: Sequence[Request],
    num_clients: int,
    advance: Advance = lambda _: None,
) -> dict[str, Any]:
    """A closed loop on `engine` and on the simulation of it by its `table`: both summaries, and simulated / real.

    advance: told how many more requests the real engine has answered.
    """
    config = SimulatorConfig(
        max_num_batched_tokens=table.max_num_batched_tokens,
        max_num_seqs=table.max_num_seqs,
        block_size=table.block_size,
        policy=engine.config.policy,
        prefix_caching=engine.config.prefix_caching,
        overlap=engine.config.overlap,
    )
    simulated = asdict(summarize(closed_loop(table.engine(config), requests, num_clients)))
    real = asdict(summarize(closed_loop(EngineTarget(engine), requests, num_clients, advance)))
    ratios = {name: simulated[name] / real[name] if real[name] else None for name in COMPARED}
    return {"clients": num_clients, "real": real, "simulated": simulated, "ratio": ratios}
