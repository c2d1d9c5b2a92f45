"""The server on Ray Serve: what the official client sees, replicas that die, and as many as there is work for."""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import openai_client
import pytest
import test_openai
from openai_client import GREEDY, PROMPT, engines, split
from prometheus_client.parser import text_string_to_metric_families
from ray_cluster import actors, cluster, free, kill, save_wide_model
from serving import TIMEOUT
from tiny import SMALL

from fastgen_jax import Engine

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork")]

START_S = 180
"""Seconds for a replica to start, on a machine that has other things to do."""

MAX_LEN = 2048
ENGINE = SMALL | {"num_blocks": 1024, "dtype": "float32", "warm_up": True}
del ENGINE["show_progress"]

LONG = GREEDY | {"max_tokens": 1800}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint."""
    path = tmp_path_factory.mktemp("tiny")
    save_wide_model(path, MAX_LEN)
    return path


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    with cluster(num_cpus=2, num_gpus=3) as url:
        yield url


@pytest.fixture(scope="module")
def url(proxy, folder) -> Iterator[str]:
    """Two replicas, with a GPU each, as Ray is to think."""
    yield from deployed(proxy, folder, min_replicas=2, max_replicas=2)


@pytest.fixture(scope="module")
def own(folder) -> Engine:
    """The same engine, asked directly."""
    return Engine.from_pretrained(str(folder), show_progress=False, **ENGINE)


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai_client.connect(url) as found:
        yield found


def deployed(proxy: str, folder: Path, **options: Any) -> Iterator[str]:
    from ray import serve

    from fastgen_jax.serving.ray_app import Options, app

    fixed = {"model": str(folder), "name": "tiny", "engine": ENGINE, "log_level": "warning"}
    serve.run(app(Options(**fixed, **options)))
    wait(lambda: set(replicas(proxy).values()) == {"ready"}, START_S)
    yield proxy
    serve.delete("default")


async def until(condition: Callable[[], Any], seconds: float = TIMEOUT) -> None:
    """Wait until it holds; it may block."""
    end = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.05)


def wait(condition: Callable[[], Any], seconds: float = TIMEOUT) -> None:
    """`until`, where there are no coroutines."""
    asyncio.run(until(condition, seconds))


def replicas(url: str) -> dict[str, str]:
    """Address -> state."""
    return httpx2.get(f"{url}/health", timeout=TIMEOUT).json()["replicas"]


def metric(url: str, name: str, **options: Any) -> dict[str, float]:
    """A metric of ours, by replica, or with "" for one that is the router's own."""
    text = httpx2.get(f"{url}/metrics", timeout=TIMEOUT, **options).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels.get("replica", ""): sample.value for sample in samples if sample.name == f"fastgen:{name}"}


def running(url: str) -> list[float]:
    """How many sequences each replica computes."""
    return list(metric(url, "num_requests_running").values())


def connect(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=START_S)


async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> str:
    return (await client.completions.create(prompt=PROMPT, **split(fields))).choices[0].text


async def listen(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> str:
    stream = await client.completions.create(prompt=PROMPT, stream=True, **split(fields))
    return "".join([chunk.choices[0].text async for chunk in stream])


async def ask_once(url: str, fields: dict[str, Any]) -> str:
    async with connect(url) as client:
        return await ask(client, fields)


def in_time(main: Any, seconds: float) -> Any:
    return asyncio.run(asyncio.wait_for(main, seconds))


# What the official client sees, with two replicas: every test of `test_openai` that asks the server of its fixtures

OF_OPENAI = {
    name: test
    for name, test in vars(test_openai).items()
    if name.startswith("test_") and {"client", "url"} & inspect.signature(test).parameters.keys()
}
assert len(OF_OPENAI) > 15
del OF_OPENAI["test_a_request_id_comes_back"]  # Ray's proxy makes them up in another way
globals().update(OF_OPENAI)


def test_a_request_id_comes_back_once(client):
    reply = client.completions.with_raw_response.create(
        prompt=PROMPT, extra_headers={"x-request-id": "my-id"}, **split(GREEDY)
    )
    assert reply.headers.get_list("x-request-id") == ["my-id"]
    assert reply.parse().id == "cmpl-my-id"


# What is around it


def test_health_metrics_and_the_page(url):
    ready = replicas(url)
    assert list(ready.values()) == ["ready", "ready"]
    assert metric(url, "replica_up") == dict.fromkeys(ready, 1)
    for path in ("/", "/docs"):
        assert httpx2.get(f"{url}{path}").headers["content-type"].startswith("text/html")
    with httpx2.stream("GET", f"{url}/events", timeout=TIMEOUT) as events:
        assert events.status_code == 200


def test_each_replica_has_a_gpu_of_its_own(url):
    wait(lambda: free("GPU") == 3 - 2)


def test_requests_go_to_both_replicas(url):
    async def main() -> None:
        before = metric(url, "steps_total")
        async with connect(url) as client:
            await asyncio.gather(*(ask(client, GREEDY) for _ in range(4)))
        await until(lambda: all(after > before[name] for name, after in metric(url, "steps_total").items()))

    in_time(main(), TIMEOUT)


def test_a_client_that_leaves_frees_what_it_had(url):
    before = metric(url, "request_aborted_total").get("", 0)
    body = {"prompt": PROMPT, "stream": True, **LONG}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as reply:
        lines = reply.iter_lines()
        next(lines)
        wait(lambda: sum(running(url)) == 1)
    wait(lambda: metric(url, "request_aborted_total").get("") == before + 1)
    wait(lambda: sum(running(url)) == 0)


def test_the_front_goes_on_without_the_registry(url):
    before, [lost] = replicas(url), actors("Registry")
    kill(lost)
    for _ in range(10):
        assert in_time(ask_once(url, GREEDY), TIMEOUT)
    wait(lambda: actors("Registry") not in ([], [lost]))
    wait(lambda: replicas(url) == before)


def test_a_replica_that_dies_takes_with_it_what_has_streamed_and_ray_starts_another(url, own):
    [(text, _)] = engines(own, PROMPT, **LONG)
    before = replicas(url)

    async def main() -> list[str | BaseException]:
        async with connect(url) as client:
            tasks = [asyncio.create_task(listen(client, LONG)) for _ in range(2)]
            await until(lambda: running(url) == [1, 1])
            tasks += [asyncio.create_task(ask(client, LONG)) for _ in range(8)]
            await until(lambda: sum(running(url)) == 10 and min(running(url)) > 1)
            kill(actors("ModelReplica")[0])
            return await asyncio.gather(*tasks, return_exceptions=True)

    answers = in_time(main(), START_S)
    [lost] = [answer for answer in answers if answer != text]
    assert lost in answers[:2]
    assert isinstance(lost, openai.APIError) and lost.code == "replica_lost", lost
    wait(lambda: replicas(url).keys() != before.keys() and list(replicas(url).values()) == ["ready", "ready"], START_S)
    assert len(replicas(url).keys() & before.keys()) == 1
    assert in_time(ask_once(url, LONG), TIMEOUT) == text


# As many as there is work for


@pytest.fixture
def scaled(proxy, folder) -> Iterator[str]:
    """One replica, or two while more than 2000 tokens are outstanding."""
    scaling = {"min_replicas": 1, "max_replicas": 2, "tokens_per_replica": 2000}
    delays = {"upscale_delay_s": 1, "downscale_delay_s": 2, "drain_s": 60}
    yield from deployed(proxy, folder, gpus_per_replica=0, api_keys="other,key", **scaling, **delays)


def test_replicas_come_with_the_load_and_go_without_disturbing_what_runs(scaled):
    """40 clients are more than one replica should have, 4 are not."""
    url = scaled
    assert (len(replicas(url)), free("GPU")) == (1, 3)
    assert httpx2.get(f"{url}/v1/models", timeout=TIMEOUT).status_code == 401

    async def keep(asking: Callable[..., Any], fields: dict[str, Any], stop: asyncio.Event) -> list[int]:
        """How long the answers were that one client had, one after the other."""
        lengths = []
        async with connect(url, "key") as client:
            while not stop.is_set():
                lengths.append(len(await asking(client, fields)))
        return lengths

    async def main() -> tuple[list[list[int]], list[list[int]]]:
        stop_many, stop_few = asyncio.Event(), asyncio.Event()
        many = [asyncio.create_task(keep(ask, GREEDY | {"max_tokens": 100}, stop_many)) for _ in range(36)]
        few = [asyncio.create_task(keep(listen, GREEDY | {"max_tokens": 300}, stop_few)) for _ in range(4)]
        await until(lambda: list(replicas(url).values()) == ["ready", "ready"], START_S)
        stop_many.set()
        of_many = await asyncio.gather(*many)
        await until(lambda: len(replicas(url)) == 1, START_S)
        await until(lambda: len(actors("ModelReplica")) == 1)
        stop_few.set()
        return of_many, await asyncio.gather(*few)

    of_many, of_few = in_time(main(), 2 * START_S)
    assert {length for lengths in of_many for length in lengths} == {100}
    assert {length for lengths in of_few for length in lengths} == {300}
