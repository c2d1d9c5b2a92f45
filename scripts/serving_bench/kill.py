"""`kill -9` of one of two replicas under 32 streaming clients: nobody hangs, nobody is misled."""

import asyncio
import time
from collections import Counter
from typing import Any

from serving_bench.clients import client, stream
from serving_bench.deploy import Front, Replica, deployment
from serving_bench.stub import Speed

CLIENTS, TOKENS = 32, 60
EJECTED_S, BACK_S = 2.0, 30.0
HANG_S = 60.0


def run(rounds: int = 10) -> dict[str, Any]:
    """The outcomes of all rounds. A `RuntimeError` for a client that hangs or gets what is not documented."""
    found: Counter[str] = Counter()
    ejected: list[float] = []
    back: list[float] = []
    with deployment(2, Speed(0.02, 0.0), "--request-timeout", str(HANG_S)) as (front, replicas):
        for number in range(rounds):
            found.update(asyncio.run(_round(front, replicas[number % 2], ejected)))
            start = time.monotonic()
            replicas[number % 2].start()
            _wait_until(front, lambda states: states.count("ready") == 2, BACK_S)
            back.append(time.monotonic() - start)
    if wrong := set(found) - {"complete", "replica_lost"}:
        raise RuntimeError(f"clients got {wrong}: {found}")
    return {
        "rounds": rounds,
        "clients": CLIENTS * rounds,
        **dict(sorted(found.items())),
        "ejected_s_max": round(max(ejected), 2),
        "taken_back_s_max": round(max(back), 2),
    }


async def _round(front: Front, victim: Replica, ejected: list[float]) -> list[str]:
    async with client(HANG_S) as http:
        prompts = [f"prompt number {i}: " * 3 for i in range(CLIENTS)]
        running = [asyncio.create_task(stream(http, front.url, prompt, TOKENS)) for prompt in prompts]
        await asyncio.sleep(0.4)
        start = time.monotonic()
        await asyncio.to_thread(victim.kill)
        late = [asyncio.create_task(stream(http, front.url, prompt, 4)) for prompt in prompts[:4]]
        await asyncio.to_thread(_wait_until, front, lambda states: states.count("ready") == 1, EJECTED_S)
        ejected.append(time.monotonic() - start)
        outcomes = await asyncio.gather(*running, *late)
    for outcome in outcomes[CLIENTS:]:
        if not outcome.is_complete:
            raise RuntimeError(f"a request that came after the kill was not answered: {outcome}")
    for outcome in outcomes:
        if outcome.is_complete and len(outcome.times) == 0:
            raise RuntimeError("a complete answer has no text")
    return ["complete" if outcome.is_complete else str(outcome.error) for outcome in outcomes[:CLIENTS]]


def _wait_until(front: Front, holds: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds(list(front.health()["replicas"].values())):
        if time.monotonic() > end:
            raise RuntimeError(f"after {seconds} s the replicas are {front.health()['replicas']}")
        time.sleep(0.05)
