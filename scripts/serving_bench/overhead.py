"""What the front costs: 32 streaming clients through HTTP against `Engine.generate` on the same prompts."""

import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serving_bench.clients import client, stream
from serving_bench.deploy import Front

CLIENTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 64


def run(model: str = "smollm2-135m", repeats: int = 3) -> dict[str, Any]:
    """Output tokens/s of both, in turns: an engine alone in a process, and a server of one replica."""
    offline, online, ttfts = [], [], []
    for turn in range(repeats):
        command = [sys.executable, "-m", __spec__.name, model, str(turn)]
        offline.append(float(subprocess.check_output(command, cwd=Path(__file__).parent.parent, text=True)))
        front = Front(model, "--log-level", "info")
        try:
            asyncio.run(_serve(front.url, -1))  # the first requests of a process are slower
            seconds, ttft = asyncio.run(_serve(front.url, turn))
        finally:
            front.stop()
        online.append(CLIENTS * OUTPUT_TOKENS / seconds)
        ttfts.append(ttft)
    ratios = [a / b for a, b in zip(online, offline, strict=True)]
    return {
        "work": f"{CLIENTS} x {PROMPT_TOKENS} + {OUTPUT_TOKENS}",
        "engine_tokens_s": round(statistics.median(offline), 1),
        "http_tokens_s": round(statistics.median(online), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ttft_s_median": round(statistics.median(ttfts), 2),
    }


def prompts(turn: int) -> list[list[int]]:
    """Token ids; no two begin alike, nor those of two turns."""
    return [
        [300 + (turn + 1) * 40 + i, *(300 + (7 * i + 13 * j) % 700 for j in range(PROMPT_TOKENS - 1))]
        for i in range(CLIENTS)
    ]


async def _serve(url: str, turn: int) -> tuple[float, float]:
    """Seconds for all, and the median time to a first token."""
    async with client(600) as http:
        start = time.perf_counter()
        outcomes = await asyncio.gather(*(stream(http, url, prompt, OUTPUT_TOKENS) for prompt in prompts(turn)))
        seconds = time.perf_counter() - start
    if wrong := [outcome for outcome in outcomes if not outcome.is_complete]:
        raise RuntimeError(f"{len(wrong)} requests failed, the first: {wrong[0]}")
    return seconds, statistics.median(outcome.times[0] - outcome.sent for outcome in outcomes)


def _alone(model: str, turn: int) -> float:
    """Output tokens/s of `Engine.generate`."""
    from fastgen_jax import Engine, SamplingParams

    engine = Engine.from_pretrained(model, show_progress=False)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    engine.generate(prompts(-1), params, show_progress=False)
    start = time.perf_counter()
    engine.generate(prompts(turn), params, show_progress=False)
    return CLIENTS * OUTPUT_TOKENS / (time.perf_counter() - start)


if __name__ == "__main__":
    print(_alone(sys.argv[1], int(sys.argv[2])))
