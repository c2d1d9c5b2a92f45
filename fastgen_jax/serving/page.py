"""The page to watch a server on, and the events that it draws."""

import asyncio
import base64
import hashlib
import itertools
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from prometheus_client import Histogram

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.errors import unavailable
from fastgen_jax.serving.metrics import GAP_BUCKETS, TTFT_BUCKETS
from fastgen_jax.serving.remote import RemoteReplica
from fastgen_jax.serving.router import Router

EVENTS_EVERY_S = 0.5

_STATS = (
    "address",
    "model",
    "state",
    "started",
    "max_num_batched_tokens",
    "running",
    "waiting",
    "blocks",
    "free_blocks",
    "steps",
    "tokens",
    "decode_tokens",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
)
"""What the page knows of a replica under the names of `ReplicaStats`."""

Json = dict[str, Any]


def add_page(app: FastAPI, router: Router, locked: list[Any], page_s: float) -> None:
    """`/`, which takes no key, and `/events`, which depends on `locked` and ends after `page_s` seconds."""
    html = resources.files("fastgen_jax.serving").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _policy(html),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/events", dependencies=locked, include_in_schema=False)
    async def events() -> Response:
        """Server-sent events: a snapshot (`Snapshots`) every half second, until the server drains."""
        if router.is_draining:
            raise unavailable("the server is shutting down", code="draining", retry_after=10)
        no_buffer = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(_events(router, page_s), media_type="text/event-stream", headers=no_buffer)


async def _events(router: Router, seconds: float) -> AsyncGenerator[str]:
    """The last one says that the server drains, unless time was up."""
    snapshots, end = Snapshots(router), time.monotonic() + seconds
    while time.monotonic() < end:
        snapshot = snapshots.next()
        yield f"data: {json.dumps(snapshot, separators=(',', ':'))}\n\n"
        if snapshot["draining"]:
            return
        await asyncio.sleep(EVENTS_EVERY_S)


class Snapshots:
    """What one open page is told: how everything is, and the steps since it was told last."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._told: dict[str, tuple[float, int]] = {}  # address -> its process' start, its last step

    def next(self) -> Json:
        """For the page, as JSON has it. The first has every step that is kept; totals leave lost replicas out."""
        up = [replica.stats for replica in self._router.fleet.replicas if replica.state != "lost"]
        return {
            "time": time.time(),
            "draining": self._router.is_draining,
            "models": self._router.fleet.models,
            "running": sum(stats.running for stats in up),
            "waiting": sum(stats.waiting for stats in up),
            "replicas": [self._replica(replica) for replica in self._router.fleet.replicas],
            "ttft": histogram(self._router.metrics.ttft, TTFT_BUCKETS),
            "gaps": histogram(self._router.metrics.gap, GAP_BUCKETS),
        }

    def _replica(self, replica: RemoteReplica) -> Json:
        return {name: getattr(replica.stats, name) for name in _STATS} | {
            "class": replica.stats.replica_class,
            "outstanding_tokens": int(replica.load.outstanding),
            "new_steps": [_step(step) for step in self._new_steps(replica)],
        }

    def _new_steps(self, replica: RemoteReplica) -> list[pb.Step]:
        started, last = self._told.get(replica.address, (replica.stats.started, 0))
        if started != replica.stats.started:  # another process, which numbers its steps from 1 again
            last = 0
        steps = [step for step in replica.steps if step.number > last]
        self._told[replica.address] = (replica.stats.started, steps[-1].number if steps else last)
        return steps


def _step(step: pb.Step) -> Json:
    return {
        "number": step.number,
        "time": step.time,
        "seconds": step.seconds,
        "decode": step.decode_tokens,
        "prompt": step.prompt_tokens,
        "padding": step.padding,
    }


def histogram(metric: Histogram, bounds: Sequence[float]) -> Json:
    """A histogram over all of its labels. counts: of each bucket, up to its bound; the last is what is above all."""
    up_to = dict.fromkeys((*bounds, float("inf")), 0)
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                up_to[float(sample.labels["le"])] += int(sample.value)
    below = [0, *up_to.values()]
    return {"bounds": list(bounds), "counts": [more - less for less, more in itertools.pairwise(below)]}


def _policy(html: str) -> str:
    """A Content-Security-Policy: the page's own script and style, this server, and nothing else."""
    hashes = {
        kind: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL))
        for kind in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
