"""`SamplingParams` and `EngineConfig`: every field is checked, and every error is one sentence that helps."""

import dataclasses
import math
import pickle

import pytest

from fastgen_jax import EngineConfig, Response, SamplingParams
from fastgen_jax.types import TokenLogprob

NAN, INF = math.nan, math.inf

# (class, the field's range in words, bad values of the right type)
RANGES = {
    (SamplingParams, "max_tokens"): ("a whole number from 1 or None", [0, -1]),
    (SamplingParams, "temperature"): ("a number from 0 to 1000000", [-0.1, 1e7, NAN, INF, -INF]),
    (SamplingParams, "top_k"): ("a whole number from 0 to", [-1, 2**31]),
    (SamplingParams, "top_p"): ("a number above 0 and at most 1", [0, 0.0, -0.5, 1.01, NAN]),
    (SamplingParams, "min_p"): ("a number from 0 to 1", [-0.1, 1.1, NAN]),
    (SamplingParams, "repetition_penalty"): ("a number above 0 and at most 1000000", [0, -1.0, NAN, INF]),
    (SamplingParams, "presence_penalty"): ("a number from -2 to 2", [-2.1, 2.1, NAN]),
    (SamplingParams, "frequency_penalty"): ("a number from -2 to 2", [-2.1, 2.1, NAN]),
    (SamplingParams, "seed"): ("a whole number from 0 to 9223372036854775807 or None", [-1, 2**63]),
    (SamplingParams, "n"): ("a whole number from 1 to 1024", [0, -1, 1025]),
    (SamplingParams, "logprobs"): ("a whole number from 0 to 20 or None", [-1, 21]),
    (SamplingParams, "prompt_logprobs"): ("a whole number from 0 to 20 or None", [-1, 21]),
    (SamplingParams, "min_tokens"): ("a whole number from 0", [-1]),
    (EngineConfig, "block_size"): ("a whole number from 1 to 1024 or None", [0, 1025]),
    (EngineConfig, "num_blocks"): ("a whole number from 2 or None", [1, 0, -5]),
    (EngineConfig, "gpu_memory_utilization"): ("a number from 0.01 to 1", [0, 1.5, NAN]),
    (EngineConfig, "max_num_batched_tokens"): ("a whole number from 1 to 1048576", [0, 2**20 + 1]),
    (EngineConfig, "max_num_seqs"): ("a whole number from 1 to 65536 or None", [0, 2**16 + 1]),
    (EngineConfig, "max_model_len"): ("a whole number from 1 or None", [0]),
    (EngineConfig, "seed"): ("a whole number from 0 to 2147483647", [-1, 2**31]),
}
IS_WHOLE = {name for (_, name), (want, _) in RANGES.items() if want.startswith("a whole")}
FLAGS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo", "return_full_text"]


@pytest.mark.parametrize(
    ("cls", "name", "want", "value"),
    [(cls, name, want, value) for (cls, name), (want, values) in RANGES.items() for value in values],
)
def test_a_value_out_of_range_raises_naming_field_value_and_range(cls, name, want, value):
    with pytest.raises(ValueError) as refused:
        cls(**{name: value})
    assert str(refused.value).startswith(f"{name}={value!r} is out of range; it must be {want}")


@pytest.mark.parametrize("value", ["1", True, False, [1], 1j])
@pytest.mark.parametrize(("cls", "name"), RANGES)
def test_a_value_of_another_type_raises_naming_field_value_and_type(cls, name, value):
    with pytest.raises(TypeError) as refused:
        cls(**{name: value})
    want = RANGES[cls, name][0]
    assert str(refused.value).startswith(f"{name}={value!r} is {type(value).__name__}; it must be {want}")


@pytest.mark.parametrize("name", sorted(IS_WHOLE))
def test_a_fraction_is_not_a_whole_number(name):
    cls = next(cls for cls, field in RANGES if field == name)
    with pytest.raises(TypeError, match=f"{name}=2.0 is float; it must be a whole number"):
        cls(**{name: 2.0})


@pytest.mark.parametrize(("cls", "name"), RANGES)
def test_none_is_refused_where_it_is_not_the_default(cls, name):
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    if "or None" in RANGES[cls, name][0]:
        assert getattr(cls(**{name: None}), name) is None
    else:
        assert defaults[name] is not None
        with pytest.raises(TypeError, match=f"{name}=None is NoneType"):
            cls(**{name: None})


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        *[({name: 1}, TypeError, f"{name}=1 is int; it must be True or False") for name in FLAGS],
        ({"min_tokens": 6, "max_tokens": 5}, ValueError, "min_tokens=6 is more than max_tokens=5"),
        ({"stop": ""}, ValueError, "stop=('',); it must be one string or a list of strings, none of them empty"),
        ({"stop": ["a", ""]}, ValueError, "stop=('a', '')"),
        ({"stop": [1]}, ValueError, "stop=(1,)"),
        ({"stop": 1}, ValueError, "stop=1"),
        ({"stop": None}, ValueError, "stop=None"),
        ({"stop": ["a"] * 65}, ValueError, "stop has 65 strings; it may have 64 at most"),
        ({"stop_token_ids": 2}, TypeError, "stop_token_ids=2 is int; it must be a list of token ids"),
        ({"stop_token_ids": "ab"}, TypeError, "stop_token_ids='ab' is str; it must be a list of token ids"),
        ({"stop_token_ids": ["a"]}, TypeError, "a token id in stop_token_ids='a' is str"),
        ({"stop_token_ids": [True]}, TypeError, "a token id in stop_token_ids=True is bool"),
        ({"stop_token_ids": [-1]}, ValueError, "a token id in stop_token_ids=-1 is out of range"),
        ({"allowed_token_ids": [2**31]}, ValueError, "a token id in allowed_token_ids=2147483648 is out of range"),
        ({"allowed_token_ids": []}, ValueError, "allowed_token_ids=[] allows no token at all"),
        ({"logit_bias": [1, 2]}, ValueError, "logit_bias must map at most 512 token ids to numbers, not [1, 2]"),
        ({"logit_bias": dict.fromkeys(range(513), 1.0)}, ValueError, "logit_bias must map at most 512 token ids"),
        ({"logit_bias": {"5": 1.0}}, TypeError, "a token id in logit_bias='5' is str"),
        ({"logit_bias": {-5: 1.0}}, ValueError, "a token id in logit_bias=-5 is out of range"),
        ({"logit_bias": {5: "x"}}, TypeError, "logit_bias[5]='x' is str; it must be a number"),
        ({"logit_bias": {5: NAN}}, ValueError, "logit_bias[5]=nan is out of range"),
        ({"logit_bias": {5: -INF}}, ValueError, "logit_bias[5]=-inf is out of range"),
    ],
)
def test_a_bad_sampling_field_is_one_sentence(fields, error, sentence):
    with pytest.raises(error) as refused:
        SamplingParams(**fields)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtype": "int8"}, "dtype='int8' is not supported; choose float32, bfloat16, float16"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not supported; choose auto, fp8"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_seqs=9 is more than max_num_batched_tokens=8: a step must have a token for every running sequence",
        ),
    ],
)
def test_a_bad_engine_field_is_one_sentence(fields, sentence):
    with pytest.raises(ValueError) as refused:
        EngineConfig(**fields)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("cls", [SamplingParams, EngineConfig])
def test_an_unknown_field_raises_naming_it_and_the_valid_ones(cls):
    names = sorted(field.name for field in dataclasses.fields(cls))
    with pytest.raises(TypeError) as refused:
        cls(seed=1, top_q=3, best_of=2)
    assert str(refused.value) == (f"{cls.__name__} has no field 'best_of', 'top_q'; the fields are {', '.join(names)}")


def test_every_field_is_in_the_tables_above():
    others = {"stop", "stop_token_ids", "allowed_token_ids", "logit_bias", *FLAGS}
    ranged = {name for cls, name in RANGES if cls is SamplingParams}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == ranged | others


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "ab"}, {"stop": ("ab",)}),
        ({"stop": ["ab", "c"]}, {"stop": ("ab", "c")}),
        ({"stop_token_ids": [3, 4]}, {"stop_token_ids": (3, 4)}),
        ({"stop_token_ids": {3}}, {"stop_token_ids": (3,)}),
        ({"allowed_token_ids": frozenset([3])}, {"allowed_token_ids": (3,)}),
        ({"logit_bias": None}, {"logit_bias": {}}),
    ],
)
def test_lists_become_tuples(given, kept):
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in kept} == kept
    assert params == SamplingParams(**kept)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"temperature": 0},
        {"temperature": 10**6},
        {"top_p": 1, "top_k": 0, "min_p": 0},
        {"top_p": 1e-6, "top_k": 2**31 - 1, "min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e6},
        {"seed": 2**63 - 1, "n": 1024, "logprobs": 20, "prompt_logprobs": 0},
        {"logit_bias": dict.fromkeys(range(512), -1e30)},
    ],
)
def test_the_ends_of_the_ranges_are_in_them(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_replace_changes_what_it_names_and_checks_it():
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.0})
    changed = params.replace(seed=4, stop="b")
    assert changed == SamplingParams(temperature=0.5, stop=["b"], logit_bias={3: 1.0}, seed=4)
    assert params.seed is None
    with pytest.raises(ValueError, match="temperature=-1 is out of range"):
        params.replace(temperature=-1)
    with pytest.raises(TypeError, match="has no field 'temp'"):
        params.replace(temp=1)


def test_nothing_can_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1


def test_full_text_is_either_name():
    assert not SamplingParams().full_text
    assert SamplingParams(echo=True).full_text
    assert SamplingParams(return_full_text=True).full_text


RESPONSE = Response(
    text="ab",
    token_ids=(5, 6, 2),
    prompt_token_ids=(3, 4),
    finish_reason="stop",
    logprobs=(TokenLogprob(5, -0.5, ((5, -0.5),)),),
)


@pytest.mark.parametrize(
    "value",
    [SamplingParams(stop="a", seed=3, logit_bias={1: 2.0}), EngineConfig(num_blocks=9, overlap=False), RESPONSE],
    ids=lambda value: type(value).__name__,
)
def test_a_copy_by_pickle_is_equal(value):
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_response_counts_its_tokens_and_is_its_text():
    assert (RESPONSE.num_prompt_tokens, RESPONSE.num_generated_tokens) == (2, 3)
    assert str(RESPONSE) == "ab"
