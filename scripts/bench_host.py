"""What the host costs a step: schedule + pack + update, with a stub in place of the device.

python scripts/bench_host.py                 # the table of docs/performance.md
python scripts/bench_host.py --jit-call      # also the Python cost of calling a 32-layer program
"""

import argparse
import random
import statistics
import time

import numpy as np

from fastgen_jax.batch import Layout, Packer, Settings, bucket_ladder
from fastgen_jax.scheduler import BlockPool, Scheduler, Sequence

BLOCK_SIZE, MAX_MODEL_LEN = 64, 8192


def step_times(num_running: int, num_waiting: int, budget: int, num_steps: int, overlap: bool) -> list[float]:
    """Milliseconds of host work of `num_steps` steps with about that many sequences running and waiting."""
    rng = random.Random(0)
    pool = BlockPool(num_running * 12, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_num_batched_tokens=budget, max_num_seqs=num_running, max_model_len=MAX_MODEL_LEN)
    layout = Layout(num_running, MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
    packer = Packer(layout, bucket_ladder(budget))
    ids = iter(range(1 << 30))

    def fill() -> None:
        while scheduler.num_running + scheduler.num_waiting < num_running + num_waiting:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(50, 400))]
            scheduler.add(Sequence(next(ids), prompt, max_tokens=rng.randint(50, 300)))

    times: list[float] = []
    before = None
    while len(times) < num_steps:
        fill()
        start = time.perf_counter()
        plan = scheduler.schedule()
        packer.pack(plan, lambda seq: Settings(len(seq.prompt_token_ids)))
        finished, before = (before, plan) if overlap else (plan, None)
        if finished is not None:
            scheduler.update(finished, [0] * len(finished.rows))
        if len(plan.rows) > 0.9 * num_running:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def jit_call_times(num_layers: int = 32, num_calls: int = 200) -> tuple[int, list[float]]:
    """Leaves, and milliseconds of Python, of a call of a compiled program with a model's arguments."""
    import jax
    import jax.numpy as jnp

    layer = {"norm1": 1, "qkv": 1, "out": 1, "norm2": 1, "gate_up": 1, "down": 1}
    params = {f"layers_{i}": {name: {"kernel": jnp.zeros(8)} for name in layer} for i in range(num_layers)}
    pool = [(jnp.zeros(8), jnp.zeros(8)) for _ in range(num_layers)]
    step = jax.jit(lambda params, pool, x: (x + 1, pool), donate_argnums=1)
    buffer = np.zeros(4096, np.int32)
    program = step.lower(params, pool, buffer).compile()
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        out, pool = program(params, pool, buffer)
        times.append((time.perf_counter() - start) * 1e3)
        out.block_until_ready()
    return len(jax.tree.leaves((params, pool))), times


def quantiles(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} | {np.quantile(times, 0.99):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens (default 512)")
    parser.add_argument("--steps", type=int, default=500, help="steps measured for each row (default 500)")
    parser.add_argument("--jit-call", action="store_true", help="also time the call of a compiled program")
    args = parser.parse_args()
    print("| running | waiting | loop | median ms | P99 ms |\n|---|---|---|---|---|")
    for num_running, num_waiting in [(32, 0), (256, 0), (256, 1_000), (256, 10_000), (256, 100_000)]:
        for overlap in (False, True):
            times = step_times(num_running, num_waiting, args.budget, args.steps, overlap)
            print(
                f"| {num_running} | {num_waiting} | {'overlapped' if overlap else 'plain'} | {quantiles(times)} |",
                flush=True,
            )
    if args.jit_call:
        leaves, times = jit_call_times()
        print(f"\nCalling a program of {leaves} array arguments: median | P99 = {quantiles(times)} ms of Python")


if __name__ == "__main__":
    main()
