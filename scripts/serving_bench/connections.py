"""1,000 streams at once, and 200 clients that hang up at random: none lost, no block held, memory bounded."""

import asyncio
import random
import statistics
import time
from typing import Any

from serving_bench.clients import client, stream
from serving_bench.deploy import Front, Replica, deployment, memory_mb
from serving_bench.stub import Speed


def run(num_streams: int = 1000, num_leavers: int = 200) -> dict[str, Any]:
    """A `RuntimeError` for a stream that is lost or a block that stays in use."""
    with deployment(2, Speed(0.01, 0.0), "--max-queue", str(2 * num_streams)) as (front, replicas):
        before = _memory(front, replicas)
        first = asyncio.run(_all_stay(front, num_streams))
        after_one = _memory(front, replicas)
        asyncio.run(_all_stay(front, num_streams))
        after_two = _memory(front, replicas)
        asyncio.run(_some_leave(front, num_leavers))
        lag = quantile(front.metrics(), "fastgen:event_loop_lag_seconds", 0.99)
    return {
        "streams": num_streams,
        "leavers": num_leavers,
        **first,
        "memory_mb_before": before,
        "memory_mb_after_one_round": after_one,
        "memory_mb_after_two": after_two,
        "loop_lag_s_p99_at_most": lag,
    }


def _memory(front: Front, replicas: list[Replica]) -> int:
    return round(sum(memory_mb(pid) for pid in (front.process.pid, *(replica.pid for replica in replicas))))


async def _all_stay(front: Front, num_streams: int) -> dict[str, Any]:
    start = time.perf_counter()
    async with client(300) as http:
        outcomes = await asyncio.gather(*(stream(http, front.url, f"stream {i}", 32) for i in range(num_streams)))
    lost = [outcome for outcome in outcomes if not outcome.is_complete]
    if lost:
        raise RuntimeError(f"{len(lost)} of {num_streams} streams were lost, the first: {lost[0]}")
    ttfts = sorted(outcome.times[0] - outcome.sent for outcome in outcomes)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "ttft_s_median": round(statistics.median(ttfts), 2),
        "ttft_s_max": round(ttfts[-1], 2),
    }


async def _some_leave(front: Front, num_clients: int) -> None:
    rng = random.Random(0)
    async with client(300) as http:
        jobs = [
            stream(http, front.url, f"leaver {i}", 64, leave_after=rng.choice([None, 1, 2, 5, 20]))
            for i in range(num_clients)
        ]
        await asyncio.gather(*jobs)
    end = time.monotonic() + 10
    while any(use := [v for k, v in front.metrics().items() if k.startswith("fastgen:kv_cache_usage_perc")]):
        if time.monotonic() > end:
            raise RuntimeError(f"KV blocks are still in use: {use}")
        time.sleep(0.2)


def quantile(metrics: dict[str, float], name: str, q: float) -> float:
    """The upper bound of the histogram's bucket that holds the quantile."""
    bounds = sorted(
        (float(key.split('le="')[1].split('"')[0]), count)
        for key, count in metrics.items()
        if key.startswith(f"{name}_bucket")
    )
    total = bounds[-1][1] if bounds else 0
    return next((bound for bound, count in bounds if total and count >= q * total), float("nan"))
