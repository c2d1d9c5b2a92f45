"""Whatever is sent, by HTTP or gRPC: an answer or a refusal, never a fault of ours, and others are not touched.

FASTGEN_FUZZ_CASES=5000 runs so many cases instead of the 500 that a build has time for.
"""

import contextlib
import json
import os
import string
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scripted import NUM_TOKENS, assert_idle
from serving import TIMEOUT, Served
from threaded import serving
from wide import wide_engine

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.app import make_app
from fastgen_jax.serving.fastgen_pb2_grpc import FastGenStub
from fastgen_jax.serving.router import Router

pytestmark = pytest.mark.slow

NUM_CASES = int(os.environ.get("FASTGEN_FUZZ_CASES", "500"))
MAX_SAMPLES = 4
"""Of a request that is let in: more of them take time and show nothing new."""

POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
GETS = ["/v1/models", "/v1/models/{name}", "/health"]
SCHEMA = schemathesis.openapi.from_dict(make_app(Router([])).openapi())


def cases(share: float) -> settings:
    """A share of the cases; all shares together are about 1."""
    return settings(
        max_examples=max(int(NUM_CASES * share), 1),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Short contexts, so that the longest answer is soon over."""
    engine = wide_engine(max_model_len=48)
    with serving([engine]) as found:
        yield found
    assert_idle(engine)


@pytest.fixture(scope="module")
def stub(server) -> Iterator[FastGenStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield FastGenStub(channel)


@contextlib.contextmanager
def watched(stub: FastGenStub) -> Iterator[None]:
    """One request asked again and again beside the block always has the same tokens."""
    params = pb.SamplingParams(max_tokens=16, temperature=1, seed=7, ignore_eos=True)
    request = pb.GenerateRequest(prompt=pb.Prompt(text="who watches"), params=params)

    def ask() -> tuple[int, ...]:
        return tuple(stub.Generate(request, timeout=TIMEOUT).responses[0].token_ids)

    expected, found, errors, over = ask(), [], [], threading.Event()

    def watch() -> None:
        try:
            while not over.wait(0.05):
                found.append(ask())
        except grpc.RpcError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(TIMEOUT)
    assert not errors and not thread.is_alive()
    assert {expected, ask(), *found} == {expected}
    assert len(expected) == 16


# HTTP


@pytest.fixture
def beside(stub) -> Iterator[None]:
    with watched(stub):
        yield


@SCHEMA.include(path=POSTS + GETS).parametrize()
@cases(0.04)
def test_http(case, server, beside):
    """What the API's own description calls a request, and much that it does not."""
    if isinstance(case.body, dict) and isinstance(count := case.body.get("n"), int) and 1 <= count <= 1024:
        case.body["n"] = 1 + count % MAX_SAMPLES
    reply = case.call(base_url=server.url, timeout=TIMEOUT)
    assert reply.status_code < 500, reply.text
    assert "x-request-id" in reply.headers
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"]


# What requests have

TEXT = st.one_of(st.text(string.printable, max_size=40), st.text(max_size=20))
UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
COUNT, NUMBER, ANY_NUMBER = st.integers(0, 8), st.floats(0, 1, exclude_min=True), st.floats()
TOKEN_ID = st.integers(0, NUM_TOKENS - 1)

FIELDS = {
    "max_tokens": (COUNT, UINT64),
    "min_tokens": (COUNT, UINT64),
    "temperature": (NUMBER, ANY_NUMBER),
    "top_p": (NUMBER, ANY_NUMBER),
    "top_k": (COUNT, UINT32),
    "min_p": (NUMBER, ANY_NUMBER),
    "repetition_penalty": (NUMBER, ANY_NUMBER),
    "presence_penalty": (NUMBER, ANY_NUMBER),
    "frequency_penalty": (NUMBER, ANY_NUMBER),
    "logit_bias": (st.dictionaries(TOKEN_ID, NUMBER, max_size=3), st.dictionaries(UINT32, ANY_NUMBER, max_size=3)),
    "allowed_token_ids": (st.lists(TOKEN_ID, max_size=4), st.lists(UINT32, max_size=4)),
    "stop": (st.lists(st.text(min_size=1, max_size=3), max_size=3), st.lists(TEXT, max_size=3)),
    "stop_token_ids": (st.lists(TOKEN_ID, max_size=3), st.lists(UINT32, max_size=3)),
    "ignore_eos": (st.booleans(), st.booleans()),
    "include_stop_str_in_output": (st.booleans(), st.booleans()),
    "skip_special_tokens": (st.booleans(), st.booleans()),
    "seed": (UINT32, UINT64),
    "n": (st.integers(1, MAX_SAMPLES), st.one_of(st.just(0), st.integers(1025, 2**32 - 1))),
    "logprobs": (COUNT, UINT32),
    "prompt_logprobs": (COUNT, UINT32),
    "echo": (st.booleans(), st.booleans()),
    "return_full_text": (st.booleans(), st.booleans()),
}
"""What a field usually is, and what it may be."""


@st.composite
def some_fields(draw: Any) -> dict[str, Any]:
    names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=8))
    return {name: draw(FIELDS[name][draw(st.integers(0, 7)) == 0]) for name in sorted(names)}


# HTTP requests that are almost right

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=8,
)
IDS = st.lists(TOKEN_ID, min_size=1, max_size=20)
PROMPTS = st.one_of(TEXT, IDS, st.lists(TEXT, max_size=3), st.lists(IDS, max_size=3))
CONTENT = st.one_of(TEXT, st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT), max_size=2))
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT}), max_size=3)


@st.composite
def bodies(draw: Any, path: str) -> dict[str, Any]:
    """Fields as they usually are, and in one of four a field that is anything."""
    is_chat = path.endswith("/chat/completions")
    body = draw(some_fields())
    for name in ("prompt_logprobs", "return_full_text", *(["echo", "logprobs"] if is_chat else [])):
        body.pop(name, None)
    if "logit_bias" in body:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in body["logit_bias"].items()}
    body |= {"messages": draw(MESSAGES)} if is_chat else {"prompt": draw(PROMPTS)}
    body |= {"stream": True} if draw(st.booleans()) else {}
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from([*sorted(body), "stream_options", "tools"]))] = draw(JSON)
    if isinstance(count := body.get("n"), int):
        body["n"] = min(count, MAX_SAMPLES) if count <= 1024 else count
    return body


@pytest.mark.parametrize("path", POSTS[:2])
def test_http_that_is_almost_right(path, server, beside):
    statuses = Counter[int]()
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT) as http:

        @cases(0.12)
        @given(body=bodies(path))
        def send(body):
            reply = http.post(path, content=json.dumps(body))
            statuses[reply.status_code] += 1
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 400:
                assert reply.json()["error"]["message"]
            elif body.get("stream"):
                assert reply.text.endswith("data: [DONE]\n\n")

        send()
    assert min(statuses[200], statuses[400]) > 0.1 * statuses.total(), statuses


# gRPC


def usually(usual: st.SearchStrategy[Any], rare: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """`usual` in seven cases of eight, so that several fields together are mostly right; `rare` in the eighth."""
    return st.integers(0, 7).flatmap(lambda number: rare if number == 7 else usual)


MESSAGE = st.builds(pb.Message, role=st.one_of(st.sampled_from(["user", "assistant"]), TEXT), content=TEXT)
PROMPT = usually(
    st.one_of(
        st.builds(pb.Prompt, text=TEXT),
        st.builds(pb.Prompt, token_ids=st.builds(pb.TokenIds, ids=st.lists(TOKEN_ID, max_size=60))),
        st.builds(pb.Prompt, conversation=st.builds(pb.Conversation, messages=st.lists(MESSAGE, max_size=3))),
    ),
    st.one_of(
        st.builds(pb.Prompt, token_ids=st.builds(pb.TokenIds, ids=st.lists(UINT32, max_size=3))), st.just(pb.Prompt())
    ),
)
MODEL = usually(st.sampled_from(["", "tiny"]), TEXT)
GENERATE = st.builds(
    pb.GenerateRequest,
    request_id=st.one_of(st.just(""), TEXT),
    model=MODEL,
    prompt=PROMPT,
    params=some_fields().map(lambda fields: pb.SamplingParams(**fields)),
    priority=st.integers(-(2**31), 2**31 - 1),
    replica_class=usually(st.just(""), TEXT),
)
REQUESTS = {
    "Generate": GENERATE,
    "GenerateStream": GENERATE,
    "Tokenize": st.builds(pb.TokenizeRequest, model=MODEL, prompt=PROMPT),
    "Detokenize": st.builds(
        pb.DetokenizeRequest, model=MODEL, token_ids=st.lists(st.one_of(TOKEN_ID, UINT32), max_size=5)
    ),
    "Abort": st.builds(pb.AbortRequest, request_id=TEXT),
    "Stats": st.builds(pb.StatsRequest, after_step=UINT64),
}
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


def answer(method: Any, request: Any) -> list[Any] | grpc.StatusCode:
    """Every message of an answer, or the status of a refusal."""
    try:
        reply = method(request, timeout=TIMEOUT)
        return list(reply) if isinstance(reply, grpc.Call) and hasattr(reply, "__iter__") else [reply]
    except grpc.RpcError as error:
        assert error.code() in REFUSALS, f"{error.code()}: {error.details()}"
        assert error.details()
        return error.code()


@pytest.mark.parametrize("name", REQUESTS)
def test_grpc(name, server, stub, beside):
    method, counts = getattr(stub, name), {"answers": 0, "refusals": 0}

    @cases(0.2 if name.startswith("Generate") else 0.03)
    @given(request=REQUESTS[name])
    def send(request):
        found = answer(method, request)
        counts["answers" if isinstance(found, list) else "refusals"] += 1

    send()
    assert counts["answers"] > 0
    assert counts["refusals"] > 0 or not name.startswith("Generate")
