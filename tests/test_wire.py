"""Messages say all that a user can ask for and get: there and back, every field."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import wire
from fastgen_jax.types import Delta, EngineStats, Response, SamplingParams, Timings, TokenLogprob

quick = settings(max_examples=200, deadline=None)

token_ids = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
PARAMS = {
    "max_tokens": st.none() | st.integers(1, 2**63),
    "min_tokens": st.integers(0, 1),
    "temperature": st.floats(0, 10**6) | st.integers(0, 3),
    "top_p": st.floats(1e-6, 1),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(1e-6, 10**6),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(token_ids, st.floats(-1e30, 1e30), min_size=1, max_size=5),
    "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=5).map(tuple),
    "stop": st.lists(texts, min_size=1, max_size=3).map(tuple),
    "stop_token_ids": st.lists(token_ids, min_size=1, max_size=5).map(tuple),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "seed": st.integers(0, 2**63 - 1),
    "n": st.integers(1, 1024),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "return_full_text": st.booleans(),
}


def names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def fields_of(message: type) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def sent[M](message: M) -> M:
    """A message after its journey."""
    arrived = type(message)()
    arrived.ParseFromString(message.SerializeToString())
    return arrived


def spell(token_id: int) -> bytes:
    return f"<{token_id}>".encode()


# The proto has every field, so that one that is added to the types cannot be forgotten here


def test_the_proto_has_every_sampling_parameter():
    assert fields_of(pb.SamplingParams) == names(SamplingParams) == set(PARAMS)


def test_the_proto_has_every_field_of_a_response():
    assert fields_of(pb.Response) >= names(Response) - {"request_id"}  # an engine's own number
    assert fields_of(pb.Timings) >= names(Timings)
    assert fields_of(pb.Delta) >= names(Delta)
    assert fields_of(pb.TokenLogprob) >= names(TokenLogprob)


def test_the_proto_has_every_total_of_an_engine():
    assert fields_of(pb.ReplicaStats) > names(EngineStats)


# There and back


@quick
@given(fields=st.fixed_dictionaries({}, optional=PARAMS))
def test_what_is_set_arrives_and_what_is_not_stays_unset(fields):
    assert wire.from_params(sent(wire.to_params(fields))) == fields


@quick
@given(fields=st.fixed_dictionaries({}, optional=PARAMS), defaults=st.fixed_dictionaries({}, optional=PARAMS))
def test_a_request_on_a_models_defaults_is_what_it_would_be_without_the_journey(fields, defaults):
    default_params = SamplingParams(**defaults)
    arrived = wire.from_params(sent(wire.to_params(fields)))
    try:
        expected = default_params.replace(**fields)
    except ValueError:  # as min_tokens against the defaults' max_tokens
        with pytest.raises(ValueError):
            default_params.replace(**arrived)
    else:
        assert default_params.replace(**arrived) == expected


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "seed", "allowed_token_ids"])
def test_none_is_not_set(name):
    assert wire.from_params(sent(wire.to_params({name: None}))) == {}


def test_no_limit_is_not_the_same_as_no_word():
    assert wire.from_params(sent(wire.to_params({"max_tokens": None}))) == {"max_tokens": None}
    assert wire.from_params(sent(wire.to_params({}))) == {}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"temperature": -1}, "temperature=-1 is out of range"),
        ({"temperature": math.nan}, "temperature=nan is out of range"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range"),
        ({"max_tokens": 2**70}, "out of range"),
        ({"temperatur": 1}, "has no field 'temperatur'"),
        ({"n": "2"}, "n='2' is str"),
        ({"stop": ["\ud83d"]}, "half a surrogate pair"),
    ],
)
def test_what_is_wrong_is_refused_before_it_is_sent(fields, error):
    with pytest.raises((ValueError, TypeError), match=error):
        wire.to_params(fields)


@pytest.mark.parametrize(
    "prompt",
    [
        "né 👍",
        "",
        [0, 1, 2**31 - 1],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}],
    ],
)
def test_a_prompt_arrives(prompt):
    assert wire.from_prompt(sent(wire.to_prompt(prompt))) == prompt


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (None, "not None"),
        ([], "a prompt is a string"),
        (b"bytes", "a prompt is a string"),
        ([1, "a"], "a prompt is a string"),
        ([True], "a prompt is a string"),
        ([-1], "-1 is not a token id"),
        ([2**31], "is not a token id"),
        ("\ud83d", "half a surrogate pair"),
        ([{"role": "user"}], "a message is"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a message is"),
        ([{"role": "user", "content": "\udc4d"}], "half a surrogate pair"),
    ],
)
def test_what_is_no_prompt_is_refused_before_it_is_sent(prompt, error):
    with pytest.raises((ValueError, TypeError), match=error):
        wire.to_prompt(prompt)


@pytest.mark.parametrize(
    "message", [pb.Prompt(), pb.Prompt(token_ids=pb.TokenIds()), pb.Prompt(conversation=pb.Conversation())]
)
def test_a_message_without_a_prompt_is_refused(message):
    with pytest.raises(ValueError, match="the request has no prompt"):
        wire.from_prompt(message)


logprobs = st.builds(TokenLogprob, token_ids, numbers, st.lists(st.tuples(token_ids, numbers), max_size=3).map(tuple))
several_logprobs = st.lists(logprobs, max_size=3).map(tuple)
several_ids = st.lists(token_ids, max_size=4).map(tuple)
moments = st.none() | st.floats(0, 1e6)
responses = st.builds(
    Response,
    text=st.text(st.characters(codec="utf-8"), max_size=8),
    token_ids=several_ids,
    prompt_token_ids=st.lists(token_ids, min_size=1, max_size=4).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    logprobs=st.none() | several_logprobs,
    prompt_logprobs=st.none() | several_logprobs.map(lambda found: (None, *found)),
    index=st.integers(0, 1023),
    num_preemptions=st.integers(0, 1000),
    cached_tokens=st.integers(0, 2**20),
    timings=st.builds(Timings, moments, st.lists(st.floats(0, 1e6), max_size=4).map(tuple), moments),
)


@quick
@given(response=responses)
def test_a_response_arrives_whole(response):
    assert wire.from_response(sent(wire.to_response(response, spell))) == response


def test_log_probabilities_bring_the_bytes_of_their_tokens():
    entry = TokenLogprob(7, -0.5, ((7, -0.5), (9, -2.0)))
    (told,) = wire.to_delta(Delta(0, "x", (7,), (entry,)), spell).logprobs
    assert told.token == b"<7>"
    assert [top.token for top in told.top] == [b"<7>", b"<9>"]


def test_what_came_of_one_sample_since_the_last_event_is_one_delta():
    first, second = TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)
    deltas = [
        Delta(0, "a", (1,), (first,)),
        Delta(1, "x", (5,)),
        Delta(0, "b", (2, 3), (second, second)),
        Delta(1, "", ()),
        Delta(2, "z", (9,)),
    ]
    assert wire.merged(deltas) == [
        Delta(0, "ab", (1, 2, 3), (first, second, second)),
        Delta(1, "x", (5,)),
        Delta(2, "z", (9,)),
    ]
