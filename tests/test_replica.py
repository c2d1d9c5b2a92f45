"""A replica over gRPC: an engine's answers as they come, its state, its steps, and what it refuses."""

import asyncio
import dataclasses

import grpc
import pytest
from doubles import ENDLESS, Asking, Gate, Stub, kinds, refused, request, slowed, text_of, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted import NUM_TOKENS, TOKENIZER, assert_idle, scripted_engine, tokens
from serving import replica_server, run
from tiny import MAX_LEN, tiny_engine

from fastgen_jax import SamplingParams
from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import wire
from fastgen_jax.serving.replica import Replica, StepLog
from fastgen_jax.serving.service import SERVICE, Server

LONG = "x" * 200
ANSWERS = {
    "hello": tokens("one ", "né", "👍", " two"),
    "long": tokens(LONG),
    "<|user|>hi<|assistant|>": tokens("hey"),
}
StatusCode = grpc.StatusCode


def engine(**config):
    return scripted_engine(ANSWERS, **config)


# Answers


def test_a_stream_is_accepted_then_told_and_ends_with_the_response():
    async def main():
        async with replica_server(engine()) as (_, server), Stub(server.address) as stub:
            return await stub.stream(request(request_id="mine", echo=True))

    events = run(main())
    assert kinds(events) == ["accepted", *["delta"] * (len(events) - 2), "response"]
    accepted, response = events[0].accepted, wire.from_response(events[-1].response)
    assert (accepted.request_id, accepted.num_prompt_tokens, accepted.echo) == ("mine", 5, "hello")
    assert accepted.echo + text_of(events) == response.text == "helloone né👍 two"
    assert response.prompt_token_ids == tuple(tokens("hello"))
    assert tuple(i for event in events for i in event.delta.token_ids) == response.token_ids
    assert (response.finish_reason, response.index) == ("stop", 0)
    timings = response.timings
    assert 0 <= timings.queue <= timings.tokens[0] <= timings.tokens[-1] <= timings.total
    assert len(timings.tokens) == len(response.token_ids)


def test_every_sample_comes_streamed_or_whole():
    def script(seq, index):
        return tokens("x")[0] if index < 5 - seq.seq_id % 3 else 2

    async def main():
        async with replica_server(scripted_engine(script)) as (_, server), Stub(server.address) as stub:
            return await stub.generate(request(n=3)), await stub.stream(request(n=3))

    reply, events = run(main())
    expected = [(0, "xxxxx"), (1, "xxxx"), (2, "xxx")]
    assert [(r.index, r.text) for r in reply.responses] == expected
    for index, text in expected:
        assert "".join(e.delta.text for e in events if e.HasField("delta") and e.delta.index == index) == text
    assert kinds(events).count("response") == 3


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("hello", "one né👍 two"), (tokens("hello"), "one né👍 two"), ([{"role": "user", "content": "hi"}], "hey")],
)
def test_a_prompt_is_text_token_ids_or_a_conversation(prompt, text):
    async def main():
        async with replica_server(engine()) as (_, server), Stub(server.address) as stub:
            count = await stub.raw.Tokenize(pb.TokenizeRequest(prompt=wire.to_prompt(prompt)))
            return await stub.generate(request(prompt)), count

    reply, count = run(main())
    assert reply.responses[0].text == text
    assert reply.responses[0].prompt_token_ids == count.token_ids
    assert count.max_model_len == MAX_LEN


def test_samples_and_log_probabilities_are_the_engines_own_for_the_same_seed():
    each = tiny_engine(TOKENIZER)
    params = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "n": 2, "logprobs": 3, "prompt_logprobs": 1}
    expected = each.generate("hello", SamplingParams(**params))

    async def main():
        async with replica_server(each) as (_, server), Stub(server.address) as stub:
            return await stub.generate(request(**params)), await stub.stream(request(**params))

    reply, events = run(main())
    for response, ours in zip(reply.responses, expected, strict=True):
        got = wire.from_response(response)
        for name in ("text", "token_ids", "finish_reason", "index"):
            assert getattr(got, name) == getattr(ours, name)
        assert [entry.token_id for entry in got.logprobs] == list(ours.token_ids)
        assert [entry.logprob for entry in got.logprobs] == pytest.approx([e.logprob for e in ours.logprobs], abs=1e-5)
        assert len(got.prompt_logprobs) == len(ours.prompt_logprobs)
        mine = [event.delta for event in events if event.HasField("delta") and event.delta.index == got.index]
        told = [entry for delta in mine for entry in delta.logprobs]
        assert [entry.token_id for entry in told] == list(ours.token_ids)
        assert all(entry.token == each.reader.token_bytes(entry.token_id) for entry in told)
        assert all(len(entry.top) == 3 for entry in told)


def test_what_a_request_does_not_say_is_the_models_default():
    async def main():
        each = engine(default_params={"max_tokens": 3, "stop": "e"})
        async with replica_server(each) as (replica, server), Stub(server.address) as stub:
            plain, longer = await stub.generate(request()), await stub.generate(request(max_tokens=20, stop="two"))
            return plain, longer, wire.from_params(replica.stats(0)[0].default_params)

    plain, longer, defaults = run(main())
    assert plain.responses[0].text == "on"
    assert longer.responses[0].text == "one né👍 "
    assert (defaults["max_tokens"], defaults["stop"]) == (3, ("e",))


# What is refused


@pytest.mark.parametrize(
    ("asked", "status", "error"),
    [
        (request("x" * 300), StatusCode.INVALID_ARGUMENT, "the prompt"),
        (request(""), StatusCode.INVALID_ARGUMENT, "prompt"),
        (request([NUM_TOKENS]), StatusCode.INVALID_ARGUMENT, f"the prompt has the token id {NUM_TOKENS}"),
        (request(stop_token_ids=[NUM_TOKENS]), StatusCode.INVALID_ARGUMENT, "stop_token_ids has the token id"),
        (request(model="other"), StatusCode.NOT_FOUND, "model='other' is not served here; the model is tiny"),
        (pb.GenerateRequest(), StatusCode.INVALID_ARGUMENT, "the request has no prompt"),
        (
            pb.GenerateRequest(prompt=pb.Prompt(text="x"), params=pb.SamplingParams(temperature=float("nan"))),
            StatusCode.INVALID_ARGUMENT,
            "temperature=nan is out of range",
        ),
        (
            pb.GenerateRequest(prompt=pb.Prompt(text="x"), params=pb.SamplingParams(min_tokens=2**64 - 1)),
            StatusCode.INVALID_ARGUMENT,
            "min_tokens=18446744073709551615 is more than max_tokens=128",
        ),
        (
            pb.GenerateRequest(prompt=pb.Prompt(conversation=pb.Conversation(messages=[pb.Message(role="x")]))),
            StatusCode.INVALID_ARGUMENT,
            "no chat template",
        ),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(asked, status, error):
    tokenizer = TOKENIZER
    if asked.prompt.HasField("conversation"):
        tokenizer = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="</s>")
    each = scripted_engine(ANSWERS, tokenizer)

    async def main():
        async with replica_server(each) as (_, server), Stub(server.address) as stub:
            whole, streamed = await refused(stub.generate(asked)), await refused(stub.stream(asked))
            return whole, streamed

    for refusal in run(main()):
        assert refusal.code() == status
        assert error in refusal.details()
    assert_idle(each)


def test_a_name_that_runs_already_is_refused():
    gate = Gate()

    async def main():
        async with replica_server(scripted_engine(gate)) as (replica, server), Stub(server.address) as stub:
            first = asyncio.ensure_future(stub.generate(request(request_id="mine", max_tokens=2)))
            await until(lambda: vars(replica)["_live"])
            error = await refused(stub.generate(request(request_id="mine")))
            gate.open()
            return error, (await first).responses[0].text

    error, text = run(main())
    assert error.code() == StatusCode.INVALID_ARGUMENT
    assert error.details() == "request_id='mine' is running already; give every request a name of its own"
    assert text == "xx"


def test_a_replica_that_has_no_engine_yet_is_starting():
    async def main():
        replica = Replica("tiny", replica_class="batch")
        server = Server(replica, "127.0.0.1", 0)
        await server.start()
        async with Stub(server.address) as stub:
            errors = [
                await refused(stub.generate(request())),
                await refused(stub.raw.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="x")))),
                await refused(stub.raw.Detokenize(pb.DetokenizeRequest(token_ids=[1]))),
            ]
            (stats,) = (await stub.raw.Stats(pb.StatsRequest())).replicas
            was_live = (await stub.raw.Abort(pb.AbortRequest(request_id="x"))).was_live
        await replica.close()
        await server.stop()
        return errors, stats, was_live

    errors, stats, was_live = run(main())
    for error in errors:
        assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, "this replica is starting")
        assert dict(error.trailing_metadata())["fastgen-code"] == "starting"
    assert (stats.model, stats.replica_class, stats.state, stats.steps) == ("tiny", "batch", "starting", 0)
    assert not was_live


# Ends


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_a_request_that_is_given_up_frees_its_blocks(how):
    each = slowed(engine())

    async def main():
        async with replica_server(each) as (_, server), Stub(server.address) as stub:
            task = asyncio.create_task(stub.stream(request("long", request_id="mine", **ENDLESS)))
            await until(lambda: each.stats().generated_tokens > 5)
            if how == "abort":
                assert (await stub.raw.Abort(pb.AbortRequest(request_id="mine"))).was_live
                told = await task
                assert told[-1].response.finish_reason == "abort"
                assert text_of(told) == told[-1].response.text
            else:
                task.cancel()
            await until(lambda: each.stats().free_blocks == each.stats().blocks)
            assert (await stub.generate(request())).responses[0].text == "one né👍 two"

    run(main())
    assert each.stats().generated_tokens < 200
    assert_idle(each)


def test_cancelled_at_any_point_a_call_leaves_nothing():
    each = engine()

    async def main():
        async with replica_server(each) as (replica, server), Stub(server.address) as stub:
            for number in range(40):
                task = asyncio.create_task(stub.stream(request("long", **ENDLESS)))
                await asyncio.sleep(number / 4000)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not vars(replica)["_live"])
            await until(lambda: each.stats().free_blocks == each.stats().blocks)
            assert (await stub.generate(request())).responses[0].text == "one né👍 two"

    run(main())
    assert_idle(each)


@pytest.mark.parametrize("where", ["dispatch", "fetch"])
def test_an_engine_that_breaks_ends_every_request_and_says_so_once(where):
    each = slowed(engine())
    failures = []

    async def main():
        options = {"on_failure": lambda: failures.append(1)}
        async with replica_server(each, **options) as (replica, server), Stub(server.address) as stub:
            calls = [asyncio.ensure_future(refused(stub.stream(request("long", **ENDLESS)))) for _ in range(3)]
            await until(lambda: each.stats().generated_tokens > 5)
            vars(each)["_runner"].broken[where] = OSError("the device is gone")
            errors = await asyncio.gather(*calls)
            await until(lambda: failures)
            errors.append(await refused(stub.generate(request())))
            return errors, replica.stats(0)[0].state

    (*errors, last), state = run(main())
    for error in errors:
        assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, "the engine stopped: the device is gone")
        assert dict(error.trailing_metadata())["fastgen-code"] == "engine_stopped"
    assert last.code() == StatusCode.UNAVAILABLE
    assert state == "draining"
    assert failures == [1]


def test_a_broken_engine_is_noticed_though_its_only_client_has_gone():
    gate, failures = Gate(), []
    each = scripted_engine(gate)

    async def main():
        options = {"on_failure": lambda: failures.append(1)}
        async with replica_server(each, **options) as (_, server), Stub(server.address) as stub:
            task = asyncio.create_task(stub.generate(request(**ENDLESS)))
            await until(lambda: each.stats().running)
            vars(each)["_runner"].broken["fetch"] = OSError("the device is gone")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            gate.open()
            await until(lambda: failures or each.stats().running == 0)
            if not failures:  # the request was aborted before the step that would have failed
                await refused(stub.generate(request(**ENDLESS)))
                await until(lambda: failures)

    run(main())
    assert failures == [1]


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def main():
        async with replica_server(slowed(engine())) as (replica, server), Stub(server.address) as stub:
            running = asyncio.ensure_future(stub.generate(request("long", max_tokens=50)))
            await until(lambda: vars(replica)["_live"])
            draining = asyncio.ensure_future(replica.drain())
            await asyncio.sleep(0.01)
            error = await refused(stub.generate(request()))
            assert not draining.done()
            await draining
            return error, (await running).responses[0].text

    error, text = run(main())
    assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, "this replica is draining")
    assert text == "x" * 50


def test_closing_ends_what_runs_with_an_error_that_says_to_try_elsewhere():
    async def main():
        replica = Replica("tiny")
        replica.serve(slowed(engine()))
        asking = Asking(replica, request("long", **ENDLESS), stream=True)
        await until(lambda: asking.has_seen_answer)
        await replica.close()
        await asking.task
        return asking.error

    error = run(main())
    assert (error.status, error.code) == (StatusCode.UNAVAILABLE, "engine_stopped")


def test_terminate_tells_whoever_runs_the_replica():
    told = []

    async def main():
        async with replica_server(engine(), on_terminate=told.append) as (_, server), Stub(server.address) as stub:
            await stub.raw.Terminate(pb.TerminateRequest())
            await stub.raw.Terminate(pb.TerminateRequest(now=True))

    run(main())
    assert told == [False, True]


# State


def test_stats_are_the_engines_and_its_last_steps():
    each = scripted_engine(tokens("abcdef"))

    async def main():
        async with replica_server(each) as (replica, server), Stub(server.address) as stub:
            await stub.generate(request([7] * 40, max_tokens=3))
            await until(lambda: not each.has_work and replica.stats(0)[0].recent_steps[-1].number == each.stats().steps)
            (stats,) = (await stub.raw.Stats(pb.StatsRequest())).replicas
            (later,) = (await stub.raw.Stats(pb.StatsRequest(after_step=stats.steps - 1))).replicas
            (last,) = (await stub.raw.Stats(pb.StatsRequest(after_step=stats.steps))).replicas
            return stats, later, last

    stats, later, last = run(main())
    assert (stats.state, stats.model, stats.address) == ("ready", "tiny", "")
    for name, value in dataclasses.asdict(each.stats()).items():
        assert getattr(stats, name) == value, name
    assert (stats.max_num_batched_tokens, stats.max_num_seqs, stats.max_model_len) == (16, 8, MAX_LEN)
    steps = stats.recent_steps
    assert [step.number for step in steps] == list(range(1, stats.steps + 1))
    assert [(step.prompt_tokens, step.decode_tokens) for step in steps][:5] == [
        (16, 0),
        (16, 0),
        (8, 0),
        (0, 1),
        (0, 1),
    ]
    assert sum(step.prompt_tokens + step.decode_tokens for step in steps) == stats.tokens
    assert [step.number for step in later.recent_steps] == [stats.steps]
    assert len(last.recent_steps) == 0
    assert sum(bucket.steps for bucket in stats.bucket_times) == stats.steps
    assert sum(bucket.seconds for bucket in stats.bucket_times) == pytest.approx(sum(step.seconds for step in steps))


def test_padding_is_counted_with_its_bucket():
    each = tiny_engine(TOKENIZER, overlap=False)
    log = StepLog(each)
    each.add([7] * 5, SamplingParams(max_tokens=1))
    each.step()
    log.note(0.5)
    stats = pb.ReplicaStats()
    log.fill(stats, 0)
    (step,), (bucket,) = stats.recent_steps, stats.bucket_times
    assert (step.prompt_tokens, step.decode_tokens, step.seconds) == (5, 0, 0.5)
    assert step.prompt_tokens + step.padding == bucket.tokens >= 5
    assert (bucket.steps, bucket.seconds) == (1, 0.5)


def test_a_log_keeps_the_last_steps_only_but_the_time_of_all(monkeypatch):
    monkeypatch.setattr("fastgen_jax.serving.replica.KEPT_STEPS", 4)
    each = engine(overlap=False)
    log = StepLog(each)
    each.add("long", SamplingParams(max_tokens=10))
    while each.has_work:
        each.step()
        log.note(1.0)
    stats = pb.ReplicaStats()
    log.fill(stats, 0)
    assert [step.number for step in stats.recent_steps] == [7, 8, 9, 10]
    assert sum(bucket.seconds for bucket in stats.bucket_times) == 10


# The port


def test_health_checks_are_told_when_it_is_ready():
    async def main():
        server = Server(Replica("tiny"), "127.0.0.1", 0)
        await server.start()
        async with Stub(server.address) as stub:
            check = health_pb2_grpc.HealthStub(stub.channel).Check
            states = []
            for is_ready in (False, True, False):
                await server.set_ready(is_ready)
                for name in ("", SERVICE):
                    states.append((await check(health_pb2.HealthCheckRequest(service=name))).status)
        await server.stop()
        return states

    up, down = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert run(main()) == [down, down, up, up, down, down]


def test_a_key_opens_everything_and_health_needs_none():
    async def main():
        async with replica_server(engine(), api_keys=("first", "second")) as (_, server):
            opened, closed = [], []
            for key in ("first", "second", "third", "", None):
                async with Stub(server.address, key) as stub:
                    metadata = stub.metadata
                    calls = [
                        stub.generate(request()),
                        stub.stream(request()),
                        stub.raw.Stats(pb.StatsRequest(), metadata=metadata),
                        stub.raw.Abort(pb.AbortRequest(request_id="x"), metadata=metadata),
                        stub.raw.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="x")), metadata=metadata),
                        stub.raw.Terminate(pb.TerminateRequest(), metadata=metadata),
                    ]
                    for call in calls:
                        try:
                            opened.append((key, bool(await call)))
                        except grpc.aio.AioRpcError as error:
                            closed.append((key, error.code(), error.details()))
                    await health_pb2_grpc.HealthStub(stub.channel).Check(health_pb2.HealthCheckRequest())
            return opened, closed

    opened, closed = run(main())
    assert [key for key, _ in opened] == ["first"] * 6 + ["second"] * 6
    assert [key for key, *_ in closed] == ["third"] * 6 + [""] * 6 + [None] * 6
    assert {status for _, status, _ in closed} == {StatusCode.UNAUTHENTICATED}
    assert {details for *_, details in closed} == {"the API key is missing or wrong"}


def test_a_port_that_is_taken_is_an_error_that_names_it():
    async def main():
        async with replica_server(engine()) as (_, server):
            with pytest.raises(OSError, match=f"127.0.0.1:{server.port} cannot be listened on"):
                Server(Replica("tiny"), "127.0.0.1", server.port)

    run(main())
