"""Streaming clients of OpenAI's completions API, as many at once as wanted."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None)


@dataclass
class Outcome:
    """What became of one request. status: HTTP's; error: the code in the stream or the answer; times: of pieces."""

    sent: float
    status: int = 0
    error: str | None = None
    times: list[float] = field(default_factory=list)
    is_complete: bool = False
    ended: float = 0.0
    retry_after: float | None = None

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None


def client(timeout: float = 120.0) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(limits=LIMITS, timeout=httpx2.Timeout(timeout))


async def stream(
    http: httpx2.AsyncClient, url: str, prompt: Any, max_tokens: int, *, leave_after: int | None = None, **fields: Any
) -> Outcome:
    """One request. leave_after: hang up after so many pieces."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **fields}
    outcome = Outcome(time.perf_counter())
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            outcome.status = response.status_code
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                outcome.error = error["code"] or error["type"]
                outcome.retry_after = float(response.headers.get("retry-after", 0))
                return outcome
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    outcome.is_complete = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    outcome.error = event["error"]["code"]
                elif event["choices"] and event["choices"][0]["text"]:
                    outcome.times.append(time.perf_counter())
                    if leave_after is not None and len(outcome.times) >= leave_after:
                        return outcome
    except (httpx2.HTTPError, asyncio.CancelledError) as error:
        outcome.error = type(error).__name__
    finally:
        outcome.ended = time.perf_counter()
    return outcome
