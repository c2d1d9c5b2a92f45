"""The router: where requests go, what happens to them when replicas do not keep up, die or come back, and that nothing
is ever left behind."""

import asyncio
import logging

import grpc
import pytest
from doubles import (
    ENDLESS,
    LOST,
    Asking,
    FakeReplica,
    Gate,
    Stub,
    kinds,
    refused,
    request,
    slowed,
    text_of,
    until,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted import assert_idle, scripted_engine, tokens
from serving import replica_server, run, served

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import remote
from fastgen_jax.serving.balance import prompt_chunks
from fastgen_jax.serving.errors import Refusal
from fastgen_jax.serving.router import Router
from fastgen_jax.serving.service import Server

LONG = "x" * 200
ANSWERS = {"hello": tokens("one ", "né", "👍", " two"), "long": tokens(LONG)}
UNAVAILABLE, DEADLINE_EXCEEDED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


def engine():
    return scripted_engine(ANSWERS)


def slow_engine():
    return slowed(engine(), 0.005)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def router_over(*replicas: FakeReplica, **options) -> Router:
    router = Router([], **options)
    router.fleet.replicas = list(replicas)
    return router


def waiting(router: Router) -> int:
    return sum(vars(router)["_waiting"].values())


def assert_nothing_left(router: Router) -> None:
    assert waiting(router) == 0
    assert not vars(router)["_live"]
    assert [(len(r.load), r.load.outstanding) for r in router.fleet.replicas] == [(0, 0)] * len(router.fleet.replicas)


def code_of(error: grpc.aio.AioRpcError) -> str | None:
    return dict(error.trailing_metadata()).get("fastgen-code")


async def kill(server: Server) -> None:
    """Break off its connections and close its port, as if its process had died."""
    await vars(server)["_server"].stop(0)


def stop_watching(router: Router) -> None:
    for watch in vars(router.fleet)["_watches"].values():
        watch.cancel()


def index_of_busy(router: Router) -> int:
    """Which replica has a request."""
    (index,) = [i for i, replica in enumerate(router.fleet.replicas) if len(replica.load)]
    return index


# A router looks like a replica


def test_what_comes_is_what_the_replica_says():
    async def main():
        async with served([engine()]) as s, Stub(s.grpc) as stub:
            events = await stub.stream(request(request_id="mine"))
            reply = await stub.generate(request())
            assert_nothing_left(s.router)
            return events, reply

    events, reply = run(main())
    assert kinds(events)[0] == "accepted" and kinds(events)[-1] == "response"
    assert set(kinds(events)[1:-1]) == {"delta"}
    accepted = events[0].accepted
    assert (accepted.request_id, accepted.num_prompt_tokens) == ("mine", 5)
    assert text_of(events) == events[-1].response.text == reply.responses[0].text == "one né👍 two"
    assert len(reply.request_id) == 32


def test_tokenize_detokenize_and_stats_go_through():
    async def main():
        async with served([engine(), engine()]) as s, Stub(s.grpc) as stub:
            token_ids = (await stub.raw.Tokenize(pb.TokenizeRequest(prompt=request("né").prompt))).token_ids
            text = (await stub.raw.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))).text
            stats = (await stub.raw.Stats(pb.StatsRequest())).replicas
            return list(token_ids), text, stats, [server.address for server in s.servers]

    token_ids, text, stats, addresses = run(main())
    assert token_ids == tokens("n", "é".encode())
    assert text == "né"
    assert [(r.address, r.state, r.model) for r in stats] == [(a, "ready", "tiny") for a in addresses]


@pytest.mark.parametrize("asked", [request([1]), request([{"role": "user", "content": "x"}]), pb.GenerateRequest()])
def test_an_empty_prompt_is_refused(asked):
    asked.prompt.token_ids.ClearField("ids")
    asked.prompt.conversation.ClearField("messages")

    async def main():
        async with served([engine()]) as s, Stub(s.grpc) as stub:
            error = await refused(stub.generate(asked))
            assert_nothing_left(s.router)
            return error

    assert run(main()).code() == INVALID


# Where requests go


def test_requests_go_where_the_fewest_tokens_are_outstanding():
    async def main():
        a, b = FakeReplica("a"), FakeReplica("b")
        router = router_over(a, b)
        Asking(router, request([1] * 50, max_tokens=100, request_id="big"), stream=True)
        await settle()
        for number in range(5):
            Asking(router, request([1, 2], max_tokens=10, request_id=f"small{number}"), stream=True)
            await settle()
        first = len(a.calls), len(b.calls)
        a.advance("big")
        a.advance("big")  # its prompt is done, and one token of 100
        await settle()
        return first, a.load.outstanding, b.load.outstanding

    assert run(main()) == ((1, 5), 99, 5 * 12)


def test_requests_that_begin_alike_go_to_one_replica():
    async def main():
        a, b = FakeReplica("a"), FakeReplica("b")
        router = router_over(a, b)
        beginnings = [[i] * 256 for i in range(4)]
        for number in range(16):
            asking = Asking(router, request([*beginnings[number % 4], number], request_id=str(number)), stream=False)
            await settle()
            (a if str(number) in a.calls else b).finish(str(number))
            await asking.task
        return [int(name) % 4 for name in a.tried], [int(name) % 4 for name in b.tried]

    on_a, on_b = run(main())
    assert len(on_a) == len(on_b) == 8
    assert not set(on_a) & set(on_b)


@pytest.mark.parametrize(
    ("replica_class", "goes_to"), [("", "interactive any"), ("interactive", "interactive any"), ("batch", "batch any")]
)
def test_a_request_goes_to_replicas_of_its_class_and_of_none(replica_class, goes_to):
    async def main():
        replicas = [FakeReplica(name, replica_class=name) for name in ("interactive", "batch")] + [FakeReplica("any")]
        router = router_over(*replicas)
        for number in range(8):
            Asking(router, request(replica_class=replica_class, request_id=str(number)), stream=True)
            await settle()
        return {replica.address for replica in replicas if replica.calls}

    assert run(main()) == set(goes_to.split())


def test_a_class_that_is_not_there_is_refused_with_those_that_are():
    async def main():
        engines = [engine(), engine()]
        async with served(engines, classes=["interactive", "batch"]) as s, Stub(s.grpc) as stub:
            error = await refused(stub.generate(request(replica_class="premium")))
            assert_nothing_left(s.router)
            return error

    error = run(main())
    assert error.code() == INVALID
    assert error.details() == "replica_class='premium' is not served; the classes are batch, interactive"


def test_several_models_behind_one_router():
    async def main():
        engines = [scripted_engine(tokens(answer)) for answer in ("a", "b")]
        async with served(engines, models=["first", "second"]) as s, Stub(s.grpc) as stub:
            replies = [await stub.generate(request(model=name)) for name in ("first", "second")]
            unknown = await refused(stub.generate(request(model="third")))
            nameless = await refused(stub.generate(request()))
            return [reply.responses[0].text for reply in replies], unknown, nameless

    texts, unknown, nameless = run(main())
    assert texts == ["a", "b"]
    assert (unknown.code(), code_of(unknown)) == (NOT_FOUND, "model_not_found")
    assert unknown.details() == "model='third' is not served here; the models are first, second"
    assert nameless.code() == INVALID
    assert nameless.details() == "the request names no model; the models are first, second"


def test_a_router_that_has_reached_no_replica_says_so():
    async def main():
        router = Router(["127.0.0.1:9"])
        await router.start()
        asking = Asking(router, request(), stream=False)
        await asking.task
        await router.close()
        return asking.error, router.is_ready

    error, is_ready = run(main())
    assert (error.status, error.code, error.retry_after) == (UNAVAILABLE, "starting", 5)
    assert error.message == "no replica has been reached yet: 127.0.0.1:9 is lost"
    assert not is_ready


@pytest.mark.parametrize("asked", [request(model="other"), request(replica_class="batch")], ids=["model", "class"])
def test_what_a_replica_may_serve_that_has_not_been_reached_is_unavailable_and_not_wrong(asked):
    async def main():
        known, unknown = FakeReplica("a", replica_class="interactive"), FakeReplica("b", model="")
        asking = Asking(router_over(known, unknown), asked, stream=False)
        await asking.task
        return asking.error

    error = run(main())
    assert (error.status, error.code, error.retry_after) == (UNAVAILABLE, "starting", 5)
    assert error.message.endswith("and b has not been reached yet")


def test_it_is_ready_when_every_model_has_a_ready_replica():
    a, b, c = FakeReplica("a", model="one"), FakeReplica("b", model="one"), FakeReplica("c", model="two")
    router = router_over(a, b, c)
    assert router.is_ready
    a.stats.state = "lost"
    assert router.is_ready
    c.stats.state = "starting"
    assert not router.is_ready


# When a replica is lost


def test_a_request_that_has_told_nothing_is_run_elsewhere_though_nobody_knew_that_the_replica_was_dead():
    async def main():
        async with served([engine(), engine()]) as s, Stub(s.grpc) as stub:
            stop_watching(s.router)
            await kill(s.servers[0])
            events = await stub.stream(request(echo=True))
            assert s.router.fleet.replicas[0].state == "lost"
            assert_nothing_left(s.router)
            return events

    events = run(main())
    assert kinds(events)[0] == "accepted" and kinds(events).count("accepted") == 1
    assert events[0].accepted.echo == "hello"
    assert text_of(events) == "one né👍 two"


def test_one_that_is_not_streamed_is_run_elsewhere_when_it_is_half_done():
    engines = [slow_engine(), slow_engine()]

    async def main():
        async with served(engines) as s, Stub(s.grpc) as stub:
            call = asyncio.ensure_future(stub.generate(request("long", **ENDLESS)))
            await until(lambda: max(e.stats().generated_tokens for e in engines) > 20)
            await kill(s.servers[index_of_busy(s.router)])
            reply = await call
            assert_nothing_left(s.router)
            return reply, s.router.metrics.text().decode()

    reply, metrics = run(main())
    assert [response.text for response in reply.responses] == [LONG]
    assert 'fastgen:request_retries_total{model_name="tiny"} 1.0' in metrics
    for each in engines:
        assert_idle(each)


def test_one_that_has_streamed_ends_with_the_number_of_tokens_that_came():
    engines = [slow_engine(), slow_engine()]

    async def main():
        async with served(engines) as s, Stub(s.grpc) as stub:
            events = []
            try:
                async for event in stub.raw.GenerateStream(request("long", **ENDLESS)):
                    events.append(event)
                    if len(events) == 10:
                        await kill(s.servers[index_of_busy(s.router)])
            except grpc.aio.AioRpcError as error:
                assert_nothing_left(s.router)
                return events, error
            raise AssertionError("it did not end with an error")

    events, error = run(main())
    num_tokens = sum(len(event.delta.token_ids) for event in events)
    assert (error.code(), code_of(error)) == (UNAVAILABLE, "replica_lost")
    assert error.details() == (
        f"the replica that ran this request was lost after {num_tokens} tokens; "
        "what has come is right, and asking again begins anew"
    )
    assert text_of(events) == "x" * num_tokens
    for each in engines:
        assert_idle(each)


def test_an_engine_that_breaks_is_a_replica_that_is_lost():
    engines = [slow_engine(), slow_engine()]

    async def main():
        async with served(engines) as s, Stub(s.grpc) as stub:
            call = asyncio.ensure_future(stub.generate(request("long", **ENDLESS)))
            await until(lambda: max(e.stats().generated_tokens for e in engines) > 20)
            broken = index_of_busy(s.router)
            vars(engines[broken])["_runner"].broken["fetch"] = OSError("the device is gone")
            text = (await call).responses[0].text
            await until(lambda: s.router.fleet.replicas[broken].state == "draining")
            return text

    assert run(main()) == LONG


def test_when_all_are_lost_the_request_is_refused_and_says_when_to_come_back():
    async def main():
        async with served([engine(), engine()]) as s, Stub(s.grpc) as stub:
            stop_watching(s.router)
            for server in s.servers:
                await kill(server)
            error = await refused(stub.generate(request()))
            assert_nothing_left(s.router)
            return error

    error = run(main())
    assert (error.code(), code_of(error)) == (UNAVAILABLE, "no_replica")
    assert dict(error.trailing_metadata())["retry-after"] == "5"


def test_a_lost_replica_is_out_without_traffic_and_back_when_it_answers_again():
    async def main():
        async with served([engine()]) as s, Stub(s.grpc) as stub:
            replica = s.router.fleet.replicas[0]
            await kill(s.servers[0])
            await until(lambda: replica.state == "lost", 2)
            assert not s.router.is_ready
            again = Server(s.replicas[0], "127.0.0.1", s.servers[0].port)
            await again.start()
            await until(lambda: replica.state == "ready")
            text = (await stub.generate(request())).responses[0].text
            await again.stop()
            return text

    assert run(main()) == "one né👍 two"


def test_another_process_at_the_same_address_has_an_empty_cache_and_its_own_steps():
    long_prompt = [9] * 130

    async def main():
        engines = [scripted_engine(tokens("a")) for _ in range(2)]
        async with served(engines[:1]) as s, replica_server(engines[1]) as (successor, _), Stub(s.grpc) as stub:
            replica = s.router.fleet.replicas[0]
            await stub.generate(request(long_prompt, max_tokens=1))
            await until(lambda: len(replica.steps) > 3)
            cached = [replica.load.cached_tokens(prompt_chunks(long_prompt))]
            await kill(s.servers[0])
            await until(lambda: replica.state == "lost")
            server = Server(successor, "127.0.0.1", s.servers[0].port)
            await server.start()
            async with Stub(server.address) as direct:  # it has had more steps than the other
                await direct.generate(request([8] * 240))
            await until(lambda: replica.state == "ready")
            cached.append(replica.load.cached_tokens(prompt_chunks(long_prompt)))
            await stub.generate(request())
            await until(lambda: replica.steps and replica.steps[-1].number == engines[1].stats().steps)
            await server.stop()
            return cached, list(replica.steps)

    cached, steps = run(main())
    assert cached == [128, 0]
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step.prompt_tokens for step in steps) == 240 + 5


def test_a_replica_that_says_nothing_counts_as_lost_after_two_looks(monkeypatch):
    monkeypatch.setattr(remote, "SILENCE_S", 0.1)

    async def main():
        async def listen(reader, writer):
            await reader.read()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        replica = remote.RemoteReplica(f"127.0.0.1:{port}")
        replica.stats.state = "ready"
        states = []
        for _ in range(2):
            await replica.look()
            states.append(replica.state)
        await replica.close()
        server.close()
        return states

    assert run(main()) == ["ready", "lost"]


class Hung:
    """A backend that accepts requests and then says no more."""

    def __init__(self):
        self.num_cancelled = 0

    async def generate(self, asked, *, stream, timeout):
        try:
            yield pb.GenerateEvent(accepted=pb.Accepted(request_id=asked.request_id))
            if asked.params.seed:
                yield pb.GenerateEvent(delta=pb.Delta(text="a", token_ids=[1]))
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1

    def stats(self, after_step):
        return [pb.ReplicaStats(model="tiny", state="ready", started=1)]


@pytest.mark.parametrize("silence", [0.0, remote.GIVEN_UP_S + 1])
def test_when_a_replica_falls_silent_its_untold_requests_end_and_later_the_others_too(silence):
    async def main():
        backend = Hung()
        server = Server(backend, "127.0.0.1", 0)
        await server.start()
        replica = remote.RemoteReplica(server.address)
        await replica.look()
        untold = Asking(replica, request(), stream=True, timeout=60)
        unstreamed = Asking(replica, request(seed=1), stream=False, timeout=60)
        told = Asking(replica, request(seed=1), stream=True, timeout=60)
        await until(lambda: len(untold.events) + len(told.events) + len(unstreamed.events) == 5)
        vars(replica)["_last_word"] -= silence
        replica._lost("it says nothing")
        await until(lambda: untold.error and unstreamed.error)
        await settle()
        ended = [asking.error and asking.error.code for asking in (untold, unstreamed, told)]
        told.task.cancel()
        await asyncio.gather(told.task, return_exceptions=True)
        await until(lambda: backend.num_cancelled == 3)
        await replica.close()
        await server.stop()
        return ended

    last = "replica_lost" if silence else None
    assert run(main()) == ["replica_lost", "replica_lost", last]


def test_what_is_asked_of_a_replica_that_is_let_go_is_lost_and_not_cancelled():
    """Nobody has cancelled who asks: it gets an answer."""

    class Silent(Hung):
        async def tokenize(self, asked):
            await asyncio.Event().wait()

    async def main():
        server = Server(Silent(), "127.0.0.1", 0)
        await server.start()
        replica = remote.RemoteReplica(server.address)
        asking = asyncio.ensure_future(replica.tokenize(pb.TokenizeRequest()))
        await replica.look()
        await asyncio.sleep(0.05)
        await replica.close()
        [error] = await asyncio.gather(asking, return_exceptions=True)
        await server.stop()
        return error

    error = run(main())
    assert isinstance(error, Refusal), repr(error)
    assert (error.status, error.code) == (UNAVAILABLE, "replica_lost")


def test_a_router_is_no_replica():
    async def main():
        async with served([engine(), engine()]) as s:
            replica = remote.RemoteReplica(s.grpc)
            await replica.look()
            await replica.close()
            return replica.state

    assert run(main()) == "lost"


# Limits


def test_the_queue_of_a_model_is_bounded_and_the_next_is_told_when_to_come_back():
    gate = Gate()

    async def main():
        engines = [scripted_engine(gate), engine()]
        async with served(engines, models=["full", "free"], max_queue=2) as s, Stub(s.grpc) as stub:
            calls = [asyncio.ensure_future(stub.generate(request(model="full", max_tokens=3))) for _ in range(2)]
            await until(lambda: waiting(s.router) == 2)
            error = await refused(stub.generate(request(model="full")))
            other = await stub.generate(request(model="free"))
            metrics = s.router.metrics.text().decode()
            gate.open()
            await asyncio.gather(*calls)
            assert_nothing_left(s.router)
            again = await stub.generate(request(model="full", max_tokens=3))
            return error, other, metrics, again

    error, other, metrics, again = run(main())
    assert (error.code(), code_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")
    assert error.details() == "2 requests wait for full already, and no more may (--max-queue)"
    assert float(dict(error.trailing_metadata())["retry-after"]) >= 1
    assert 'fastgen:request_rejected_total{model_name="full",reason="queue_full"} 1.0' in metrics
    assert other.responses[0].text == "one né👍 two"
    assert again.responses[0].text == "xxx"


def test_a_request_that_has_begun_waits_no_more():
    async def main():
        a = FakeReplica("a")
        router = router_over(a, max_queue=1)
        first = Asking(router, request(request_id="1"), stream=True)
        await settle()
        assert waiting(router) == 1
        a.advance("1")
        await settle()
        assert waiting(router) == 1
        a.advance("1")
        await settle()
        assert waiting(router) == 0
        second = Asking(router, request(request_id="2"), stream=True)
        await settle()
        a.finish("1")
        a.finish("2")
        await asyncio.gather(first.task, second.task)
        assert first.error is second.error is None
        assert_nothing_left(router)

    run(main())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("whose", ["client's", "server's"])
def test_a_request_whose_time_is_up_ends_and_its_blocks_are_free(whose, stream):
    each = slow_engine()

    async def main():
        async with served([each], request_timeout=60 if whose == "client's" else 0.3) as s, Stub(s.grpc) as stub:
            call = stub.stream if stream else stub.generate
            error = await refused(call(request("long", **ENDLESS), timeout=0.3 if whose == "client's" else None))
            await until(lambda: each.stats().free_blocks == each.stats().blocks)
            await until(lambda: not vars(s.router)["_live"])
            assert_nothing_left(s.router)
            return error

    error = run(main())
    assert error.code() == DEADLINE_EXCEEDED
    if whose == "server's":
        assert (error.details(), code_of(error)) == ("the request's time is up", "timeout")
    assert_idle(each)


def test_a_retry_has_what_time_is_left():
    async def main():
        a, b = FakeReplica("a"), FakeReplica("b")
        router = router_over(a, b)
        asking = Asking(router, request(request_id="1"), stream=False, timeout=10.0)
        await settle()
        await asyncio.sleep(0.2)
        a.die()
        await settle()
        b.fail("1", Refusal(DEADLINE_EXCEEDED, "Deadline Exceeded"))
        await asking.task
        return a.timeouts[0], b.timeouts[0], asking.error

    first, second, error = run(main())
    assert 9.9 < first <= 10.0
    assert second <= first - 0.2
    assert (error.status, error.code) == (DEADLINE_EXCEEDED, "timeout")


def test_no_client_can_have_more_time_than_the_server_gives():
    async def main():
        a = FakeReplica("a")
        router = router_over(a, request_timeout=5.0)
        for number, timeout in enumerate([None, 600.0, 2.0, 0.0]):
            Asking(router, request(request_id=str(number)), stream=False, timeout=timeout)
            await settle()
        return a.timeouts

    assert run(main()) == pytest.approx([5.0, 5.0, 2.0, 0.0], abs=0.1)


def test_time_without_end_is_no_time_that_is_up():
    async def main():
        async with served([engine()], request_timeout=float("inf")) as s, Stub(s.grpc) as stub:
            return (await stub.generate(request())).responses[0].text

    assert run(main()) == "one né👍 two"


# Ending


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def main():
        async with served([slow_engine()]) as s, Stub(s.grpc) as stub:
            running = asyncio.ensure_future(stub.stream(request("long", max_tokens=50)))
            await until(lambda: vars(s.router)["_live"])
            draining = asyncio.ensure_future(s.router.drain())
            await settle()
            error = await refused(stub.generate(request()))
            assert not draining.done() and not s.router.is_ready
            await draining
            return error, text_of(await running)

    error, text = run(main())
    assert (error.code(), code_of(error)) == (UNAVAILABLE, "draining")
    assert text == "x" * 50


def test_closing_ends_what_runs_and_lets_the_replicas_be():
    each = slow_engine()

    async def main():
        async with served([each]) as s, Stub(s.grpc) as stub:
            told = asyncio.ensure_future(refused(stub.stream(request("long", **ENDLESS))))
            untold = asyncio.ensure_future(refused(stub.generate(request("long", **ENDLESS))))
            await until(lambda: each.stats().generated_tokens > 10)
            await s.router.close()
            errors = await asyncio.gather(told, untold)
            assert_nothing_left(s.router)
            async with Stub(s.servers[0].address) as direct:
                return errors, (await direct.generate(request())).responses[0].text

    errors, text = run(main())
    for error in errors:
        assert (error.code(), error.details()) == (UNAVAILABLE, "the server is shutting down")
    assert text == "one né👍 two"


def test_terminate_tells_whoever_runs_the_router():
    told = []

    async def main():
        async with served([engine()], on_terminate=told.append) as s, Stub(s.grpc) as stub:
            await stub.raw.Terminate(pb.TerminateRequest())
            await stub.raw.Terminate(pb.TerminateRequest(now=True))

    run(main())
    assert told == [False, True]


# Names


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_is_aborted_by_its_name_and_says_what_there_was(stream):
    engines = [slow_engine(), slow_engine()]

    async def main():
        async with served(engines) as s, Stub(s.grpc) as stub:
            call = stub.stream if stream else stub.generate
            running = asyncio.ensure_future(call(request("long", request_id="mine", **ENDLESS)))
            await until(lambda: max(e.stats().generated_tokens for e in engines) > 5)
            unknown = await stub.raw.Abort(pb.AbortRequest(request_id="other"))
            known = await stub.raw.Abort(pb.AbortRequest(request_id="mine"))
            told = await running
            ended = await stub.raw.Abort(pb.AbortRequest(request_id="mine"))
            assert_nothing_left(s.router)
            return told, (unknown.was_live, known.was_live, ended.was_live), s.router.metrics.text().decode()

    told, were_live, metrics = run(main())
    response = told[-1].response if stream else told.responses[0]
    assert were_live == (False, True, False)
    assert response.finish_reason == "abort"
    assert response.text == "x" * len(response.token_ids) and 5 <= len(response.token_ids) < 200
    if stream:
        assert text_of(told) == response.text
    assert 'fastgen:request_aborted_total{model_name="tiny"} 1.0' in metrics


def test_a_name_that_runs_is_refused_and_free_when_it_has_ended():
    async def main():
        async with served([slow_engine(), slow_engine()]) as s, Stub(s.grpc) as stub:
            running = asyncio.ensure_future(stub.generate(request("long", request_id="mine", **ENDLESS)))
            await until(lambda: vars(s.router)["_live"])
            error = await refused(stub.generate(request(request_id="mine")))
            first = await running
            second = await stub.generate(request(request_id="mine"))
            return error, first.responses[0].text, second.responses[0].text

    error, first, second = run(main())
    assert error.code() == INVALID
    assert error.details() == "request_id='mine' is running already; give every request a name of its own"
    assert (first, second) == (LONG, "one né👍 two")


# Nothing is left behind


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_takes_its_request_with_it(stream):
    engines = [slow_engine(), slow_engine()]

    async def main():
        async with served(engines) as s, Stub(s.grpc) as stub:
            call = stub.stream if stream else stub.generate
            task = asyncio.create_task(call(request("long", **ENDLESS)))
            await until(lambda: max(e.stats().generated_tokens for e in engines) > 5)
            task.cancel()
            await until(lambda: not vars(s.router)["_live"])
            assert_nothing_left(s.router)
            await until(lambda: all(e.stats().free_blocks == e.stats().blocks for e in engines))
            return s.router.metrics.text().decode()

    metrics = run(main())
    assert 'fastgen:request_aborted_total{model_name="tiny"} 1.0' in metrics
    assert min(each.stats().steps for each in engines) == 0, "it is not tried elsewhere"
    assert max(each.stats().generated_tokens for each in engines) < 200


def test_many_streams_at_once_and_clients_that_go_away():
    engines = [slowed(scripted_engine(ANSWERS, max_num_seqs=8), 0.0005) for _ in range(2)]

    async def main():
        async with served(engines, max_queue=100) as s, Stub(s.grpc) as stub:
            tasks = [asyncio.create_task(stub.stream(request("long", max_tokens=40 + i))) for i in range(50)]
            for number, task in enumerate(tasks[::5]):
                await asyncio.sleep(0.02 * (number % 3))
                task.cancel()
            told = await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not vars(s.router)["_live"])
            assert_nothing_left(s.router)
            for each in engines:
                await until(lambda each=each: each.stats().free_blocks == each.stats().blocks)
            return told

    for number, events in enumerate(run(main())):
        if number % 5:
            assert text_of(events) == "x" * (40 + number)
    for each in engines:
        assert_idle(each)


MAX_QUEUE = 3


class Routing(RuleBasedStateMachine):
    """Requests on three replicas that die, drain and come back, whose clients leave, wait and are too many."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.replicas = [FakeReplica(name) for name in "abc"]
        self.router = router_over(*self.replicas, max_queue=MAX_QUEUE)
        self.live: dict[str, Asking] = {}
        self.begun: set[str] = set()
        self.num_sent = 0

    def teardown(self):
        for name in list(self.live):
            self.leave_named(name)
        self.do(lambda: self.loop.create_task(asyncio.wait_for(self.router.drain(), 5)))
        assert_nothing_left(self.router)
        self.loop.close()

    def do(self, act):
        async def main():
            result = act()
            await settle()
            return await result if isinstance(result, asyncio.Task) else result

        return self.loop.run_until_complete(main())

    def replica_of(self, name: str) -> FakeReplica:
        (replica,) = [replica for replica in self.replicas if name in replica.calls]
        return replica

    def collect(self) -> None:
        """Check and forget what has ended."""
        for name, asking in list(self.live.items()):
            if asking.task.done():
                check_ended(asking)
                del self.live[name]
                self.begun.discard(name)

    @rule(stream=st.booleans())
    def send(self, stream):
        name = f"r{self.num_sent}"
        self.num_sent += 1
        is_full = len(self.live) - len(self.begun) >= MAX_QUEUE
        can_run = any(replica.state == "ready" and not replica.is_gone for replica in self.replicas)
        asking = self.do(lambda: Asking(self.router, request(request_id=name), stream=stream))
        if is_full or not can_run:
            assert asking.error.code == ("queue_full" if is_full else "no_replica")
        else:
            assert not asking.task.done()
            self.live[name] = asking

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def advance(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        if self.do(lambda: self.replica_of(name).advance(name)):
            self.begun.add(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["finish", "abort", "time out", "leave"]))
    def end(self, data, how):
        name = data.draw(st.sampled_from(sorted(self.live)))
        replica, asking = self.replica_of(name), self.live[name]
        if how == "leave":
            return self.leave_named(name)
        if how == "finish":
            self.do(lambda: replica.finish(name))
        elif how == "abort":
            assert self.do(lambda: self.loop.create_task(self.router.abort(name)))
        else:
            self.do(lambda: replica.fail(name, Refusal(DEADLINE_EXCEEDED, "Deadline Exceeded")))
            assert asking.error.code == "timeout"
        assert asking.task.done()
        self.collect()
        return None

    def leave_named(self, name):
        asking = self.live.pop(name)
        self.begun.discard(name)
        self.do(asking.task.cancel)
        assert asking.task.cancelled()

    @rule(index=st.integers(0, 2))
    def die(self, index):
        replica = self.replicas[index]
        there = list(replica.calls)
        others = [r for r in self.replicas if r is not replica and r.state == "ready" and not r.is_gone]
        can_move = {name for name in there if any(name not in other.tried for other in others)}
        self.do(replica.die)
        for name in there:
            asking = self.live[name]
            if asking.stream and asking.has_seen_answer:
                assert asking.error.code == "replica_lost"
            elif name in can_move:
                assert not asking.task.done()
            else:
                assert asking.error.code == "no_replica"
        self.collect()

    @rule(index=st.integers(0, 2))
    def vanish(self, index):
        """Die between two looks of the router: whatever runs breaks off, but the replica still counts as ready."""
        replica = self.replicas[index]
        state = replica.state
        self.do(replica.die)
        if not replica.is_gone:
            replica.stats.state = state
        replica.is_gone = True
        self.collect()

    @rule(index=st.integers(0, 2))
    def drain_one(self, index):
        self.replicas[index].stats.state = "draining"

    @rule(index=st.integers(0, 2))
    def come_back(self, index):
        self.replicas[index].is_gone = False
        self.replicas[index].stats.state = "ready"

    @invariant()
    def counters_are_right(self):
        assert set(vars(self.router)["_live"]) == set(self.live)
        assert waiting(self.router) == len(self.live) - len(self.begun)
        for replica in self.replicas:
            assert len(replica.load) == len(replica.calls)
            assert bool(replica.load.outstanding) == bool(replica.calls)
        assert sum(len(replica.calls) for replica in self.replicas) == len(self.live)


def check_ended(asking: Asking) -> None:
    """What a client may have heard by the end."""
    heard, error = kinds(asking.events), asking.error
    assert heard.count("accepted") <= 1 and "accepted" not in heard[1:]
    num_tokens = sum(len(event.delta.token_ids) for event in asking.events)
    if error is None:
        text = asking.events[-1].response.text
        assert heard[0] == "accepted" and heard.count("response") == 1
        assert text_of(asking.events) == (text if asking.stream else "")
        assert len({word[0] for word in text.split()}) <= 1, "the answer of one replica"
    elif error.code == "replica_lost":
        assert asking.stream and asking.has_seen_answer
        assert f"after {num_tokens} tokens" in error.message
    else:
        assert error.code in ("no_replica", "timeout")
        assert error.code == "timeout" or not (asking.stream and asking.has_seen_answer)


TestRouting = Routing.TestCase
TestRouting.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_log_has_the_request_and_never_the_prompt(caplog):
    async def main():
        async with served([engine()]) as s, Stub(s.grpc) as stub:
            await stub.generate(request(request_id="mine"))

    with caplog.at_level(logging.INFO, logger="fastgen_jax.serving"):
        run(main())
    (record,) = [record for record in caplog.records if record.name == "fastgen_jax.serving.requests"]
    said = vars(record)
    assert {name: said[name] for name in ("request_id", "model", "end", "finish_reasons")} == {
        "request_id": "mine",
        "model": "tiny",
        "end": "ok",
        "finish_reasons": ["stop"],
    }
    assert (said["prompt_tokens"], said["generated_tokens"]) == (5, len(ANSWERS["hello"]) + 1)
    assert said["seconds"] >= said["ttft"] >= 0
    assert not any("hello" in str(vars(other)) for other in caplog.records)


def test_the_log_has_the_prompt_if_that_is_asked_for(caplog):
    async def main():
        async with served([engine()], log_prompts=True) as s, Stub(s.grpc) as stub:
            await stub.generate(request(request_id="mine"))

    with caplog.at_level(logging.INFO, logger="fastgen_jax.serving"):
        run(main())
    (said,) = [vars(record) for record in caplog.records if record.message == "prompt"]
    assert (said["request_id"], said["prompt"]) == ("mine", "hello")


def test_a_request_is_tried_once_on_each_replica():
    async def main():
        replicas = [FakeReplica(name) for name in "abc"]
        router = router_over(*replicas)
        asking = Asking(router, request(request_id="1"), stream=False)
        await settle()
        for replica in replicas:
            replica.fail("1", LOST)
            await settle()
        assert_nothing_left(router)
        return [replica.tried for replica in replicas], asking.error.code

    assert run(main()) == ([["1"]] * 3, "no_replica")


@pytest.mark.parametrize("code", ["replica_lost", "engine_stopped", "draining", "starting"])
def test_a_replica_that_cannot_take_a_request_is_passed_by(code):
    async def main():
        a, b = FakeReplica("a"), FakeReplica("b")
        router = router_over(a, b)
        asking = Asking(router, request(request_id="1"), stream=True)
        await settle()
        a.fail("1", Refusal(UNAVAILABLE, "not now", code=code))
        await settle()
        b.finish("1")
        await asking.task
        return kinds(asking.events), asking.error

    assert run(main()) == (["accepted", "response"], None)


def test_what_is_wrong_with_a_request_is_not_tried_elsewhere():
    async def main():
        a, b = FakeReplica("a"), FakeReplica("b")
        router = router_over(a, b)
        asking = Asking(router, request(request_id="1"), stream=True)
        await settle()
        a.fail("1", Refusal(INVALID, "the prompt is too long"))
        await asking.task
        assert_nothing_left(router)
        return asking.error.message, b.tried

    assert run(main()) == ("the prompt is too long", [])
