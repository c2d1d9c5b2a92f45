"""The page's routes, and what `/events` tells it."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from scripted import scripted_engine, tokens
from serving import TIMEOUT, run, served

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.app import make_app
from fastgen_jax.serving.metrics import TTFT_BUCKETS, Metrics
from fastgen_jax.serving.page import Snapshots, histogram
from fastgen_jax.serving.router import Router

ANSWERS = {"hello": tokens("one two three"), "bye": tokens("four")}


def http(url: str, **options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, timeout=TIMEOUT, **options)


async def complete(client: httpx2.AsyncClient, prompt: str) -> str:
    response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 64})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def snapshots(client: httpx2.AsyncClient) -> AsyncIterator[dict]:
    async with client.stream("GET", "/events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                yield json.loads(line.removeprefix("data: "))


async def first(client: httpx2.AsyncClient) -> dict:
    async for snapshot in snapshots(client):
        return snapshot
    raise AssertionError("there was no snapshot")


# The page


async def the_page() -> httpx2.Response:
    transport = httpx2.ASGITransport(make_app(Router([])))
    async with httpx2.AsyncClient(transport=transport, base_url="http://page") as client:
        return await client.get("/")


def test_the_page_is_html_and_is_looked_for_anew_each_time():
    page = run(the_page())
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"


def test_its_policy_lets_its_own_script_and_style_run_and_nothing_else():
    page = run(the_page())
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    for kind in ("script", "style"):
        [text] = re.findall(f"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


@pytest.mark.parametrize(
    "what", [r"\ssrc=", r"@import", r"url\(", r"\sstyle=", r"\son\w+=", r"//(?!www\.w3\.org/2000/svg)\w"]
)
def test_it_needs_nothing_from_outside(what):
    assert not re.search(what, run(the_page()).text)


@pytest.mark.parametrize(
    "what", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
)
def test_what_it_is_told_never_becomes_markup(what):
    assert what not in run(the_page()).text


@pytest.mark.parametrize("key, status", [(None, 401), ("wrong", 401), ("right", 200)])
def test_the_page_needs_no_key_and_the_events_do(key, status):
    async def main() -> None:
        async with served([scripted_engine(ANSWERS)], app={"api_keys": ["other", "right"]}) as server:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with http(server.url, headers=headers) as client:
                assert (await client.get("/")).status_code == 200
                async with client.stream("GET", "/events") as response:
                    assert response.status_code == status

    run(main())


def test_the_page_is_no_part_of_the_api():
    paths = make_app(Router([])).openapi()["paths"]
    assert "/v1/completions" in paths and not {"/", "/events"} & set(paths)


# Its events


def test_a_snapshot_is_every_figure_of_an_engine_and_its_steps():
    async def main() -> dict:
        async with served([scripted_engine(ANSWERS)]) as server, http(server.url) as client:
            assert await complete(client, "hello") == "one two three"
            assert await complete(client, "bye") == "four"
            await server.router.fleet.replicas[0].look()
            return await first(client)

    snapshot = run(main())
    [replica] = snapshot["replicas"]
    assert (snapshot["models"], snapshot["running"], snapshot["waiting"]) == (["tiny"], 0, 0)
    assert snapshot["draining"] is False
    assert (replica["model"], replica["class"], replica["state"]) == ("tiny", "", "ready")
    assert replica["max_num_batched_tokens"] == 16
    assert replica["blocks"] == replica["free_blocks"] == 63
    assert replica["outstanding_tokens"] == 0
    assert replica["generated_tokens"] == len("one two three") + len("four") + 2  # and an EOS each
    steps = replica["new_steps"]
    assert [step["number"] for step in steps] == list(range(1, replica["steps"] + 1))
    assert sum(step["prompt"] for step in steps) == len("hello") + len("bye")
    assert sum(step["decode"] for step in steps) == replica["decode_tokens"] > 0
    assert sum(step["decode"] + step["prompt"] for step in steps) == replica["tokens"]
    assert all(step["seconds"] > 0 and step["padding"] >= 0 for step in steps)
    assert [step["time"] for step in steps] == sorted(step["time"] for step in steps)
    assert replica["started"] < steps[0]["time"] <= steps[-1]["time"] <= snapshot["time"]


def test_each_snapshot_has_the_steps_since_the_one_before():
    async def main() -> list[list[int]]:
        async with served([scripted_engine(ANSWERS)]) as server, http(server.url) as client:
            await complete(client, "hello")
            await server.router.fleet.replicas[0].look()
            told: list[list[int]] = []
            async for snapshot in snapshots(client):
                [replica] = snapshot["replicas"]
                told.append([step["number"] for step in replica["new_steps"]])
                if sum(map(len, told)) == replica["steps"] and len(told) >= 3:
                    return told
                if len(told) == 1:
                    await complete(client, "bye")
        raise AssertionError("the events ended")

    told = run(main())
    numbers = [number for some in told for number in some]
    assert numbers == list(range(1, len(numbers) + 1))
    assert told[0] and any(told[1:])


def test_two_pages_are_told_everything_each():
    async def main() -> tuple[dict, dict]:
        async with served([scripted_engine(ANSWERS)]) as server, http(server.url) as client:
            await complete(client, "hello")
            await server.router.fleet.replicas[0].look()
            return await first(client), await first(client)

    one, other = run(main())
    assert one["replicas"] == other["replicas"] and one["replicas"][0]["new_steps"]


def test_the_events_end_when_the_server_drains_and_then_there_are_none():
    async def main() -> tuple[list[dict], httpx2.Response]:
        async with served([scripted_engine(ANSWERS)]) as server, http(server.url) as client:
            told = []
            async for snapshot in snapshots(client):
                told.append(snapshot)
                if len(told) == 1:
                    await server.router.drain()
            return told, await client.get("/events")

    told, after = run(main())
    assert [snapshot["draining"] for snapshot in told] == [*[False] * (len(told) - 1), True]
    assert (after.status_code, after.json()["error"]["code"]) == (503, "draining")


def test_the_events_end_when_the_page_goes():
    async def main() -> int:
        app, sent, gone = make_app(Router([])), [], asyncio.Event()
        requests = [{"type": "http.request", "body": b""}]

        async def receive() -> dict:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)
            if message.get("body"):
                gone.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/events",
            "raw_path": b"/events",
            "root_path": "",
            "query_string": b"",
            "headers": [],
        }
        await app(scope, receive, send)
        return sum(bool(message.get("body")) for message in sent)

    assert run(main()) == 1


# Without a server


def step(number: int) -> pb.Step:
    return pb.Step(number=number, time=100.0 + number, seconds=0.5, decode_tokens=3, prompt_tokens=4, padding=1)


def replica(address: str = "a:1", state: str = "ready", steps: Sequence[int] = (), **stats: Any) -> Any:
    return SimpleNamespace(
        address=address,
        state=state,
        steps=[step(number) for number in steps],
        stats=pb.ReplicaStats(**{"address": address, "state": state, "started": 1.0} | stats),
        load=SimpleNamespace(outstanding=12.7),
    )


def router(*replicas: Any) -> Any:
    fleet = SimpleNamespace(replicas=list(replicas), models=["tiny"])
    return SimpleNamespace(fleet=fleet, metrics=Metrics(), is_draining=False)


def numbers(snapshot: dict) -> list[int]:
    return [one["number"] for one in snapshot["replicas"][0]["new_steps"]]


def test_a_step():
    [told] = Snapshots(router(replica(steps=[7]))).next()["replicas"][0]["new_steps"]
    assert told == {"number": 7, "time": 107.0, "seconds": 0.5, "decode": 3, "prompt": 4, "padding": 1}


def test_a_replica_that_was_restarted_numbers_its_steps_anew():
    server = router(replica(steps=[8, 9]))
    page = Snapshots(server)
    assert numbers(page.next()) == [8, 9]
    server.fleet.replicas[0] = replica(steps=[1, 2], started=2.0)
    assert numbers(page.next()) == [1, 2]
    server.fleet.replicas[0].steps.append(step(3))
    assert numbers(page.next()) == [3]
    assert numbers(page.next()) == []


def test_a_replica_that_lost_its_steps_for_a_while_does_not_tell_them_again():
    server = router(replica(steps=[8, 9]))
    page = Snapshots(server)
    page.next()
    server.fleet.replicas[0].steps.clear()
    assert numbers(page.next()) == []
    server.fleet.replicas[0].steps.extend([step(9), step(10)])
    assert numbers(page.next()) == [10]


def test_totals_leave_out_what_lost_replicas_said_last():
    ready = replica("a:1", running=2, waiting=1)
    draining = replica("b:1", "draining", running=3)
    lost = replica("c:1", "lost", running=40, waiting=50)
    snapshot = Snapshots(router(ready, draining, lost)).next()
    assert (snapshot["running"], snapshot["waiting"]) == (5, 1)
    assert [one["state"] for one in snapshot["replicas"]] == ["ready", "draining", "lost"]
    assert snapshot["replicas"][0]["outstanding_tokens"] == 12


@pytest.mark.parametrize(
    "seconds, bucket",
    [(0.0, 0), (0.005, 0), (0.0051, 1), (0.3, 6), (80.0, len(TTFT_BUCKETS) - 1), (81.0, len(TTFT_BUCKETS))],
)
def test_the_bucket_of_a_time(seconds, bucket):
    metrics = Metrics()
    metrics.ttft.labels("tiny").observe(seconds)
    counted = histogram(metrics.ttft, TTFT_BUCKETS)
    assert counted["bounds"] == list(TTFT_BUCKETS)
    assert counted["counts"] == [int(i == bucket) for i in range(len(TTFT_BUCKETS) + 1)]


def test_a_histogram_is_over_all_models():
    metrics = Metrics()
    assert histogram(metrics.ttft, TTFT_BUCKETS)["counts"] == [0] * (len(TTFT_BUCKETS) + 1)
    for model, seconds in [("a", 0.001), ("b", 0.001), ("b", 0.3)]:
        metrics.ttft.labels(model).observe(seconds)
    counts = histogram(metrics.ttft, TTFT_BUCKETS)["counts"]
    assert (counts[0], counts[6], sum(counts)) == (2, 1, 3)


def test_requests_are_in_the_histograms():
    async def main() -> dict:
        async with served([scripted_engine(ANSWERS)]) as server, http(server.url) as client:
            await complete(client, "hello")
            await complete(client, "bye")
            return await first(client)

    snapshot = run(main())
    assert sum(snapshot["ttft"]["counts"]) == 2
    assert 0 < sum(snapshot["gaps"]["counts"]) <= len("one two three") + len("four")
