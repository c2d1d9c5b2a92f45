"""Arrivals at twice capacity: who is let in keeps the latency bound, the rest get 429, nothing is lost."""

import asyncio
import random
import time
from typing import Any

from serving_bench.clients import Outcome, client, stream
from serving_bench.deploy import Front, deployment
from serving_bench.stub import Speed

PROMPT, TOKENS = "a prompt of about a hundred tokens, " * 3, 40
NUM_REPLICAS, MAX_NUM_SEQS = 2, 16
CAPACITY_CLIENTS = 2 * NUM_REPLICAS * MAX_NUM_SEQS  # as many wait as run, so that no slot is ever empty


def run(seconds: float = 60.0, max_queue: int = 16) -> dict[str, Any]:
    """Capacity by a closed loop, then an open loop of twice that."""
    speed = Speed(0.05, 0.0005)  # slow enough that two cores can offer twice the capacity
    with deployment(NUM_REPLICAS, speed, max_num_seqs=MAX_NUM_SEQS) as (front, _):
        capacity = asyncio.run(_closed(front, min(seconds, 20.0)))
    with deployment(NUM_REPLICAS, speed, "--max-queue", str(max_queue), max_num_seqs=MAX_NUM_SEQS) as (front, _):
        outcomes = asyncio.run(_open(front, 2 * capacity, seconds))
    done = [outcome for outcome in outcomes if outcome.is_complete]
    refused = [outcome for outcome in outcomes if outcome.status == 429]
    if len(done) + len(refused) != len(outcomes):
        other = [outcome for outcome in outcomes if not outcome.is_complete and outcome.status != 429]
        raise RuntimeError(f"{len(other)} requests were neither answered nor refused, the first: {other[0]}")
    ttfts = sorted(outcome.times[0] - outcome.sent for outcome in done)
    duration = max(outcome.ended for outcome in done) - min(outcome.sent for outcome in outcomes)
    return {
        "capacity_requests_s": round(capacity, 1),
        "offered_requests_s": round(2 * capacity, 1),
        "goodput_requests_s": round(len(done) / duration, 1),
        "goodput_over_capacity": round(len(done) / duration / capacity, 2),
        "accepted": len(done),
        "refused_429": len(refused),
        "ttft_s_p50": round(ttfts[len(ttfts) // 2], 2),
        "ttft_s_p99": round(ttfts[int(len(ttfts) * 0.99)], 2),
        "retry_after_s_max": max((outcome.retry_after or 0.0 for outcome in refused), default=0.0),
    }


async def _closed(front: Front, seconds: float) -> float:
    """Requests/s with as many clients as keep it busy."""
    end = time.perf_counter() + seconds
    done = 0

    async def one(http: Any) -> None:
        nonlocal done
        while time.perf_counter() < end:
            outcome = await stream(http, front.url, PROMPT, TOKENS)
            done += outcome.is_complete

    start = time.perf_counter()
    async with client() as http:
        await asyncio.gather(*(one(http) for _ in range(CAPACITY_CLIENTS)))
    return done / (time.perf_counter() - start)


async def _open(front: Front, rate: float, seconds: float) -> list[Outcome]:
    rng = random.Random(0)
    running = []
    async with client() as http:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            running.append(asyncio.create_task(stream(http, front.url, PROMPT, TOKENS)))
            await asyncio.sleep(rng.expovariate(rate))
        return list(await asyncio.gather(*running))
