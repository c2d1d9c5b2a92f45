"""`pipeline`: MII's names work, or are refused with the name to use instead."""

import weakref

import pytest
from scripted import TOKENIZER, scripted_engine, tokens
from tiny import EOS, tiny_engine

from fastgen_jax import SamplingParams
from fastgen_jax import pipeline as pipeline_by_name
from fastgen_jax.pipelines import Pipeline

ANSWERS = {"one": tokens("first"), "two": tokens("second"), "né": tokens("third")}


def scripted_pipeline(**config) -> Pipeline:
    return Pipeline(scripted_engine(ANSWERS, **config))


def params_of(prompt="one", default_params=None, **fields) -> SamplingParams:
    return scripted_pipeline(default_params=default_params).params(prompt, fields)


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("one", ["first"]),
        (["one"], ["first"]),
        (["two", "one", "né", "one"], ["second", "first", "third", "first"]),
        (("two", "one"), ["second", "first"]),
        (tokens("two"), ["second"]),
        ([tokens("two"), "one"], ["second", "first"]),
        ([], []),
    ],
)
def test_prompts_are_strings_or_token_ids_one_or_many_and_results_in_their_order(prompts, texts):
    assert [r.text for r in scripted_pipeline()(prompts)] == texts


@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        ({}, {}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"max_length": 10}, {"max_tokens": 7}),  # the prompt has 3
        ({"max_length": 10, "max_new_tokens": 5}, {"max_tokens": 5}),
        ({"max_length": 10, "max_new_tokens": 50}, {"max_tokens": 7}),
        ({"max_length": 10, "max_tokens": None}, {"max_tokens": 7}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.3}, {"temperature": 0.3}),
        ({"temperature": 0.3, "top_k": 5, "top_p": 0.9}, {"temperature": 0.3, "top_k": 5, "top_p": 0.9}),
        ({"return_full_text": True}, {"return_full_text": True}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"], "ignore_eos": True}, {"stop": ("x", "yz"), "ignore_eos": True}),
        ({"seed": 3, "n": 2}, {"seed": 3, "n": 2}),
        (dict.fromkeys(["max_new_tokens", "max_length", "top_k", "temperature", "do_sample", "stop"]), {}),
    ],
)
def test_names_mean_sampling_params(fields, ours):
    assert params_of(**fields) == SamplingParams(**ours)


@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        ({}, {"temperature": 0.6, "top_k": 4, "max_tokens": 9}),
        ({"do_sample": True}, {"temperature": 0.6, "top_k": 4, "max_tokens": 9}),
        ({"do_sample": False}, {"temperature": 0.0, "top_k": 4, "max_tokens": 9}),
        ({"temperature": 0.2, "max_new_tokens": 2}, {"temperature": 0.2, "top_k": 4, "max_tokens": 2}),
    ],
)
def test_what_is_not_given_is_the_models_default(fields, ours):
    defaults = {"temperature": 0.6, "top_k": 4, "max_tokens": 9}
    assert params_of(default_params=defaults, **fields) == SamplingParams(**ours)


def test_max_length_counts_each_prompts_own_tokens():
    long = {"a": tokens("x" * 30), "abcdef": tokens("y" * 30)}
    responses = Pipeline(scripted_engine(long))(list(long), max_length=8)
    assert [r.text for r in responses] == ["x" * 7, "yy"]
    assert [r.finish_reason for r in responses] == ["length", "length"]


def test_the_fields_do_what_they_say():
    answers = {"one": tokens("first ", "STOP", EOS, "more")}
    pipe = Pipeline(scripted_engine(answers))
    assert pipe("one")[0].text == "first STOP"
    assert pipe("one", stop="STOP")[0].text == "first "
    assert pipe("one", ignore_eos=True, max_new_tokens=12)[0].text == "first STOPmore"
    assert pipe("one", return_full_text=True)[0].text == "onefirst STOP"
    assert pipe("one", max_new_tokens=3)[0].text == "fir"
    assert pipe("one", min_new_tokens=10)[0].text.startswith("first STOPmo")


def test_do_sample_both_ways_on_a_model():
    pipe = Pipeline(tiny_engine(TOKENIZER))
    greedy = pipe(["abc"] * 2, do_sample=False, max_new_tokens=6, ignore_eos=True)
    assert greedy[0].token_ids == greedy[1].token_ids
    sampled = pipe(["abc"] * 2, do_sample=True, temperature=2.0, max_new_tokens=6, ignore_eos=True)
    assert sampled[0].token_ids != sampled[1].token_ids


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ({"stream": True}, TypeError, "there is no parameter 'stream': use stream()"),
        ({"streaming_fn": print}, TypeError, "there is no parameter 'streaming_fn': use stream()"),
        ({"min_length": 3}, TypeError, "there is no parameter 'min_length': use min_tokens"),
        ({"num_return_sequences": 3}, TypeError, "there is no parameter 'num_return_sequences': use n"),
        ({"num_beams": 3}, TypeError, "beam search is not supported"),
        ({"temprature": 3}, TypeError, "there is no parameter 'temprature'; there are allowed_token_ids, do_sample, "),
        ({"temprature": None}, TypeError, "there is no parameter 'temprature'"),
        ({"max_new_tokens": 3, "max_tokens": 3}, TypeError, "max_new_tokens and max_tokens are one parameter"),
        ({"min_new_tokens": 3, "min_tokens": 3}, TypeError, "min_new_tokens and min_tokens are one parameter"),
        ({"max_length": 3}, ValueError, "max_length=3 leaves no room after a prompt of 3 tokens"),
        ({"max_length": 9.5}, TypeError, "max_length=9.5 is float; it must be a whole number"),
        ({"max_length": True}, TypeError, "max_length=True is bool; it must be a whole number"),
        ({"do_sample": "no"}, TypeError, "do_sample='no' is str; it must be True or False"),
        ({"do_sample": False, "temperature": 0.5}, ValueError, "temperature=0.5 contradicts do_sample=False"),
        ({"do_sample": True, "temperature": 0}, ValueError, "temperature=0 contradicts do_sample=True"),
        ({"top_p": 0}, ValueError, "top_p=0 is out of range"),
    ],
)
def test_what_is_not_a_parameter_is_refused_with_the_name_to_use(fields, error, sentence):
    pipe = scripted_pipeline()
    with pytest.raises(error) as refused:
        pipe("one", **fields)
    assert sentence in str(refused.value)
    assert not pipe.engine.has_work


def test_the_names_offered_are_all_taken():
    with pytest.raises(TypeError) as refused:
        params_of(nonsense=1)
    offered = str(refused.value).split("there are ")[1].split(", ")
    assert {"max_length", "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "stop"} <= set(offered)
    for name in offered:
        assert params_of(**{name: None})


def test_destroy_frees_the_engine_and_a_later_call_says_so():
    pipe = scripted_pipeline()
    engine = weakref.ref(pipe.engine)
    pipe.destroy()
    pipe.destroy()
    assert engine() is None
    with pytest.raises(RuntimeError, match="this pipeline has been destroyed"):
        pipe("one")


def test_pipeline_loads_a_model_by_name_and_refuses_one_there_is_not():
    with pytest.raises(ValueError, match="no-such-model"):
        pipeline_by_name("./no-such-model")
    with pytest.raises(TypeError, match="EngineConfig has no field 'tensor_parralel'"):
        pipeline_by_name("./no-such-model", tensor_parralel=2)
