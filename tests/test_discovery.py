"""What a cluster that starts and stops replicas by itself needs of us: who is there, how many there should be, and a
router and a replica that follow."""

import asyncio
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx2
import pytest
from doubles import Asking, Gate, request, text_of, until
from scripted import scripted_engine, tokens
from serving import replica_server, run, served

from fastgen_jax.serving.discovery import METRIC, SILENT_S, OutstandingTokens, Registry
from fastgen_jax.serving.router import Router


def saying(letter: str):
    """A script: `letter` without end."""
    return lambda seq, index: tokens(letter)[0]


# Who is there


def test_a_registry_knows_who_has_spoken_lately(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    registry = Registry()
    assert registry.addresses() == []
    for address in ("b:2", "a:1", "c:3"):
        registry.beat(address)
    assert registry.addresses() == ["a:1", "b:2", "c:3"]
    registry.leave("c:3")
    registry.leave("d:4")
    now += SILENT_S - 1
    registry.beat("b:2")
    assert registry.addresses() == ["a:1", "b:2"]
    now += 1
    assert registry.addresses() == ["b:2"]
    registry.beat("a:1")
    assert registry.addresses() == ["a:1", "b:2"]


# How many there should be


@pytest.mark.parametrize(
    ("outstanding", "wanted"),
    [
        ([], 2),
        ([0, 0], 2),
        ([1000, 900], 2),
        ([1000, 1001], 3),
        ([3000, 0], 3),
        ([3000.5], 4),
        ([2500, 2500, 2500], 8),
        ([9000, 9000], 8),
    ],
)
def test_a_replica_for_every_so_many_outstanding_tokens(outstanding, wanted):
    """1000 each, from 2 replicas to 8."""
    context = SimpleNamespace(
        aggregated_metrics={METRIC: dict(enumerate(outstanding)), "other": {0: 1e9}},
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=8,
    )
    assert OutstandingTokens(1000)(context) == (wanted, {})


@pytest.mark.parametrize("metrics", [None, {}])
def test_as_few_as_may_be_while_nobody_has_reported(metrics):
    context = SimpleNamespace(
        aggregated_metrics=metrics, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8
    )
    assert OutstandingTokens(1000)(context) == (1, {})


def test_outstanding_tokens_are_the_prompts_until_they_are_computed_and_the_outputs_that_are_expected():
    gate = Gate()

    async def main() -> None:
        async with replica_server(scripted_engine(gate)) as (replica, _):
            assert replica.outstanding_tokens == 0
            short = Asking(replica, request("hello", max_tokens=50), stream=True)
            await until(lambda: replica.outstanding_tokens == 5 + 50)
            long = Asking(replica, request("hello you", max_tokens=200, n=2), stream=True)
            await until(lambda: replica.outstanding_tokens == 5 + 50 + 9 + 2 * 128)
            gate.open()
            await asyncio.gather(short.task, long.task)
            assert (len(text_of(short.events)), len(text_of(long.events))) == (50, 400)
            assert replica.outstanding_tokens == 0

    run(main())


def test_outstanding_tokens_fall_with_every_token():
    async def main() -> None:
        async with replica_server(scripted_engine(saying("x"))) as (replica, _):
            num_tokens = 0
            async for event in replica.generate(request("hello", max_tokens=50), stream=True):
                num_tokens += len(event.delta.token_ids)
                if event.HasField("delta") and num_tokens < 50:
                    assert replica.outstanding_tokens == 50 - num_tokens
            assert (num_tokens, replica.outstanding_tokens) == (50, 0)

    run(main())


# A router that follows


def channels(router: Router) -> set[str]:
    """Of how many replicas it holds a connection."""
    return {replica.address for replica in vars(router.fleet)["_watches"]}


def test_a_router_has_the_replicas_that_it_is_told_to_have():
    """One that is left out gets no new request and finishes what it has; one that comes is used when it is ready."""
    gate, ask = Gate(), request(max_tokens=20)

    async def main() -> None:
        async with (
            replica_server(scripted_engine(gate)) as (_, first),
            replica_server(scripted_engine(saying("b"))) as (_, second),
        ):
            router = Router([])
            await router.start()
            with pytest.raises(Exception, match="no replica has been reached yet: there are none"):
                await anext(router.generate(ask, stream=False))

            router.fleet.set_addresses([first.address])
            await until(lambda: router.is_ready)
            running = Asking(router, ask, stream=True)
            await until(lambda: running.events)

            router.fleet.set_addresses([second.address])
            assert not router.is_ready
            await until(lambda: router.is_ready)
            assert [stats.address for stats in router.stats(0)] == [second.address]
            assert channels(router) == {first.address, second.address}
            for _ in range(3):
                asking = Asking(router, ask, stream=True)
                await asking.task
                assert text_of(asking.events) == "b" * 20

            gate.open()
            await running.task
            assert (running.error, text_of(running.events)) == (None, "x" * 20)
            router.fleet.set_addresses([second.address])
            assert channels(router) == {second.address}

            router.fleet.set_addresses([first.address, second.address])
            await until(lambda: [stats.state for stats in router.stats(0)] == ["ready", "ready"])
            both = [Asking(router, ask, stream=True) for _ in range(2)]
            await asyncio.gather(*(each.task for each in both))
            assert {text_of(each.events) for each in both} == {"x" * 20, "b" * 20}
            await router.close()

    run(main())


def test_a_replica_that_stays_keeps_its_connection_and_its_load():
    gate = Gate()

    async def main() -> None:
        async with served([scripted_engine(gate)]) as s:
            [replica] = s.router.fleet.replicas
            asking = Asking(s.router, request(max_tokens=5), stream=True)
            await until(lambda: asking.events)
            s.router.fleet.set_addresses([replica.address, "127.0.0.1:9"])
            assert s.router.fleet.replicas[0] is replica and len(replica.load) == 1
            s.router.fleet.set_addresses([replica.address])
            assert s.router.fleet.replicas == [replica]
            gate.open()
            await asking.task
            assert text_of(asking.events) == "xxxxx"

    run(main())


def test_a_replica_that_was_left_out_can_still_be_told_to_abort():
    async def main() -> None:
        async with served([scripted_engine(saying("x"))]) as s:
            asking = Asking(s.router, request(request_id="one", max_tokens=None), stream=True)
            await until(lambda: asking.has_seen_answer)
            s.router.fleet.set_addresses([])
            assert await s.router.abort("one") or asking.task.done()
            await asking.task
            assert asking.error is None

    run(main())


# What is around it


def test_events_of_a_page_end_when_its_time_is_up():
    """Ray ends a front when all its requests have ended."""

    async def main() -> str:
        async with served([scripted_engine([])], app={"page_s": 0.6}) as s, httpx2.AsyncClient(timeout=20) as http:
            return (await http.get(f"{s.url}/events")).text

    assert run(main()).count("data: {") >= 1


def test_ray_is_imported_by_its_own_module_alone_which_names_the_extra():
    code = """if True:
        import sys
        import fastgen_jax.serving.server, fastgen_jax.serving.replica_process, fastgen_jax.serving.discovery
        assert "ray" not in sys.modules
        sys.modules["ray"] = None
        try:
            import fastgen_jax.serving.ray_app
        except ImportError as error:
            assert str(error) == "Ray Serve needs an extra: pip install 'fastgen-jax[ray]' (ray is missing)", error
        else:
            raise AssertionError"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
