"""`Client` and `AsyncClient`: MII's names, a pipeline's answers, and errors that say whose fault it is."""

import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from doubles import ENDLESS, Gate, slowed, wait_until
from scripted import TOKENIZER, assert_idle, scripted_engine, tokens
from serving import run
from threaded import serving
from tiny import tiny_engine

import fastgen_jax
from fastgen_jax import AsyncClient, Client
from fastgen_jax.pipelines import Pipeline
from fastgen_jax.serving import clients, deployments, launch
from fastgen_jax.serving.clients import ServerError

ANSWERS = {
    "hello": tokens("one ", "né", "👍", " two"),
    "two": tokens("second"),
    "long": tokens("x" * 200),
    "<|user|>hi<|assistant|>": tokens("hey"),
    "<|system|>be brief<|user|>hi<|assistant|>": tokens("h"),
}
CHAT = [{"role": "user", "content": "hi"}]


class Sync:
    """Asks as a program without coroutines does."""

    def __init__(self, where: str, **options):
        self._where, self._options = where, options

    def __getattr__(self, name):
        def ask(*args, **fields):
            with Client(self._where, **self._options) as client:
                return getattr(client, name)(*args, **fields)

        return ask

    def stream(self, *args, **fields) -> list[str]:
        with Client(self._where, **self._options) as client:
            return list(client.stream(*args, **fields))


class Async(Sync):
    """Asks as a coroutine does."""

    def __getattr__(self, name):
        def ask(*args, **fields):
            async def main():
                async with AsyncClient(self._where, **self._options) as client:
                    return await getattr(client, name)(*args, **fields)

            return run(main())

        return ask

    def stream(self, *args, **fields) -> list[str]:
        async def main():
            async with (
                AsyncClient(self._where, **self._options) as client,
                aclosing(client.stream(*args, **fields)) as pieces,
            ):
                return [piece async for piece in pieces]

        return run(main())


BOTH = pytest.mark.parametrize("kind", [Sync, Async], ids=["sync", "async"])


@pytest.fixture
def added(engine, monkeypatch) -> list:
    """The params of what is added to the engine."""
    found, add = [], engine.add

    def record(prompt, params, **options):
        found.append(params)
        return add(prompt, params, **options)

    monkeypatch.setattr(engine, "add", record)
    return found


@pytest.fixture(scope="module")
def engine():
    return scripted_engine(ANSWERS, default_params={"temperature": 0.7, "top_k": 9})


@pytest.fixture(scope="module")
def server(engine):
    with serving([engine]) as s:
        yield s
    assert_idle(engine)


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
def client(request, server):
    return request.param(server.grpc)


# Answers


def test_a_prompt_is_answered(client):
    (response,) = client.generate("hello")
    assert (response.text, response.finish_reason) == ("one né👍 two", "stop")
    assert response.prompt_token_ids == tuple(tokens("hello"))
    assert response.timings.first_token > 0


def test_a_client_is_called_as_a_pipeline_is(server):
    with fastgen_jax.client(server.grpc) as client:
        assert [r.text for r in client(["two", tokens("hello"), "two"])] == ["second", "one né👍 two", "second"]
        assert [r.text for r in client(tokens("two"))] == ["second"]
        assert client([]) == []


def test_samples_come_by_index(client):
    assert [(r.index, r.text) for r in client.generate("two", n=3)] == [(0, "second"), (1, "second"), (2, "second")]


def test_samples_of_several_prompts_come_in_order(server):
    with Client(server.grpc) as client:
        found = [(r.index, r.text) for r in client(["two", "hello"], n=2)]
    assert found == [(0, "second"), (1, "second"), (0, "one né👍 two"), (1, "one né👍 two")]


@pytest.mark.parametrize("stop", [None, "two"])
def test_a_stream_is_the_text(client, stop):
    pieces = client.stream("hello", **({} if stop is None else {"stop": stop}))
    assert "".join(pieces) == client.generate("hello", stop=stop)[0].text
    assert pieces and "" not in pieces


def test_an_echo_begins_both(client):
    assert "".join(client.stream("two", echo=True)) == client.generate("two", echo=True)[0].text == "twosecond"


def test_a_conversation_goes_through_the_template(server):
    with Client(server.grpc) as client:
        assert [r.text for r in client.chat(CHAT)] == ["hey"]
        assert "".join(client.stream(CHAT)) == "hey"
        assert [r.text for r in client.chat([{"role": "system", "content": "be brief"}, *CHAT])] == ["h"]


def test_tokens_and_text(client):
    assert client.tokenize("né") == tokens("n", "é".encode())
    assert client.tokenize(CHAT) == tokens(3, "hi", 4)
    assert client.detokenize(tokens("né")) == "né"


def test_stats_say_how_each_replica_is(client):
    (stats,) = client.stats()
    assert (stats.model, stats.state, stats.max_num_seqs) == ("tiny", "ready", 8)
    assert stats.default_params.top_k == 9


CASES = [
    {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0},
    {"max_length": 20, "do_sample": False},
    {"max_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5, "n": 2, "logprobs": 2},
    {"max_tokens": 12, "seed": 1, "temperature": 1.0, "stop": ["e"], "return_full_text": True},
    {"do_sample": True, "seed": 3, "min_new_tokens": 4, "max_new_tokens": 9},
]


@pytest.fixture(scope="module")
def real():
    """A pipeline, and a server over the same model."""
    ours, theirs = (tiny_engine(TOKENIZER, default_params={"temperature": 0.6}) for _ in range(2))
    with serving([theirs]) as s:
        yield Pipeline(ours), s


@BOTH
@pytest.mark.parametrize("fields", CASES)
def test_responses_are_a_pipelines_but_for_their_times(real, kind, fields):
    pipe, server = real
    for prompt in ("hello", tokens("other")):
        expected, got = pipe(prompt, **fields), kind(server.grpc).generate(prompt, **fields)
        for mine, theirs in zip(got, expected, strict=True):
            for name in ("text", "token_ids", "prompt_token_ids", "finish_reason", "index"):
                assert getattr(mine, name) == getattr(theirs, name), name
            if fields.get("logprobs") is None:
                assert mine.logprobs is theirs.logprobs is None
            else:
                assert [e.token_id for e in mine.logprobs] == [e.token_id for e in theirs.logprobs]
                close = pytest.approx([e.logprob for e in theirs.logprobs], abs=1e-4)
                assert [e.logprob for e in mine.logprobs] == close


# MII's names


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"max_length": 10}, {"max_tokens": 6}),
        ({"max_length": 10, "max_new_tokens": 3}, {"max_tokens": 3}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 0.7}),
        ({"do_sample": True, "temperature": 0.2}, {"temperature": 0.2}),
        ({"temperature": None, "seed": None}, {}),
        ({"stop": "yz", "ignore_eos": True}, {"stop": ("yz",), "ignore_eos": True}),
    ],
)
def test_fields_mean_what_they_mean_to_a_pipeline(engine, client, added, fields, expected):
    client.generate("long", **fields)
    assert added == [engine.default_params.replace(**expected)]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_beams": 4}, "there is no parameter 'num_beams': beam search is not supported"),
        ({"streaming_fn": print}, r"there is no parameter 'streaming_fn': use stream\(\)"),
        ({"temprature": 1}, "there is no parameter 'temprature'; there are allowed_token_ids, do_sample"),
        ({"max_new_tokens": 3, "max_tokens": 4}, "are one parameter"),
        ({"do_sample": False, "temperature": 0.5}, "contradicts do_sample=False"),
        ({"max_length": 4}, "leaves no room after a prompt of 4 tokens"),
        ({"temperature": -1}, "temperature=-1 is out of range"),
        ({"top_k": "5"}, "top_k='5' is str"),
    ],
)
def test_fields_that_make_no_sense_are_refused_here(client, fields, error):
    for ask in (client.generate, client.stream):
        with pytest.raises((ValueError, TypeError), match=error):
            ask("long", **fields)


@pytest.mark.parametrize("prompt", [None, 3, {"role": "user", "content": "hi"}, [[1, "a"]], CHAT, "\ud83d"])
def test_what_is_no_prompt_is_refused_here(server, prompt):
    with Client(server.grpc) as client, pytest.raises((TypeError, ValueError)):
        client(prompt)


def test_samples_are_not_streamed_as_one_text(client):
    with pytest.raises(ValueError, match="n=2 samples cannot be streamed as one text"):
        client.stream("two", n=2)
    assert "".join(client.stream("two", n=None)) == "second"


# Errors


def test_what_the_server_finds_wrong_is_a_value_error(client, server):
    with pytest.raises(ValueError, match="the prompt has the token id 5000"):
        client.generate([5000])
    with pytest.raises(ValueError, match="model='other' is not served here; the models are tiny"):
        type(client)(server.grpc, model="other").generate("hello")
    with pytest.raises(ValueError, match="model='other'"):
        type(client)(server.grpc, model="other").stream("hello")


@BOTH
def test_a_full_queue_is_an_error_of_the_server(kind):
    gate = Gate()
    with serving([scripted_engine(gate)], max_queue=1) as s, ThreadPoolExecutor(1) as pool:
        first = pool.submit(kind(s.grpc).generate, "hello", max_tokens=2)
        wait_until(lambda: vars(s.router)["_live"])
        for ask in (kind(s.grpc).generate, kind(s.grpc).stream):
            with pytest.raises(ServerError, match="1 requests wait for tiny already") as caught:
                ask("hello")
            assert caught.value.status == "RESOURCE_EXHAUSTED"
        gate.open()
        assert first.result()[0].text == "xx"


@BOTH
def test_time_that_is_up_is_an_error_and_the_request_has_ended(kind):
    engine = slowed(scripted_engine(ANSWERS), 0.01)
    with serving([engine]) as s:
        for ask in (kind(s.grpc).generate, kind(s.grpc).stream):
            with pytest.raises(ServerError) as caught:
                ask("long", timeout=0.2, **ENDLESS)
            assert caught.value.status == "DEADLINE_EXCEEDED"
    assert engine.stats().generated_tokens < 300
    assert_idle(engine)


@BOTH
def test_keys(kind):
    with serving([scripted_engine(ANSWERS)], app={"api_keys": ("key",)}) as s:
        assert kind(s.grpc, api_key="key").generate("two")[0].text == "second"
        assert "".join(kind(s.grpc, api_key="key").stream("two")) == "second"
        for wrong in ({}, {"api_key": "kex"}):
            for ask in (kind(s.grpc, **wrong).generate, kind(s.grpc, **wrong).stream):
                with pytest.raises(ServerError, match="the API key is missing or wrong") as caught:
                    ask("two")
                assert caught.value.status == "UNAUTHENTICATED"


@BOTH
def test_no_server_is_an_error_of_the_server(kind):
    client = kind("127.0.0.1:9")
    for ask in (lambda: client.generate("x"), lambda: client.stream("x"), client.stats, client.terminate_server):
        with pytest.raises(ServerError) as caught:
            ask()
        assert caught.value.status == "UNAVAILABLE"


# Many


def test_a_long_list_does_not_fill_the_queue(monkeypatch):
    monkeypatch.setattr(clients, "IN_FLIGHT", 4)
    with serving([slowed(scripted_engine(ANSWERS), 0.001)], max_queue=4) as s, Client(s.grpc) as client:
        prompts = ["two", "hello"] * 15
        assert [r.text for r in client(prompts)] == ["second", "one né👍 two"] * 15


def test_a_timeout_is_for_the_whole_list(monkeypatch):
    monkeypatch.setattr(clients, "IN_FLIGHT", 2)
    engine = slowed(scripted_engine(ANSWERS), 0.005)
    with serving([engine]) as s, Client(s.grpc) as client:
        start = time.monotonic()
        with pytest.raises(ServerError) as caught:
            client(["long"] * 40, timeout=0.5, max_tokens=20)  # each would have time enough
        assert caught.value.status == "DEADLINE_EXCEEDED"
        assert time.monotonic() - start < 3
    assert_idle(engine)


def test_one_that_fails_ends_the_others():
    engine = slowed(scripted_engine(ANSWERS), 0.005)
    with (
        serving([engine]) as s,
        Client(s.grpc) as client,
        pytest.raises(ValueError, match="the prompt has the token id 5000"),
    ):
        client([[5000], "long", "long"], **ENDLESS)
    assert engine.stats().generated_tokens < 300
    assert_idle(engine)


def test_threads_share_a_client(server):
    with Client(server.grpc) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: client(["two", "hello"][i % 2])[0].text, range(32)))
    assert texts == ["second", "one né👍 two"] * 16


def test_leaving_a_stream_early_aborts_it():
    engine = slowed(scripted_engine(ANSWERS), 0.005)

    async def leave(where):
        async with AsyncClient(where) as client, aclosing(client.stream("long", **ENDLESS)) as pieces:
            async for _ in pieces:
                break

    with serving([engine]) as s:
        with Client(s.grpc) as client:
            for _ in client.stream("long", **ENDLESS):
                break
        run(leave(s.grpc))
        wait_until(lambda: not vars(s.router)["_live"])
    assert engine.stats().generated_tokens < 200
    assert_idle(engine)


# Where


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_server_is_found_by_its_name(cache, server):
    with deployments.recorded("mine", "", server.grpc), fastgen_jax.client("mine") as client:
        assert client.address == server.grpc
        assert client("two")[0].text == "second"


@BOTH
def test_a_name_that_nobody_has_is_refused_with_those_that_are_there(cache, kind):
    with deployments.recorded("mine", "", "h:1"), deployments.recorded("other", "", "h:2"):
        for where in ("yours", "/no/model", ":50050"):
            with pytest.raises(ValueError, match=r"there is no deployment .* that run here: mine, other$"):
                kind(where).generate("x")
    with pytest.raises(ValueError, match=r"that run here: none$"):
        kind("mine").generate("x")


@BOTH
@pytest.mark.parametrize("now", [False, True])
def test_terminate_server(kind, now):
    told = []
    with serving([scripted_engine(ANSWERS)], on_terminate=told.append) as s:
        kind(s.grpc).terminate_server(now=now)
    assert told == [now]


def test_serve_waits_for_its_own_server_and_not_for_another_that_took_the_name_meanwhile(cache, monkeypatch):
    with serving([scripted_engine(ANSWERS)]) as s, contextlib.ExitStack() as stack:

        def start(settings, log):
            stack.enter_context(deployments.recorded(settings.deployment, "", s.grpc))
            return stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

        monkeypatch.setattr(launch, "_start", start)
        with pytest.raises(TimeoutError, match=r"the server was not ready after 0\.5 s"):
            launch.serve("tiny", name="mine", timeout=0.5)


@BOTH
def test_a_client_may_wait_without_end(kind):
    with serving([scripted_engine(ANSWERS)]) as s:
        assert kind(s.grpc).generate("hello", timeout=float("inf"))[0].text == "one né👍 two"
        assert "".join(kind(s.grpc).stream("hello", timeout=float("inf"))) == "one né👍 two"
