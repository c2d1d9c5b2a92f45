"""What the HTTP front refuses, and in which words: one case a line, each with its status and its sentence."""

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2
import pytest
from scripted import NUM_TOKENS, assert_idle, scripted_engine, tokens
from serving import TIMEOUT
from threaded import serving

MAX_BYTES = 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


class Case(NamedTuple):
    """A body that is refused. more: beside a prompt or messages; param: error.param; sentence: error.message."""

    more: dict[str, Any]
    param: str | None
    sentence: str
    status: int = 400
    path: str = COMPLETIONS


NO_MODEL = "model='huge' is not served here; the models are tiny"
UNKNOWN = {"nonsense": 1}
PROMPTS = "prompt: give a text, a list of texts, a list of token ids or a list of such lists"
CONTENT = 'images, audio and files are not supported; give a text or a list of {"type": "text", "text": ...}'
SURROGATE = r"the text '\ud800' has half a surrogate pair, which is no character"

CASES = [
    # The model
    Case({"model": "huge"}, "model", NO_MODEL, 404),
    Case({"model": "huge"}, "model", NO_MODEL, 404, CHAT),
    Case({"model": "huge"}, "model", NO_MODEL, 404, "/tokenize"),
    Case({"model": 5}, "model", "model: Input should be a valid string, not 5"),
    Case({"model": "\ud800"}, "model", f"model: {SURROGATE}"),
    Case({"replica_class": "fast"}, "replica_class", "replica_class='fast' is not served; the classes are interactive"),
    # The prompt
    Case({"prompt": ""}, "prompt", "the prompt is empty; it needs at least one token"),
    Case({"prompt": []}, "prompt", "prompt=[] has no prompt"),
    Case({"prompt": [[]]}, "prompt", "a prompt is a string, a list of token ids or a list of messages, not []"),
    Case({"prompt": ["a", ""]}, "prompt", "the prompt is empty; it needs at least one token"),
    Case({"prompt": None}, "prompt", f"{PROMPTS}, not None"),
    Case({"prompt": 5}, "prompt", f"{PROMPTS}, not 5"),
    Case({"prompt": ["a", 1]}, "prompt", f"{PROMPTS}, not ['a', 1]"),
    Case({"prompt": [1.5]}, "prompt", f"{PROMPTS}, not [1.5]"),
    Case({"prompt": [True]}, "prompt", f"{PROMPTS}, not [True]"),
    Case({"prompt": {"text": "a"}}, "prompt", f"{PROMPTS}, not {{'text': 'a'}}"),
    Case({"prompt": [-1]}, "prompt", "-1 is not a token id; they are 0 to vocabulary size - 1"),
    Case({"prompt": [2**70]}, "prompt", f"{2**70} is not a token id; they are 0 to vocabulary size - 1"),
    Case({"prompt": [NUM_TOKENS]}, "prompt", "the prompt has the token id 268; this model's are 0 to 267"),
    Case({"prompt": "\ud800"}, "prompt", f"prompt: {SURROGATE}"),
    Case({"prompt": ["a", "\ud800"]}, "prompt", f"prompt: {SURROGATE}"),
    Case({"prompt": "x" * 256}, "prompt", "the prompt has 256 tokens; max_model_len=256 allows at most 255"),
    Case({"prompt": ["x"] * 257}, "prompt", "257 prompts are more than may wait at once, 256"),
    # Messages
    Case({"messages": []}, "messages", "messages: List should have at least 1 item after validation, not 0", path=CHAT),
    Case({"messages": "hi"}, "messages", "messages: Input should be a valid list, not 'hi'", path=CHAT),
    Case(
        {"messages": [USER | {"content": "x" * 256}]},
        "messages",
        "the prompt has 258 tokens; max_model_len=256 allows at most 255",
        path=CHAT,
    ),
    Case({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content: Field required", path=CHAT),
    Case(
        {"messages": [USER, USER | {"role": "tool"}]},
        "messages[1].role",
        "messages[1].role: Input should be 'system', 'developer', 'user' or 'assistant', not 'tool'",
        path=CHAT,
    ),
    Case(
        {"messages": [USER | {"content": [{"type": "image_url"}]}]},
        "messages[0].content",
        f"messages[0].content: {CONTENT}, not [{{'type': 'image_url'}}]",
        path=CHAT,
    ),
    Case(
        {"messages": [USER | {"content": None}]},
        "messages[0].content",
        f"messages[0].content: {CONTENT}, not None",
        path=CHAT,
    ),
    Case(
        {"messages": [USER | {"content": "\ud800"}]},
        "messages[0].content",
        f"messages[0].content: {SURROGATE}",
        path=CHAT,
    ),
    Case(
        {"messages": [USER | {"tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "tool_calls is not supported by this server; leave it out",
        path=CHAT,
    ),
    Case(
        {"messages": [USER | {"mood": "good"}]},
        "messages[0].mood",
        "there is no field 'mood'; the fields are content, role",
        path=CHAT,
    ),
    # Numbers
    Case({"max_tokens": 0}, "max_tokens", "max_tokens: Input should be greater than or equal to 1, not 0"),
    Case({"max_tokens": 1.5}, "max_tokens", "max_tokens: Input should be a valid integer, not 1.5"),
    Case({"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer, not '5'"),
    Case({"max_tokens": True}, "max_tokens", "max_tokens: Input should be a valid integer, not True"),
    Case({"max_tokens": 2**64}, "max_tokens", f"max_tokens: Input should be less than {2**31}, not {2**64}"),
    Case(
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        "max_tokens and max_completion_tokens are one field; give one of them",
        path=CHAT,
    ),
    Case({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens=9 is more than max_tokens=8"),
    Case({"temperature": -1}, "temperature", "temperature: Input should be greater than or equal to 0, not -1"),
    Case({"temperature": "hot"}, "temperature", "temperature: Input should be a valid number, not 'hot'"),
    Case({"temperature": float("nan")}, "temperature", "temperature: Input should be a finite number, not nan"),
    Case({"temperature": float("inf")}, "temperature", "temperature: Input should be a finite number, not inf"),
    Case(
        {"temperature": 10**400},
        "temperature",
        "temperature: Input should be a valid number, not 100000000000000000...0000000000000000000",
    ),
    Case(
        {"temperature": 10**7},
        "temperature",
        "temperature=10000000.0 is out of range; it must be a number from 0 to 1000000",
    ),
    Case({"top_p": 0}, "top_p", "top_p: Input should be greater than 0, not 0"),
    Case({"top_p": 1e-9}, "top_p", "top_p=1e-09 is out of range; it must be a number above 0 and at most 1"),
    Case({"top_k": -1}, "top_k", "top_k: Input should be greater than or equal to 0, not -1"),
    Case({"min_p": 2}, "min_p", "min_p: Input should be less than or equal to 1, not 2"),
    Case({"n": 0}, "n", "n: Input should be greater than or equal to 1, not 0"),
    Case({"n": 1025}, "n", "n: Input should be less than or equal to 1024, not 1025"),
    Case({"best_of": 3, "n": 2}, "best_of", "best_of=3 is not n=2, and nothing else is supported"),
    Case({"seed": -1}, "seed", "seed: Input should be greater than or equal to 0, not -1"),
    Case({"seed": 2**63}, "seed", f"seed: Input should be less than {2**63}, not {2**63}"),
    Case(
        {"presence_penalty": 3}, "presence_penalty", "presence_penalty: Input should be less than or equal to 2, not 3"
    ),
    Case(
        {"frequency_penalty": -3},
        "frequency_penalty",
        "frequency_penalty: Input should be greater than or equal to -2, not -3",
    ),
    Case({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty: Input should be greater than 0, not 0"),
    Case({"priority": 2**31}, "priority", f"priority: Input should be less than {2**31}, not {2**31}"),
    # Lists and maps
    Case({"stop": 5}, "stop", "stop: give a string or a list of strings, not 5"),
    Case({"stop": [5]}, "stop", "stop: give a string or a list of strings, not [5]"),
    Case({"stop": "\ud800"}, "stop", f"stop: {SURROGATE}"),
    Case({"stop": ""}, "stop", "stop=('',); it must be one string or a list of strings, none of them empty"),
    Case({"stop": "x" * 1025}, "stop", "a stop string has 1025 characters; it may have 1024 at most"),
    Case(
        {"stop_token_ids": [-1]},
        "stop_token_ids",
        "a token id in stop_token_ids=-1 is out of range; it must be a whole number from 0 to 2147483647",
    ),
    Case({"stop_token_ids": [999]}, "stop_token_ids", "stop_token_ids has the token id 999; this model's are 0 to 267"),
    Case({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "stop_token_ids[0]: Input should be a valid integer, not 'a'"),
    Case(
        {"allowed_token_ids": []},
        "allowed_token_ids",
        "allowed_token_ids=[] allows no token at all; None allows every token",
    ),
    Case(
        {"allowed_token_ids": [999]},
        "allowed_token_ids",
        "allowed_token_ids has the token id 999; this model's are 0 to 267",
    ),
    Case({"logit_bias": {"cat": 1}}, "logit_bias", "logit_bias maps token ids to numbers, and 'cat' is no token id"),
    Case({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias maps token ids to numbers, and '-1' is no token id"),
    Case(
        {"logit_bias": {"\ud800": 1}},
        "logit_bias",
        r"logit_bias maps token ids to numbers, and '\ud800' is no token id",
    ),
    Case(
        {"logit_bias": {"9" * 50: 1}},
        "logit_bias",
        f"a token id in logit_bias={'9' * 20} is out of range; it must be a whole number from 0 to 2147483647",
    ),
    Case({"logit_bias": {"999": 1}}, "logit_bias", "logit_bias has the token id 999; this model's are 0 to 267"),
    Case({"logit_bias": {"5": "much"}}, "logit_bias.5", "logit_bias.5: Input should be a valid number, not 'much'"),
    Case({"logit_bias": {"5": float("nan")}}, "logit_bias.5", "logit_bias.5: Input should be a finite number, not nan"),
    Case({"logit_bias": [5]}, "logit_bias", "logit_bias: give an object, not [5]"),
    # Log-probabilities
    Case({"logprobs": 21}, "logprobs", "logprobs: Input should be less than or equal to 20, not 21"),
    Case({"logprobs": True}, "logprobs", "logprobs: Input should be a valid integer, not True"),
    Case({"logprobs": 1}, "logprobs", "logprobs: Input should be a valid boolean, not 1", path=CHAT),
    Case({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs=true", path=CHAT),
    Case(
        {"top_logprobs": 21, "logprobs": True},
        "top_logprobs",
        "top_logprobs: Input should be less than or equal to 20, not 21",
        path=CHAT,
    ),
    Case(
        {"echo": True, "logprobs": 1, "stream": True},
        "echo",
        "echo with logprobs cannot be streamed; leave out one of the three",
    ),
    # Streams
    Case({"stream": "yes"}, "stream", "stream: Input should be a valid boolean, not 'yes'"),
    Case({"stream_options": {"include_usage": True}}, "stream_options", "stream_options is for stream=true"),
    Case(
        {"stream": True, "stream_options": UNKNOWN},
        "stream_options.nonsense",
        "there is no field 'nonsense'; the fields are include_obfuscation, include_usage",
    ),
    Case(
        {"stream": True, "stream_options": 1},
        "stream_options",
        "stream_options: give an object, not 1",
    ),
    Case({"stream": True, "prompt": ""}, "prompt", "the prompt is empty; it needs at least one token"),
    Case({"stream": True, "model": "huge"}, "model", NO_MODEL, 404, CHAT),
    # What we do not have
    Case({"tools": [{"type": "function"}]}, "tools", "tools is not supported by this server; leave it out", path=CHAT),
    Case(
        {"response_format": {"type": "json_object"}},
        "response_format",
        "response_format is not supported by this server; leave it out",
        path=CHAT,
    ),
    Case({"suffix": "end"}, "suffix", "suffix is not supported by this server; leave it out"),
    # The others' bodies
    Case({"prompt": None}, "prompt", "give either prompt or messages", path="/tokenize"),
    Case({"messages": [USER]}, "prompt", "give either prompt or messages", path="/tokenize"),
    Case({"tokens": [268]}, "tokens", "tokens has the token id 268; this model's are 0 to 267", path="/detokenize"),
    Case({"tokens": [-1]}, "tokens", "-1 is not a token id; they are 0 to vocabulary size - 1", path="/detokenize"),
    Case({"tokens": "5"}, "tokens", "tokens: Input should be a valid list, not '5'", path="/detokenize"),
]

BASE = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [USER]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": []},
}

WRONG_BODIES = [
    (b"", "the body: Field required"),
    (b"{", "the body is not JSON: Expecting property name enclosed in double quotes"),
    (b'{"prompt": "a"', "the body is not JSON: Expecting ',' delimiter"),
    (
        b'{"prompt": "\xff"}',
        "the body is not JSON: 'utf-8' codec can't decode byte 0xff in position 12: invalid start byte",
    ),
    (b'"prompt"', "the body: give an object, not 'prompt'"),
    (b"[]", "the body: give an object, not []"),
    (b"null", "the body: give an object, not None"),
    (b"{}", "prompt: Field required"),
    (
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        "the body is not JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; "
        "use sys.set_int_max_str_digits() to increase the limit",
    ),
]

FIELDS = (
    "allowed_token_ids, best_of, echo, frequency_penalty, ignore_eos, include_stop_str_in_output, logit_bias, "
    "logprobs, max_tokens, min_p, min_tokens, model, n, presence_penalty, priority, prompt, prompt_cache_key, "
    "repetition_penalty, replica_class, safety_identifier, seed, skip_special_tokens, stop, stop_token_ids, stream, "
    "stream_options, temperature, top_k, top_p, user"
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    engine = scripted_engine(tokens("ok"))
    with (
        serving([engine], classes=("interactive",), app={"max_request_bytes": MAX_BYTES}) as server,
        httpx2.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        yield client
        assert client.post(COMPLETIONS, json={"prompt": "x"}).json()["choices"][0]["text"] == "ok"
    assert_idle(engine)


def refused(reply: httpx2.Response, status: int) -> dict[str, Any]:
    """The error, in OpenAI's shape."""
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"]
    assert list(reply.json()) == ["error"]
    error = reply.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.path} {case.more!a:.50}")
def test_a_field_that_is_wrong(http, case):
    body = json.dumps(BASE[case.path] | case.more)  # as Python writes NaN, half pairs and long numbers
    error = refused(http.post(case.path, content=body), case.status)
    assert error["message"] == case.sentence
    assert error["param"] == case.param
    assert error["type"] == ("not_found_error" if case.status == 404 else "invalid_request_error")
    assert error["code"] == ("model_not_found" if case.status == 404 else None)


def test_a_field_that_is_not_there(http):
    error = refused(http.post(COMPLETIONS, json={"prompt": "x", "temperatur": 1}), 400)
    assert error["message"] == f"there is no field 'temperatur'; the fields are {FIELDS}"
    assert error["param"] == "temperatur"
    error = refused(http.post(COMPLETIONS, content=rb'{"prompt": "x", "\ud800": 1}'), 400)
    assert error["message"].startswith(r"there is no field '\ud800'; the fields are ")
    assert error["param"] == r"\ud800"


@pytest.mark.parametrize(("body", "sentence"), WRONG_BODIES, ids=lambda value: ascii(value)[:30])
def test_a_body_that_is_wrong(http, body, sentence):
    assert refused(http.post(COMPLETIONS, content=body), 400)["message"] == sentence


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", ["prompt", "messages", "metadata", "nonsense"])
@pytest.mark.parametrize("depth", [50, 900, 100_000])
def test_json_that_is_nested_deeply(http, path, name, depth):
    body = f'{{"{name}": ' + "[" * depth + "]" * depth + "}"
    refused(http.post(path, content=body), 400)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_long(http, is_chunked):
    body = json.dumps({"prompt": "x" * (10 << 20)}).encode()
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    error = refused(http.post(COMPLETIONS, content=pieces if is_chunked else body), 413)
    assert error == {
        "message": "the body is longer than 1048576 bytes (--max-request-bytes)",
        "type": "invalid_request_error",
        "param": None,
        "code": "body_too_long",
    }


def test_a_body_of_just_the_length_that_is_allowed(http):
    body = b'{"prompt": "x"}'.ljust(MAX_BYTES)
    assert http.post(COMPLETIONS, content=body).status_code == 200
    refused(http.post(COMPLETIONS, content=body + b" "), 413)


def test_a_path_that_is_not_there(http):
    error = refused(http.post("/v1/embeddings", json={}), 404)
    assert (error["message"], error["type"]) == (
        "there is no /v1/embeddings here; /docs has the paths",
        "not_found_error",
    )


def test_a_method_that_is_wrong(http):
    reply = http.get(COMPLETIONS)
    assert refused(reply, 405)["message"] == "/v1/completions does not take GET; it takes POST"
    assert reply.headers["allow"] == "POST"


def test_a_model_that_is_not_there(http):
    error = refused(http.get("/v1/models/huge"), 404)
    assert (error["message"], error["param"], error["code"]) == (NO_MODEL, "model", "model_not_found")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_is_none(http, seconds):
    error = refused(http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-timeout": seconds}), 400)
    assert error["message"] == f"x-request-timeout: {seconds!r} is not a number of seconds above 0"
    assert error["param"] == "x-request-timeout"


def test_one_prompt_of_several_that_is_wrong_ends_the_others():
    """Nothing is sent of a stream of which one part cannot run."""

    def script(seq, index):
        time.sleep(0.01)
        return tokens("x")[0]

    engine = scripted_engine(script)
    with serving([engine]) as server:
        body = {"prompt": [[5, 6], [9999]], "max_tokens": 240, "stream": True}
        reply = httpx2.post(server.url + COMPLETIONS, json=body, timeout=TIMEOUT)
        assert refused(reply, 400)["message"] == "the prompt has the token id 9999; this model's are 0 to 267"
        end = time.monotonic() + TIMEOUT
        while engine.stats().running and time.monotonic() < end:
            time.sleep(0.005)
        assert engine.stats().generated_tokens < 120
        assert_idle(engine)
