"""What FastGen (DeepSpeed-MII) gets wrong, one test for each failure, and what an engine owes beside."""

import pytest
from scripted import FIRST_BYTE, NUM_TOKENS, TOKENIZER, assert_idle, run, scripted_engine, tokens
from tiny import EOS, tiny_engine

from fastgen_jax import SamplingParams

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


@pytest.fixture(scope="module")
def model_engine():
    """The tiny model, where what it samples matters. Every test leaves it idle."""
    engine = tiny_engine(TOKENIZER)
    yield engine
    assert_idle(engine)


@BOTH_LOOPS
def test_prompt_larger_than_the_pool_is_refused_and_the_others_are_unharmed(overlap):
    engine = scripted_engine(tokens("fine"), num_blocks=4, block_size=4, overlap=overlap)
    before = engine.add("abc")
    engine.step()
    with pytest.raises(ValueError, match="13 tokens; max_model_len=13 allows at most 12"):
        engine.add("a" * 13)
    after = engine.add("de")
    found = run(engine)
    assert [found[before][0].text, found[after][0].text] == ["fine", "fine"]
    assert_idle(engine)


@BOTH_LOOPS
def test_text_that_outgrows_the_pool_ends_with_length(overlap):
    engine = scripted_engine(tokens("x" * 50), num_blocks=4, block_size=4, overlap=overlap)
    (response,) = engine.generate("abc", SamplingParams(max_tokens=None))
    assert (response.text, response.finish_reason) == ("x" * 10, "length")
    assert_idle(engine)


@BOTH_LOOPS
def test_head_that_does_not_fit_when_the_last_running_request_ends_waits_and_runs(overlap):
    """Two 20-token prompts and a pool of 8 blocks of 4: FastGen's engine thread dies of an assertion."""
    answers = {"a" * 20: tokens("first"), "b" * 20: tokens("second")}
    engine = scripted_engine(answers, num_blocks=9, block_size=4, overlap=overlap)
    responses = engine.generate(list(answers))
    assert [r.text for r in responses] == ["first", "second"]
    assert_idle(engine)


def test_mixed_sampling_parameters_in_one_batch_give_the_tokens_of_each_alone(model_engine):
    every = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.3, seed=2),
        SamplingParams(temperature=1.0, top_k=5, seed=3),
        SamplingParams(temperature=1.0, top_p=0.8, min_p=0.01, seed=4),
        SamplingParams(stop="e"),
        SamplingParams(stop=["q", "z", "#"]),
        SamplingParams(stop=["t"], temperature=1.0, seed=2**63 - 1),
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5),
        SamplingParams(logit_bias={FIRST_BYTE + ord("e"): 5.0}, min_tokens=3, stop="e"),
        SamplingParams(allowed_token_ids=tokens("abc"), ignore_eos=True),
        SamplingParams(stop_token_ids=tokens("a"), skip_special_tokens=False),
    ]
    every = [params.replace(max_tokens=10) for params in every]
    prompts = [f"prompt number {i}" for i in range(len(every))]
    together = model_engine.generate(prompts, every)
    alone = [model_engine.generate(p, params)[0] for p, params in zip(prompts, every, strict=True)]
    assert [(r.token_ids, r.text, r.finish_reason) for r in together] == [
        (r.token_ids, r.text, r.finish_reason) for r in alone
    ]
    assert len({r.token_ids for r in together}) > len(every) // 2


def test_min_tokens_counts_generated_tokens_not_the_prompt(model_engine):
    """The prompt alone is longer than min_tokens, and the model would end at once."""
    wants_eos = SamplingParams(max_tokens=20, logit_bias={EOS: 1e6})
    (at_once,) = model_engine.generate("eight by", wants_eos)
    (later,) = model_engine.generate("eight by", wants_eos.replace(min_tokens=5))
    assert at_once.token_ids == (EOS,)
    assert len(later.token_ids) == 6
    assert later.token_ids.index(EOS) == 5


@BOTH_LOOPS
def test_min_tokens_holds_for_stop_strings_too(overlap):
    engine = scripted_engine(tokens("a.b.c.d."), overlap=overlap)
    (response,) = engine.generate("a long prompt", SamplingParams(stop=".", min_tokens=5))
    assert (response.text, response.finish_reason) == ("a.b.c", "stop")


@BOTH_LOOPS
def test_stop_and_eos_each_end_the_text_where_both_are_set(overlap):
    answers = {
        "stop first": tokens("one", "STOP", "more", EOS, "never"),
        "eos first": tokens("two", EOS, "never", "STOP"),
        "eos ignored": tokens("three", EOS, "more", "STOP", "never"),
    }
    engine = scripted_engine(answers, overlap=overlap)
    params = SamplingParams(stop="STOP")
    responses = engine.generate(list(answers), [params, params, params.replace(ignore_eos=True)])
    assert [r.text for r in responses] == ["one", "two", "threemore"]
    assert [r.finish_reason for r in responses] == ["stop"] * 3
    assert [len(r.token_ids) for r in responses] == [4, 4, 11]
    assert_idle(engine)


@BOTH_LOOPS
@pytest.mark.parametrize(
    ("answer", "stop", "text", "num_tokens"),
    [
        (tokens("ab", "STOP", "cd"), "STOP", "ab", 3),
        (tokens("ab", "ST", "OP", "cd"), "STOP", "ab", 4),
        (tokens("ab", "ST", b"O", b"P", "cd"), "STOP", "ab", 5),
        (tokens("ab", b"STOP", "cd"), "STOP", "ab", 6),
        (tokens("ab", "ST", "OPEN", "cd"), "STOP", "ab", 4),
        (tokens("ab", "OPEN", "STOP"), "EN", "abOP", 3),
        (tokens("ab", "ST", " the", "ST", "OP"), "STOP", "abST the", 6),
        (tokens("a long story. The end. More"), "The end.", "a long story. ", 22),
        (tokens("né", "👍", "x"), "é👍", "n", 2),
        (tokens("n", b"\xc3", b"\xa9", "x"), "é", "n", 3),
        (tokens("ab", "STOP"), ["OPERA", "TOP", "b"], "a", 2),
    ],
)
def test_stop_strings_of_many_tokens_and_across_tokens(answer, stop, text, num_tokens, overlap):
    engine = scripted_engine(answer, overlap=overlap)
    (response,) = engine.generate("x", SamplingParams(stop=stop))
    assert (response.text, response.finish_reason) == (text, "stop")
    assert len(response.token_ids) == num_tokens
    assert "".join(engine.stream("x", SamplingParams(stop=stop))) == text
    assert_idle(engine)


def test_no_special_token_leaks_into_streamed_text():
    answer = tokens("<s> is text. ", 1, "Hi", 3, 4, " you", 0, EOS)
    engine = scripted_engine(answer)
    assert list(engine.stream("x", SamplingParams())) == [*"<s> is text. Hi you"]
    shown = SamplingParams(skip_special_tokens=False)
    assert "".join(engine.stream("x", shown)) == "<s> is text. <s>Hi<|user|><|assistant|> you<pad>"


@BOTH_LOOPS
def test_preempted_requests_keep_text_pieces_and_counts(overlap):
    answers = {c * 10: tokens(f"{c} says ", "né", "👍", b" and more" * 3, "STOP") for c in "abcdef"}
    engine = scripted_engine(answers, num_blocks=20, block_size=4, overlap=overlap)
    pieces: dict[str, list[str]] = {prompt: [] for prompt in answers}
    params = SamplingParams(stop="STOP")
    ids = {prompt: engine.add(prompt, params, on_piece=pieces[prompt].append) for prompt in answers}
    found = run(engine)
    responses = [found[request_id][0] for request_id in ids.values()]
    assert sum(r.num_preemptions for r in responses) == engine.stats().preemptions > 0
    for prompt, response in zip(answers, responses, strict=True):
        assert response.text == f"{prompt[0]} says né👍{' and more' * 3}"
        assert "".join(pieces[prompt]) == response.text
        assert response.token_ids == tuple(answers[prompt])
        assert response.prompt_token_ids == tuple(tokens(prompt))
        assert (response.num_prompt_tokens, response.num_generated_tokens) == (10, len(answers[prompt]))
    assert engine.stats().generated_tokens == sum(map(len, answers.values()))
    assert_idle(engine)


@BOTH_LOOPS
def test_preempted_request_goes_back_to_the_front_of_the_queue(overlap):
    """FastGen appends it behind every waiting prompt."""
    engine = scripted_engine(tokens("x" * 15), num_blocks=6, block_size=4, max_num_seqs=2, overlap=overlap)
    ids = [engine.add("abcd", SamplingParams()) for _ in range(6)]
    found = run(engine)
    assert found[ids[1]][0].num_preemptions > 0
    assert list(found) == ids
    assert_idle(engine)


BAD_PROMPTS = [
    ([NUM_TOKENS], ValueError, f"the prompt has the token id {NUM_TOKENS}; this model's are 0 to"),
    ([-1], ValueError, "the prompt has the token id -1"),
    ([10**12], ValueError, "the prompt has the token id 1000000000000"),
    ("x" * 300, ValueError, "300 tokens; max_model_len=256 allows at most 255"),
    ("", ValueError, "empty"),
    ([], TypeError, "a prompt is a string or a list of token ids, not []"),
    (b"abc", TypeError, "a prompt is a string or a list of token ids, not b'abc'"),
    (["abc"], TypeError, "a prompt is a string or a list of token ids, not ['abc']"),
    (5, TypeError, "a prompt is a string or a list of token ids, not 5"),
    (None, TypeError, "a prompt is a string or a list of token ids, not None"),
]


@pytest.mark.parametrize(("prompt", "error", "sentence"), BAD_PROMPTS, ids=lambda value: repr(value)[:20])
def test_a_bad_prompt_raises_one_sentence_and_leaves_the_others_unchanged(prompt, error, sentence):
    engine = scripted_engine(tokens("fine"))
    wanted = engine.add("abc")
    engine.step()
    with pytest.raises(error) as refused:
        engine.add(prompt)
    assert sentence in str(refused.value)
    with pytest.raises(error):
        engine.generate(["good", prompt])
    with pytest.raises(error):
        list(engine.stream(prompt))
    found = run(engine)
    assert list(found) == [wanted]
    assert found[wanted][0].text == "fine"
    assert_idle(engine)


def test_params_of_the_wrong_type_or_number_raise_one_sentence():
    engine = scripted_engine(tokens("fine"))
    with pytest.raises(TypeError, match="is dict; it must be SamplingParams"):
        engine.add("abc", {"max_tokens": 3})
    with pytest.raises(ValueError, match="1 params for 2 prompts; give one, or one for each"):
        engine.generate(["a", "b"], [SamplingParams()])
    assert_idle(engine)


@BOTH_LOOPS
def test_blocks_are_free_as_soon_as_the_response_is_there(overlap):
    answers = {"a" * 9: tokens("short"), "b" * 9: tokens("rather longer")}
    engine = scripted_engine(answers, block_size=4, overlap=overlap)
    for prompt in answers:
        engine.add(prompt)
    free_at_end = []
    while engine.has_work:
        if engine.step():
            free_at_end.append(engine.stats().free_blocks)
    assert free_at_end[0] > engine.stats().blocks - 7  # those of the longer one alone
    assert free_at_end[1] == engine.stats().blocks


@BOTH_LOOPS
def test_abandoned_stream_frees_its_blocks(overlap):
    engine = scripted_engine(tokens("x" * 100), overlap=overlap)
    stream = engine.stream("abc", SamplingParams(max_tokens=None))
    assert next(stream) == "x"
    assert engine.stats().free_blocks < engine.stats().blocks
    stream.close()
    assert_idle(engine)
    assert run(engine) == {}


@pytest.mark.parametrize("seed", [None, 7])
def test_n_samples_are_those_of_seeds_seed_plus_i(model_engine, seed):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=seed, n=3, ignore_eos=True)
    samples = model_engine.generate(["one", "two"], params)
    assert [r.index for r in samples] == [0, 1, 2, 0, 1, 2]
    assert [r.prompt_token_ids for r in samples] == [tuple(tokens(p)) for p in ["one"] * 3 + ["two"] * 3]
    assert len({r.token_ids for r in samples}) == 6
    if seed is not None:
        single = [model_engine.generate("one", params.replace(n=1, seed=seed + i))[0] for i in range(3)]
        assert [r.token_ids for r in samples[:3]] == [r.token_ids for r in single]


@BOTH_LOOPS
def test_n_samples_end_apart_and_are_aborted_together(overlap):
    engine = scripted_engine(lambda seq, i: EOS if i == 3 * (seq.seq_id + 1) else tokens("x")[0], overlap=overlap)
    (first, *others) = engine.generate("abc", SamplingParams(n=3))
    assert [r.text for r in (first, *others)] == ["xxx", "xxxxxx", "xxxxxxxxx"]
    request_id = engine.add("abc", SamplingParams(n=2, max_tokens=100))
    for _ in range(3):
        engine.step()
    assert engine.abort(request_id)
    assert not engine.abort(request_id)
    assert [(r.index, r.finish_reason) for r in run(engine)[request_id]] == [(0, "abort"), (1, "abort")]
    assert_idle(engine)


def test_a_request_added_while_others_run_gets_its_own_tokens(model_engine):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["the first", "a second one, somewhat longer than a step", "third"]
    alone = [model_engine.generate(prompt, params)[0].token_ids for prompt in prompts]
    ids = []
    found = {}
    for prompt in prompts:
        ids.append(model_engine.add(prompt, params))
        for _ in range(3):
            found |= {r.request_id: r.token_ids for r in model_engine.step()}
    found |= {request_id: r.token_ids for request_id, (r,) in run(model_engine).items()}
    assert [found[request_id] for request_id in ids] == alone


@BOTH_LOOPS
def test_an_exception_of_on_piece_aborts_its_request_and_harms_no_other(overlap):
    answers = {"a": tokens("one two"), "b": tokens("OPEN", " the", " the"), "c": tokens("four")}
    engine = scripted_engine(answers, overlap=overlap)
    pieces: dict[str, list[str]] = {prompt: [] for prompt in answers}

    def fussy(piece: str) -> None:
        pieces["b"].append(piece)
        raise KeyError(piece)

    callbacks = {"a": pieces["a"].append, "b": fussy, "c": pieces["c"].append}
    params = SamplingParams(stop="NX")  # holds back the N of OPEN, which a callback that raised does not get
    ids = {prompt: engine.add(prompt, params, on_piece=callbacks[prompt]) for prompt in answers}
    found, num_raised = {}, 0
    while engine.has_work:
        try:
            found |= {r.request_id: r for r in engine.step()}
        except KeyError:
            num_raised += 1
    assert num_raised == 1
    assert [found[ids[p]].finish_reason for p in answers] == ["stop", "abort", "stop"]
    assert [found[ids[p]].text for p in answers] == ["one two", "OPEN", "four"]
    assert {p: "".join(pieces[p]) for p in answers} == {"a": "one two", "b": "OPE", "c": "four"}
    assert_idle(engine)


@BOTH_LOOPS
def test_no_response_is_lost_in_a_step_whose_last_pieces_raise(overlap):
    engine = scripted_engine(tokens("x"), overlap=overlap)

    def refuse(piece: str) -> None:
        raise ValueError(piece)

    ids = [engine.add("abc", SamplingParams(max_tokens=1), on_piece=refuse) for _ in range(3)]
    found, num_raised = [], 0
    while engine.has_work:
        try:
            found += engine.step()
        except ValueError:
            num_raised += 1
    assert num_raised == 3
    assert [(r.request_id, r.text, r.finish_reason) for r in found] == [(i, "x", "length") for i in ids]
    assert_idle(engine)


@BOTH_LOOPS
def test_on_piece_may_abort_its_own_and_another_request_and_add_one(overlap):
    engine = scripted_engine(tokens("abcdef"), overlap=overlap)
    added: list[int] = []

    def on_piece(piece: str) -> None:
        if piece == "c":
            added.append(engine.add("new"))
            assert engine.abort(mine)
            assert engine.abort(other)

    mine = engine.add("mine", on_piece=on_piece)
    other = engine.add("other")
    found = {request_id: r.text for request_id, (r,) in run(engine).items()}
    assert found[mine] == "abc"
    assert found[other] == "abc"
    assert found[added[0]] == "abcdef"
    assert_idle(engine)


@BOTH_LOOPS
@pytest.mark.parametrize("at", ["dispatch", "fetch"])
def test_a_step_that_fails_aborts_every_request_and_leaves_a_usable_engine(at, overlap):
    engine = scripted_engine(tokens("abcdef"), overlap=overlap)
    runner = vars(engine)["_runner"]
    ids = [engine.add("one"), engine.add("two", SamplingParams(n=2))]
    for _ in range(3):
        engine.step()
    runner.broken[at] = OSError("the device is gone")
    with pytest.raises(OSError, match="the device is gone"):
        for _ in range(2):  # the overlapped loop fetches what the step before has dispatched
            engine.step()
    assert_idle(engine)
    runner.broken.clear()
    found = run(engine)
    assert {i: [r.finish_reason for r in found[i]] for i in ids} == {ids[0]: ["abort"], ids[1]: ["abort"] * 2}
    assert engine.generate("again")[0].text == "abcdef"


@BOTH_LOOPS
def test_generate_that_fails_leaves_no_response_behind(overlap):
    engine = scripted_engine(tokens("abcdef"), overlap=overlap)
    other = engine.add("other")
    runner = vars(engine)["_runner"]
    runner.broken["dispatch"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["one", "two"])
    runner.broken.clear()
    assert list(run(engine)) == [other]
    assert_idle(engine)
