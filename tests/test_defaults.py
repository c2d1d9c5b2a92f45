"""What an engine does for a request that brings no params: the model's generation_config.json is honoured."""

from pathlib import Path

import pytest
from scripted import TOKENIZER, run, scripted_engine, tokens
from tiny import tiny_engine

from fastgen_jax import SamplingParams, defaults, machine


@pytest.mark.parametrize(
    ("generation_config", "fields"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 4, "top_p": 0.9, "min_p": 0.1}, {}),
        ({"do_sample": None, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
        ),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "repetition_penalty": 1.1, "top_k": 4}, {"repetition_penalty": 1.1}),
        ({"do_sample": True, "repetition_penalty": 1.1}, {"temperature": 1.0, "repetition_penalty": 1.1}),
        ({"max_new_tokens": 2048}, {"max_tokens": 2048}),
        ({"max_length": 20, "bos_token_id": 1, "transformers_version": "5.0"}, {}),
    ],
)
def test_sampling_fields_of_a_generation_config(generation_config, fields):
    found = defaults.sampling(generation_config)
    assert found == fields
    assert SamplingParams(**found) == SamplingParams(**fields)


@pytest.mark.parametrize(
    ("sources", "eos"),
    [
        ([{"eos_token_id": 2}], (2,)),
        ([{"eos_token_id": [128001, 128009]}, {"eos_token_id": 2}], (128001, 128009)),
        ([{}, {"eos_token_id": 2}], (2,)),
        ([{"eos_token_id": None}, {"eos_token_id": 0}, {"eos_token_id": 3}], (0,)),
        ([{"eos_token_id": None}, {}], ()),
        ([], ()),
    ],
)
def test_eos_is_a_number_or_a_list_and_the_first_source_that_has_one_counts(sources, eos):
    assert defaults.eos_token_ids(*sources) == eos


def test_every_eos_of_a_list_ends_a_sequence():
    engine = scripted_engine({"a": tokens("x", 4, "y"), "b": tokens("y", 3, "z")}, eos_token_ids=(3, 4))
    assert [(r.text, r.finish_reason) for r in engine.generate(["a", "b"])] == [("x", "stop"), ("y", "stop")]


def test_an_engine_samples_by_its_default_params_only_where_a_request_brings_none():
    fields = defaults.sampling({"do_sample": True, "temperature": 2.0, "top_k": 50, "max_new_tokens": 6})
    engine = tiny_engine(TOKENIZER, default_params=fields)
    assert engine.default_params == SamplingParams(temperature=2.0, top_k=50, max_tokens=6)
    prompt = tokens("abc")
    sampled = engine.generate([prompt, prompt])
    assert sampled[0].token_ids != sampled[1].token_ids
    greedy = engine.generate([prompt, prompt], SamplingParams(max_tokens=6))
    assert greedy[0].token_ids == greedy[1].token_ids

    request_id = engine.add(prompt)
    assert len("".join(engine.stream(prompt))) <= 6
    assert run(engine)[request_id][0].num_generated_tokens <= 6


def test_the_compile_cache_is_in_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert machine.cache_dir() == Path("/somewhere/fastgen_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert machine.cache_dir() == Path.home() / ".cache" / "fastgen_jax"


def test_what_is_asked_for_and_not_supported_is_warned_of():
    with pytest.warns(UserWarning, match=r"asks for no_repeat_ngram_size=2, suppress_tokens=\[98\], which is not"):
        fields = defaults.sampling({"suppress_tokens": [98], "no_repeat_ngram_size": 2, "min_new_tokens": 3})
    assert fields == {"min_tokens": 3}


def test_what_is_switched_off_is_not_warned_of(recwarn):
    defaults.sampling({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None})
    assert not recwarn.list
