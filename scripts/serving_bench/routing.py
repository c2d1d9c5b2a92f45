"""The router against blind round robin: long and short requests mixed, two stub replicas, the same arrivals."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from serving_bench.clients import Outcome, client, stream
from serving_bench.deploy import deployment
from serving_bench.stub import Speed

SPEED = Speed(0.008, 0.00016)  # busy most of the time, at the rate below
LONG_SHARE = 0.15


class Arrival(NamedTuple):
    """after: seconds since the one before."""

    after: float
    num_prompt_tokens: int
    num_output_tokens: int


def run(num_requests: int = 1200, rate: float = 18.0, seed: int = 0) -> dict[str, Any]:
    """Latencies of one server over two replicas, and of two servers of one each that take turns."""
    arrivals = _arrivals(num_requests, rate, seed)
    with deployment(2, SPEED, "--max-queue", "100000") as (front, _):
        ours = asyncio.run(_send(arrivals, [front.url]))
    one, other = (deployment(1, SPEED, "--max-queue", "100000", "--name", f"alone-{i}") for i in range(2))
    with one as (first, _), other as (second, _):
        blind = asyncio.run(_send(arrivals, [first.url, second.url]))
    ours_s, blind_s = _latencies(ours), _latencies(blind)
    return {
        "requests": num_requests,
        "requests_s": rate,
        "router_p50_s": _at(ours_s, 0.5),
        "round_robin_p50_s": _at(blind_s, 0.5),
        "router_p95_s": _at(ours_s, 0.95),
        "round_robin_p95_s": _at(blind_s, 0.95),
        "p95_ratio": round(_at(blind_s, 0.95) / _at(ours_s, 0.95), 2),
    }


def _arrivals(num_requests: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson; one in seven has a long prompt and a long output."""
    rng = random.Random(seed)
    arrivals = []
    for _ in range(num_requests):
        is_long = rng.random() < LONG_SHARE
        sizes = (
            (rng.randint(1500, 3000), rng.randint(150, 400)) if is_long else (rng.randint(20, 200), rng.randint(5, 40))
        )
        arrivals.append(Arrival(rng.expovariate(rate), *sizes))
    return arrivals


async def _send(arrivals: Sequence[Arrival], urls: Sequence[str]) -> list[Outcome]:
    running = []
    async with client(600) as http:
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(arrival.after)
            prompt = [number % 250, number // 250 % 250] * (arrival.num_prompt_tokens // 2 + 1)
            url = urls[number % len(urls)]
            running.append(asyncio.create_task(stream(http, url, prompt, arrival.num_output_tokens)))
        return list(await asyncio.gather(*running))


def _latencies(outcomes: Sequence[Outcome]) -> list[float]:
    if wrong := [outcome for outcome in outcomes if not outcome.is_complete]:
        raise RuntimeError(f"{len(wrong)} requests failed, the first: {wrong[0]}")
    return sorted(outcome.ended - outcome.sent for outcome in outcomes)


def _at(values: Sequence[float], share: float) -> float:
    return round(values[int(len(values) * share)], 3)
