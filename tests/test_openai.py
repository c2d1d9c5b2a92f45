"""OpenAI's API as its official client sees it: every field, and answers that are the engine's own."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from doubles import FakeReplica
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai_client import (
    ENDS,
    GREEDY,
    LETTERS,
    MESSAGES,
    OPENAIS,
    PROMPT,
    SAMPLED,
    Choice,
    chat,
    connect,
    engines,
    split,
    streamed,
    streamed_chat,
    whole,
)
from scripted import FIRST_BYTE, TOKENIZER, assert_idle, scripted_engine, tokens
from serving import TIMEOUT, run
from threaded import serving
from tiny import EOS
from wide import wide_engine

from fastgen_jax import Engine, Response, SamplingParams
from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import openai_requests
from fastgen_jax.serving.app import make_app
from fastgen_jax.serving.openai_replies import Completions, Usage
from fastgen_jax.serving.router import Router

FIELDS = [
    (GREEDY, {"max_tokens": 5}),
    (SAMPLED, {"temperature": 0.1}),
    (SAMPLED, {"top_p": 0.2}),
    (SAMPLED, {"n": 3}),
    (SAMPLED, {"seed": 12}),
    (GREEDY, {"presence_penalty": 2}),
    (GREEDY, {"frequency_penalty": 2}),
    (GREEDY, {"logit_bias": {LETTERS[0]: 3, LETTERS[1]: -100}}),
    (SAMPLED, {"top_k": 2}),
    (SAMPLED, {"min_p": 0.5}),
    (GREEDY, {"repetition_penalty": 2}),
    (ENDS, {"min_tokens": 4}),
    (GREEDY, {"stop_token_ids": LETTERS[::2]}),
    (GREEDY, {"allowed_token_ids": LETTERS[:5]}),
    (ENDS, {"ignore_eos": True}),
    (GREEDY | {"stop_token_ids": LETTERS[::2]}, {"include_stop_str_in_output": True}),
    (ENDS | {"ignore_eos": True}, {"skip_special_tokens": False}),
]
"""Fields beside which one is tried, and that one. Each of them changes the answer."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    """What is served."""
    return wide_engine()


@pytest.fixture(scope="module")
def url(engine) -> Iterator[str]:
    with serving([engine]) as found:
        yield found.url
    assert_idle(engine)


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with connect(url) as found:
        yield found


@pytest.fixture(scope="module")
def own() -> Engine:
    """The same engine, asked directly."""
    return wide_engine()


# Every field


@pytest.mark.parametrize(("beside", "field"), FIELDS, ids=[next(iter(field)) for _, field in FIELDS])
def test_a_field_does_what_it_does_to_the_engine(client, own, beside, field):
    fields = beside | field
    expected = engines(own, PROMPT, **fields)
    assert expected != engines(own, PROMPT, **beside), "the field changes nothing here"
    assert whole(client, PROMPT, **fields) == expected
    assert streamed(client, PROMPT, **fields) == expected
    expected = engines(own, MESSAGES, **fields)
    assert chat(client, **fields) == expected
    assert streamed_chat(client, **fields) == expected


@pytest.mark.parametrize("where", ["one", "several", "kept"])
def test_stop_strings_that_span_tokens(client, own, where):
    [(text, _)] = engines(own, PROMPT, **GREEDY)
    stop = {"one": text[6:9], "several": ["no such text", text[6:9], text[20:]], "kept": text[6:9]}[where]
    fields = GREEDY | {"stop": stop, "include_stop_str_in_output": where == "kept"}
    expected = engines(own, PROMPT, **fields)
    assert expected[0].finish_reason == "stop" and len(expected[0].text) <= 9
    assert whole(client, PROMPT, **fields) == expected
    assert streamed(client, PROMPT, **fields) == expected


def test_finish_reasons(client):
    assert whole(client, PROMPT, **ENDS) == [Choice("", "stop")]
    assert [choice.finish_reason for choice in whole(client, PROMPT, **GREEDY)] == ["length"]
    assert chat(client, **ENDS) == [Choice("", "stop")]


def test_max_tokens_is_16_for_a_completion_and_what_the_context_holds_for_a_chat(client, own):
    fields = {"temperature": 0, "ignore_eos": True}
    completion = client.completions.create(prompt=PROMPT, **split(fields))
    assert (completion.usage.completion_tokens, completion.choices[0].finish_reason) == (16, "length")
    answer = client.chat.completions.create(messages=MESSAGES, **split(fields))
    assert answer.usage.total_tokens == own.max_model_len


def test_max_completion_tokens_is_max_tokens(client, own):
    expected = engines(own, MESSAGES, **GREEDY | {"max_tokens": 5})
    fields = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=5, **split(fields))
    assert answer.choices[0].message.content == expected[0].text
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=5, max_tokens=5, **split(fields))
    assert answer.choices[0].message.content == expected[0].text


@pytest.mark.parametrize(
    "prompt", [PROMPT, [PROMPT, "jumps over"], tokens(PROMPT), [tokens(PROMPT), tokens("jumps")]], ids=str
)
def test_kinds_of_prompts(client, own, prompt):
    """Every prompt's samples, in order, as choices."""
    is_several = not isinstance(prompt[0], str | int) or (isinstance(prompt, list) and isinstance(prompt[0], str))
    every = prompt if is_several else [prompt]
    fields = SAMPLED | {"n": 2}
    expected = [choice for each in every for choice in engines(own, each, **fields)]
    assert len(expected) == 2 * len(every)
    assert whole(client, prompt, **fields) == expected
    assert streamed(client, prompt, **fields) == expected


def test_messages_may_be_parts_and_instructions_a_developers(client, own):
    parts = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "why is "}, {"type": "text", "text": "the sky blue?"}]},
    ]
    answer = client.chat.completions.create(messages=parts, **split(GREEDY))
    assert answer.choices[0].message.content == engines(own, MESSAGES, **GREEDY)[0].text


def test_an_answer_goes_back_into_the_conversation_as_it_came(client, own):
    answer = client.chat.completions.create(messages=MESSAGES, **split(GREEDY)).choices[0].message
    more = {"role": "user", "content": "go on"}
    said = [*MESSAGES, {"role": "assistant", "content": answer.content}, more]
    for message in (answer, answer.model_dump()):
        next_answer = client.chat.completions.create(messages=[*MESSAGES, message, more], **split(GREEDY))
        assert next_answer.choices[0].message.content == engines(own, said, **GREEDY)[0].text


@pytest.mark.parametrize("prompt", [PROMPT, tokens(PROMPT)], ids=["text", "token ids"])
def test_echo(client, own, prompt):
    [(text, reason)] = engines(own, prompt, **GREEDY)
    fields = GREEDY | {"echo": True}
    assert whole(client, prompt, **fields) == streamed(client, prompt, **fields) == [Choice(PROMPT + text, reason)]
    both = streamed(client, [PROMPT, "jumps"], **fields | {"n": 2})
    assert [choice.text.startswith(start) for choice, start in zip(both, [PROMPT] * 2 + ["jumps"] * 2, strict=True)]


def test_best_of_is_n_and_a_user_has_no_effect(client, own):
    expected = engines(own, PROMPT, **SAMPLED | {"n": 2})
    assert whole(client, PROMPT, **SAMPLED | {"n": 2, "best_of": 2, "user": "somebody"}) == expected
    answer = client.chat.completions.create(
        messages=MESSAGES, user="u", safety_identifier="s", prompt_cache_key="p", **split(GREEDY)
    )
    assert answer.choices[0].message.content == engines(own, MESSAGES, **GREEDY)[0].text


def test_null_is_the_same_as_left_out(client, own):
    names = openai_requests.CompletionRequest.model_fields.keys() - {"prompt", *GREEDY}
    got = client.completions.create(prompt=PROMPT, **split(GREEDY | dict.fromkeys(names - OPENAIS)))
    assert got.choices[0].text == engines(own, PROMPT, **GREEDY)[0].text


@pytest.mark.parametrize("name", openai_requests.NEUTRAL)
def test_a_field_that_we_do_not_have_passes_if_it_asks_for_nothing(client, name):
    for value in openai_requests.NEUTRAL[name]:
        client.completions.create(prompt=PROMPT, model="tiny", max_tokens=1, extra_body={name: value})
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt=PROMPT, model="tiny", extra_body={name: {"some": "thing"}})
    assert refused.value.body == {
        "message": f"{name} is not supported by this server; leave it out",
        "type": "invalid_request_error",
        "param": name,
        "code": None,
    }


def test_we_know_every_field_of_the_official_client():
    completion = vars(completion_create_params.CompletionCreateParamsBase)["__annotations__"]
    of_chat = vars(chat_create_params.CompletionCreateParamsBase)["__annotations__"]
    known = openai_requests.NEUTRAL.keys()
    assert completion.keys() - known <= openai_requests.CompletionRequest.model_fields.keys()
    assert of_chat.keys() - known <= openai_requests.ChatCompletionRequest.model_fields.keys()


def test_priority_goes_first():
    """One sequence at a time: of two that wait, the one of higher priority is answered before the other has begun."""
    order = []

    def script(seq, index):
        text = TOKENIZER.decode(seq.prompt_token_ids)
        if index == 0:
            order.append(text)
        if text == "first" and engine.stats().waiting < 2:
            time.sleep(0.005)
            return FIRST_BYTE + ord("x")
        return EOS

    async def main(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT) as client:
            ask = client.completions.create
            first = asyncio.create_task(ask(model="tiny", prompt="first", max_tokens=240))
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            low = asyncio.create_task(ask(model="tiny", prompt="low", extra_body={"priority": -1}))
            while not engine.stats().waiting:
                await asyncio.sleep(0.001)
            await asyncio.gather(first, low, ask(model="tiny", prompt="high", extra_body={"priority": 5}))

    engine = scripted_engine(script, max_num_seqs=1)
    with serving([engine]) as server:
        asyncio.run(asyncio.wait_for(main(server.url), TIMEOUT))
    assert order == ["first", "high", "low"]


def test_replica_class_chooses_the_replicas():
    replicas = [scripted_engine(tokens("now")), scripted_engine(tokens("later"))]
    with serving(replicas, classes=("interactive", "batch")) as server, connect(server.url) as client:
        assert [whole(client, PROMPT, replica_class=name)[0].text for name in ("interactive", "batch")] == [
            "now",
            "later",
        ]
        assert whole(client, PROMPT) == [Choice("now", "stop")]


# Log-probabilities


def tokens_of(own: Engine, response: Response) -> list[bytes]:
    return [own.reader.token_bytes(entry.token_id) for entry in response.logprobs]


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_of_a_completion(client, own, num_top):
    [response] = own.generate([PROMPT], SamplingParams(**GREEDY, logprobs=num_top))
    got = client.completions.create(prompt=PROMPT, logprobs=num_top, **split(GREEDY)).choices[0].logprobs
    assert got.tokens == [token.decode() for token in tokens_of(own, response)]
    assert got.token_logprobs == pytest.approx([entry.logprob for entry in response.logprobs], abs=1e-4)
    assert got.text_offset == list(range(len(response.token_ids)))
    for token, found, entry in zip(got.tokens, got.top_logprobs, response.logprobs, strict=True):
        expected = {legacy(own, token_id): logprob for token_id, logprob in entry.top} | {token: entry.logprob}
        assert found == pytest.approx(expected, abs=1e-4)
        assert len(found) in (num_top, num_top + 1)


def legacy(own: Engine, token_id: int) -> str:
    token = own.reader.token_bytes(token_id)
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


@pytest.mark.parametrize("num_top", [None, 0, 4])
def test_logprobs_of_a_chat(client, own, num_top):
    [response] = own.chat(MESSAGES, SamplingParams(**GREEDY, logprobs=num_top or 0))
    more = {} if num_top is None else {"top_logprobs": num_top}
    got = client.chat.completions.create(messages=MESSAGES, logprobs=True, **more, **split(GREEDY))
    found = got.choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in found] == tokens_of(own, response)
    assert [entry.logprob for entry in found] == pytest.approx([e.logprob for e in response.logprobs], abs=1e-4)
    for entry, expected in zip(found, response.logprobs, strict=True):
        assert [bytes(top.bytes) for top in entry.top_logprobs] == [own.reader.token_bytes(i) for i, _ in expected.top]
        values = [logprob for _, logprob in expected.top]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(values, abs=1e-4)


def test_streamed_logprobs_are_the_whole_ones(client):
    fields = split(GREEDY | {"n": 2})
    whole = client.completions.create(prompt=PROMPT, logprobs=2, **fields).choices
    stream = client.completions.create(prompt=PROMPT, logprobs=2, stream=True, **fields)
    pieces = [piece for chunk in stream for piece in chunk.choices if piece.logprobs]
    for choice in whole:
        lists = [piece.logprobs for piece in pieces if piece.index == choice.index]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            expected = getattr(choice.logprobs, name)
            got = [each for one in lists for each in getattr(one, name)]
            for one, other in zip(got, expected, strict=True):
                assert one == (other if name in ("tokens", "text_offset") else pytest.approx(other, abs=1e-4))
    many = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**many, **split(GREEDY)).choices[0]
    chunks = client.chat.completions.create(stream=True, **many, **split(GREEDY))
    pieces = [piece.logprobs.content for chunk in chunks for piece in chunk.choices if piece.logprobs]
    for one, other in zip([entry for piece in pieces for entry in piece], choice.logprobs.content, strict=True):
        assert (one.bytes, one.token) == (other.bytes, other.token)
        assert [(top.token, top.logprob) for top in one.top_logprobs] == [
            (top.token, pytest.approx(top.logprob, abs=1e-4)) for top in other.top_logprobs
        ]


def test_echo_brings_the_prompts_logprobs(client, own):
    [response] = own.generate([PROMPT], SamplingParams(**GREEDY, logprobs=1, prompt_logprobs=1, echo=True))
    choice = client.completions.create(prompt=PROMPT, echo=True, logprobs=1, **split(GREEDY)).choices[0]
    got = choice.logprobs
    every = [*response.prompt_logprobs[1:], *response.logprobs]
    assert choice.text == response.text
    assert "".join(got.tokens) == choice.text
    assert got.token_logprobs[0] is got.top_logprobs[0] is None
    assert got.token_logprobs[1:] == pytest.approx([entry.logprob for entry in every], abs=1e-4)
    assert got.text_offset == list(range(len(choice.text)))


def test_text_offsets_count_characters_of_the_text():
    """Some characters take several tokens, and EOS is a token that is not in the text."""
    parts = ["é".encode(), *(bytes([byte]) for byte in "👍".encode()), b"x", b"</s>"]
    entries = [pb.TokenLogprob(token_id=i, logprob=-i, token=part) for i, part in enumerate(parts)]
    response = pb.Response(text="é👍x", has_logprobs=True, logprobs=entries, finish_reason="stop")
    got = Completions("id", "tiny", 1).whole([(0, response)], Usage())["choices"][0]["logprobs"]
    assert got["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert got["tokens"] == ["é", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x91", "bytes:\\x8d", "x", "</s>"]

    prompt = {"has_prompt_logprobs": True, "first_prompt_token": b"<s>", "prompt_logprobs": entries[5:6]}
    response = pb.Response(text="xé👍x", has_logprobs=True, logprobs=entries, finish_reason="stop", **prompt)
    got = Completions("id", "tiny", 1).whole([(0, response)], Usage())["choices"][0]["logprobs"]
    assert got["tokens"][:3] == ["<s>", "x", "é"]
    assert got["text_offset"] == [0, 0, 1, 2, 2, 2, 2, 3, 4]


# Streams


MULTI_BYTE = tokens("né", " the", "né".encode(), "👍".encode(), "👍", " fin\n", "\N{FAMILY}".encode())
MULTI_BYTE_TEXT = "né thené👍👍 fin\n\N{FAMILY}"


@pytest.mark.parametrize("stop", [None, "👍 f"])
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(stop):
    text = MULTI_BYTE_TEXT if stop is None else MULTI_BYTE_TEXT.partition(stop)[0]

    def script(seq, index):
        time.sleep(0.005)
        return MULTI_BYTE[index] if index < len(MULTI_BYTE) else EOS

    with serving([scripted_engine(script)]) as server, connect(server.url) as client:
        fields = {"prompt": PROMPT, "model": "tiny", "max_tokens": 64, "stop": stop}
        assert client.completions.create(**fields).choices[0].text == text
        pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **fields)]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 3


def test_a_stream_is_server_sent_events_as_openai_writes_them(url):
    body = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0, "stream": True}
    with httpx2.Client(base_url=url, timeout=TIMEOUT) as http:
        reply = http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    *events, done, after = reply.text.split("\n\n")
    assert (done, after) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "tiny")}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert "usage" not in chunks[-1]


def test_include_usage_adds_a_last_chunk(client, own):
    fields = split(GREEDY) | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(prompt=[PROMPT, "jumps"], **fields)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (24, 48, 72)
    *chunks, last = client.chat.completions.create(messages=MESSAGES, **fields)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(own.chat_prompt(MESSAGES)), 24)


def test_many_async_clients_at_once(url, own):
    """Each has its own tokens, whole and streamed."""
    prompts = [f"number {i} " * (1 + i % 3) for i in range(8)]
    fields = [SAMPLED | {"seed": i, "max_tokens": 8 + i} for i in range(8)]
    expected = [engines(own, prompt, **each)[0].text for prompt, each in zip(prompts, fields, strict=True)]

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT) as client:

            async def ask(prompt, each):
                return (await client.completions.create(prompt=prompt, **split(each))).choices[0].text

            async def listen(prompt, each):
                stream = await client.completions.create(prompt=prompt, stream=True, **split(each))
                return "".join([chunk.choices[0].text async for chunk in stream])

            both = list(zip(prompts, fields, strict=True))
            return await asyncio.gather(*(ask(*each) for each in both), *(listen(*each) for each in both))

    assert asyncio.run(asyncio.wait_for(main(), TIMEOUT)) == expected * 2


# What is around an answer


def test_usage_counts_prompts_once_and_samples_each(client):
    usage = client.completions.create(prompt=[PROMPT, "jumps"], **split(SAMPLED | {"n": 3})).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (24, 6 * 24, 24 + 6 * 24)


def test_cached_tokens():
    """Of a prompt that was there before, its full blocks; counted once, however many samples share them."""
    prompt = "x" * 40
    with serving([wide_engine()]) as server, connect(server.url) as client:
        asked = [client.completions.create(prompt=prompt, **split(SAMPLED | {"n": n})).usage for n in (1, 2)]
    assert [usage.prompt_tokens_details.cached_tokens for usage in asked] == [0, 32]


def test_models(client):
    listed = client.models.list().data
    assert [(model.id, model.object, model.owned_by) for model in listed] == [("tiny", "model", "fastgen-jax")]
    assert abs(listed[0].created - time.time()) < 3600
    assert client.models.retrieve("tiny") == listed[0]
    with pytest.raises(openai.NotFoundError, match="model='huge' is not served here; the models are tiny"):
        client.models.retrieve("huge")


def test_the_length_of_a_model_that_is_loading_is_not_known():
    router = Router([])
    router.fleet.replicas = [FakeReplica("a")]

    async def main():
        transport = httpx2.ASGITransport(make_app(router))
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as http:
            return (await http.get("/v1/models")).json()["data"]

    assert [(model["id"], model["max_model_len"]) for model in run(main())] == [("tiny", None)]


def test_tokenize_and_detokenize(url, own):
    with httpx2.Client(base_url=url, timeout=TIMEOUT) as http:

        def post(path: str, **body: Any) -> dict[str, Any]:
            return http.post(path, json=body).json()

        ids = tokens("né 👍".encode())
        assert post("/tokenize", prompt="né 👍") == {"tokens": ids, "count": 8, "max_model_len": own.max_model_len}
        assert post("/detokenize", tokens=ids, model="tiny") == {"prompt": "né 👍"}
        assert post("/tokenize", messages=MESSAGES)["tokens"] == own.chat_prompt(MESSAGES)
        assert post("/tokenize", prompt="")["tokens"] == []


def test_a_request_id_comes_back(client):
    ask = client.completions.with_raw_response.create
    reply = ask(prompt=PROMPT, extra_headers={"x-request-id": "my-id"}, **split(GREEDY))
    assert (reply.headers["x-request-id"], reply.parse().id) == ("my-id", "cmpl-my-id")
    others = [
        ask(prompt=PROMPT, extra_headers={"x-request-id": given}, **split(GREEDY)) for given in ("a b", "a" * 200)
    ]
    made_up = {reply.headers["x-request-id"] for reply in others}
    assert len(made_up) == 2 and all(len(name) == 32 for name in made_up)


def test_curl_without_a_header_is_json_but_not_from_a_web_page(url):
    body, form = json.dumps({"prompt": PROMPT, "max_tokens": 1}), {"content-type": "application/x-www-form-urlencoded"}
    with httpx2.Client(base_url=url, timeout=TIMEOUT) as http:
        assert http.post("/v1/completions", content=body, headers=form).status_code == 200
        assert http.post("/v1/completions", content=body).status_code == 200
        reply = http.post("/v1/completions", content=body, headers=form | {"origin": "https://example.com"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "send the header content-type: application/json, and a body that is"
