"""Streamed pieces: joined they are the response's text, whatever the tokens, the loop and the company."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import NUM_TOKENS, SPECIAL, TOKENIZER, WORDS, assert_idle, run, scripted_engine, tokens
from tiny import EOS, tiny_engine

from fastgen_jax import SamplingParams
from fastgen_jax.types import Delta, Response

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
TEXTS = [
    "👨‍👩‍👧‍👦 is one family",
    "🇫🇷🇯🇵🏳️‍🌈",
    "👍🏽 done",
    "漢字かな交じり文。",
    "नमस्ते क्षि",
    "e\u0301u\u0308\u0323 \u0301",
    "\N{REPLACEMENT CHARACTER} is a character too",
    "plain text\n\n  with blanks ",
]
STOPS = ["STOP", "OP", "👍", "🇯🇵", "\u0301", "字", " the", "e", "OPEN"]
snippets = st.sampled_from(TEXTS) | st.text(max_size=4) | st.sampled_from(WORDS)
texts = st.lists(snippets, max_size=5).map("".join)
quick = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def engine(request):
    """Says what `say` gave it; idle between two tests."""
    engine = scripted_engine([], num_blocks=200, block_size=4, overlap=request.param)
    yield engine
    assert_idle(engine)


def say(engine, token_ids: list[int]) -> None:
    """Let every prompt be answered `token_ids` and EOS."""
    runner = vars(engine)["_runner"]
    runner.script = lambda seq, index: token_ids[index] if index < len(token_ids) else EOS


def stream_and_response(engine, prompt, params: SamplingParams) -> tuple[list[str], str]:
    """The pieces that on_piece and `stream` give, which must be the same, and the response's text."""
    pieces: list[str] = []
    request_id = engine.add(prompt, params, on_piece=pieces.append)
    text = run(engine)[request_id][0].text
    assert list(engine.stream(prompt, params)) == pieces
    return pieces, text


def encoded_randomly(data: st.DataObject, text: str) -> list[int]:
    """Tokens for `text`: words where they stand or single bytes, as drawn."""
    ids: list[int] = []
    while text:
        word = next((w for w in WORDS if text.startswith(w) and data.draw(st.booleans())), None)
        ids += tokens(word if word is not None else text[0].encode())
        text = text[len(word or " ") :]
    return ids


@quick
@given(data=st.data(), text=texts)
def test_pieces_are_the_text_under_any_tokenisation(engine, data, text):
    token_ids = encoded_randomly(data, text)
    say(engine, token_ids)
    pieces, response = stream_and_response(engine, "x", SamplingParams(max_tokens=None))
    assert "".join(pieces) == response == text
    assert "" not in pieces
    # A flag or a family is several characters, but none of those ever comes in halves.
    assert ("\N{REPLACEMENT CHARACTER}" in response) == ("\N{REPLACEMENT CHARACTER}" in text)


@quick
@given(token_ids=st.lists(st.integers(0, NUM_TOKENS - 1).filter(lambda i: i != EOS), max_size=30), skip=st.booleans())
def test_pieces_are_the_text_of_any_tokens_valid_utf8_or_not(engine, token_ids, skip):
    say(engine, token_ids)
    pieces, response = stream_and_response(engine, "x", SamplingParams(skip_special_tokens=skip))
    words = [name.encode() for name in ([""] * len(SPECIAL) if skip else SPECIAL)]
    words += [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    assert "".join(pieces) == response == b"".join(words[i] for i in token_ids).decode(errors="replace")


@quick
@given(data=st.data(), text=texts, stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3), include=st.booleans())
def test_pieces_end_at_the_first_stop_string(engine, data, text, stop, include):
    say(engine, encoded_randomly(data, text))
    params = SamplingParams(max_tokens=None, stop=stop, include_stop_str_in_output=include)
    pieces, response = stream_and_response(engine, "x", params)
    ends = [(text.index(s) + len(s), -len(s)) for s in stop if s in text]
    end, minus_length = min(ends, default=(len(text), 0))
    assert "".join(pieces) == response == text[: end if include else end + minus_length]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("flag", ["echo", "return_full_text"])
@pytest.mark.parametrize(
    ("prompt", "skipped", "shown"),
    [("<|user|>né", "<|user|>né", "<|user|>né"), (tokens(3, "né"), "né", "<|user|>né"), (tokens(3), "", "<|user|>")],
)
def test_echo_is_in_the_text_and_not_in_the_pieces(engine, prompt, skipped, shown, flag, skip):
    say(engine, tokens("👍", "!"))
    params = SamplingParams(skip_special_tokens=skip, **{flag: True})
    pieces, response = stream_and_response(engine, prompt, params)
    assert pieces == ["👍", "!"]
    assert response == (skipped if skip else shown) + "👍!"


def test_a_piece_holds_back_no_more_than_the_start_of_a_stop_string(engine):
    say(engine, tokens("a", "ST", "x", "S", b"TO", "👍", "ST"))
    pieces, response = stream_and_response(engine, "x", SamplingParams(stop="STOP"))
    assert pieces == ["a", "STx", "STO👍", "ST"]
    assert response == "aSTxSTO👍ST"


@pytest.mark.parametrize("max_tokens", [3, 10], ids=["at max_tokens", "at EOS"])
def test_an_unfinished_character_comes_out_at_the_end(engine, max_tokens):
    say(engine, tokens("a", "👍".encode()[:2]))
    pieces, response = stream_and_response(engine, "x", SamplingParams(max_tokens=max_tokens))
    assert pieces == ["a", "\N{REPLACEMENT CHARACTER}"]
    assert response == "a\N{REPLACEMENT CHARACTER}"


def test_text_held_back_is_streamed_when_a_request_is_aborted(engine):
    say(engine, tokens("a", "ST", *[0] * 50))
    pieces: list[str] = []
    request_id = engine.add("x", SamplingParams(stop="STOP"), on_piece=pieces.append)
    for _ in range(10):
        engine.step()
    assert pieces == ["a"]
    assert engine.abort(request_id)
    assert pieces == ["a", "ST"]
    assert run(engine)[request_id][0].text == "aST"


ANSWERS = {
    "streamed": tokens("one two three"),
    "short": tokens("a"),
    "long": tokens("b" * 40),
    "other": tokens("4" * 9),
}


@BOTH_LOOPS
def test_responses_of_others_that_end_during_a_stream_come_from_step_once_each(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)
    ids = {prompt: engine.add(prompt) for prompt in ["short", "long", "other"]}
    assert "".join(engine.stream("streamed")) == "one two three"
    assert engine.has_work
    found = run(engine)
    assert {p: [r.text for r in found[ids[p]]] for p in ids} == {"short": ["a"], "long": ["b" * 40], "other": ["4" * 9]}
    assert len(found) == 3
    assert_idle(engine)


@BOTH_LOOPS
def test_step_between_two_pieces_returns_what_has_ended_and_takes_no_piece_away(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)
    stream = engine.stream("streamed")
    pieces = [next(stream)]
    short = engine.add("short")
    found = run(engine)
    assert found[short][0].text == "a"
    assert "".join([*pieces, *stream]) == "one two three"
    assert_idle(engine)


@BOTH_LOOPS
def test_interleaved_streams_get_their_own_pieces_and_leave_nothing_behind(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)
    streams = {prompt: engine.stream(prompt) for prompt in ANSWERS}
    texts = dict.fromkeys(ANSWERS, "")
    while streams:
        for prompt, stream in list(streams.items()):
            piece = next(stream, None)
            if piece is None:
                del streams[prompt]
            else:
                texts[prompt] += piece
    assert texts == {"streamed": "one two three", "short": "a", "long": "b" * 40, "other": "4" * 9}
    assert run(engine) == {}
    assert_idle(engine)


@BOTH_LOOPS
def test_leaving_a_stream_early_leaves_the_others_running(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)
    ids = [engine.add(prompt) for prompt in ["short", "long"]]
    for piece in engine.stream("streamed"):
        if piece == "t":
            break
    found = run(engine)
    assert {i: found[i][0].text for i in ids} == {ids[0]: "a", ids[1]: "b" * 40}
    assert len(found) == 2
    assert_idle(engine)


@BOTH_LOOPS
def test_generate_while_others_are_in_flight_returns_its_own_only(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)
    ids = {prompt: engine.add(prompt) for prompt in ["short", "long"]}
    stream = engine.stream("streamed")
    pieces = [next(stream)]
    responses = engine.generate(["other", "short", "other"])
    assert [r.text for r in responses] == ["4" * 9, "a", "4" * 9]
    assert "".join([*pieces, *stream]) == "one two three"
    found = run(engine)
    assert {p: [r.text for r in found[ids[p]]] for p in ids} == {"short": ["a"], "long": ["b" * 40]}
    assert len(found) == 2
    assert_idle(engine)


@BOTH_LOOPS
def test_a_stream_ends_when_its_request_is_aborted_elsewhere(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)
    stream = engine.stream("long")
    pieces = [next(stream) for _ in range(3)]
    (request_id,) = vars(engine)["_requests"]
    engine.abort(request_id)
    assert "".join([*pieces, *stream]) == "bbb"
    assert run(engine) == {}
    assert_idle(engine)


def test_a_stream_that_is_never_begun_costs_nothing():
    engine = scripted_engine(ANSWERS)
    engine.stream("long")
    assert not engine.has_work


def test_what_cannot_be_streamed_is_refused():
    engine = scripted_engine(ANSWERS)
    with pytest.raises(ValueError, match="n=2 samples cannot be streamed as one text"):
        next(engine.stream("short", SamplingParams(n=2)))
    silent = scripted_engine(tokens("a"), tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer, so there is no text to stream"):
        next(silent.stream([5]))
    assert not engine.has_work and not silent.has_work


def test_a_stream_dropped_in_the_middle_of_a_step_is_aborted_after_it(monkeypatch):
    """As when the garbage collector finds it there."""
    engine = scripted_engine(tokens("a long answer") * 10)
    stream = engine.stream("one", SamplingParams(max_tokens=50))
    assert next(stream)
    other = engine.add("two", SamplingParams(max_tokens=20))
    schedule = vars(engine)["_scheduler"].schedule

    def schedule_then_collect():
        plan = schedule()
        stream.close()
        return plan

    monkeypatch.setattr(vars(engine)["_scheduler"], "schedule", schedule_then_collect)
    found = run(engine)
    assert list(found) == [other]
    assert_idle(engine)


def test_put_takes_in_what_an_abandoned_stream_left_behind():
    engine = tiny_engine(TOKENIZER)
    stream = engine.stream("one", SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    assert engine.put([1], [[1]]).shape[0] == 1


# Deltas: text, tokens and log-probabilities of every sample


def deltas_and_responses(engine, prompt, params: SamplingParams) -> tuple[list[Delta], list[Response]]:
    deltas: list[Delta] = []
    request_id = engine.add(prompt, params, on_delta=deltas.append)
    return deltas, run(engine)[request_id]


def assert_joined(deltas: list[Delta], responses: list[Response]) -> None:
    """Each sample's deltas are its response, and none of them is empty."""
    assert {delta.index for delta in deltas} <= {response.index for response in responses}
    for response in responses:
        mine = [delta for delta in deltas if delta.index == response.index]
        assert all(delta.text or delta.token_ids for delta in mine)
        assert "".join(delta.text for delta in mine) == response.text
        assert tuple(i for delta in mine for i in delta.token_ids) == response.token_ids
        if response.logprobs is None:
            assert {delta.logprobs for delta in mine} <= {None}
        else:
            assert all(len(delta.logprobs) == len(delta.token_ids) for delta in mine)
            assert tuple(entry for delta in mine for entry in delta.logprobs) == response.logprobs


@quick
@given(
    data=st.data(),
    answers=st.lists(texts, min_size=1, max_size=3),
    stop=st.lists(st.sampled_from(STOPS), max_size=3),
    max_tokens=st.integers(1, 40),
)
def test_deltas_of_every_sample_are_its_response(engine, data, answers, stop, max_tokens):
    scripts = [encoded_randomly(data, text) for text in answers]

    def script(seq, index):
        answer = scripts[seq.seq_id % len(scripts)]
        return answer[index] if index < len(answer) else EOS

    vars(engine)["_runner"].script = script
    params = SamplingParams(n=len(answers), max_tokens=max_tokens, stop=stop)
    deltas, responses = deltas_and_responses(engine, "x", params)
    assert [response.index for response in sorted(responses, key=lambda r: r.index)] == list(range(len(answers)))
    assert_joined(deltas, responses)


@BOTH_LOOPS
def test_deltas_bring_log_probabilities(overlap):
    engine = tiny_engine(TOKENIZER, overlap=overlap)
    params = SamplingParams(n=2, max_tokens=9, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    deltas, responses = deltas_and_responses(engine, "hello", params)
    assert [len(response.logprobs) for response in responses] == [9, 9]
    assert_joined(deltas, responses)


@BOTH_LOOPS
def test_deltas_of_preempted_requests_repeat_nothing(overlap):
    engine = scripted_engine(tokens("z" * 60), num_blocks=14, block_size=4, max_model_len=48, overlap=overlap)
    deltas: dict[int, list[Delta]] = {}
    for number in range(4):
        told: list[Delta] = []
        deltas[engine.add(f"prompt {number}", SamplingParams(max_tokens=30), on_delta=told.append)] = told
    found = run(engine)
    assert engine.stats().preemptions > 0
    for request_id, told in deltas.items():
        assert_joined(told, found[request_id])


@BOTH_LOOPS
def test_an_aborted_requests_deltas_have_all_of_its_text_and_tokens(overlap):
    engine = scripted_engine(tokens("a", "ST", *[0] * 50), overlap=overlap)
    deltas: list[Delta] = []
    request_id = engine.add("x", SamplingParams(stop="STOP", n=2), on_delta=deltas.append)
    for _ in range(8):
        engine.step()
    assert "".join(delta.text for delta in deltas if delta.index == 1) == "a"
    engine.abort(request_id)
    responses = run(engine)[request_id]
    assert [(r.text, r.finish_reason) for r in responses] == [("aST", "abort")] * 2
    assert_joined(deltas, responses)
    assert_idle(engine)


@BOTH_LOOPS
def test_without_a_tokenizer_deltas_have_tokens_only(overlap):
    engine = scripted_engine(tokens("abc"), tokenizer=None, overlap=overlap)
    deltas, responses = deltas_and_responses(engine, [5], SamplingParams())
    assert_joined(deltas, responses)
    assert [delta.text for delta in deltas] == [""] * 4  # EOS is a token too
    assert responses[0].token_ids == (*tokens("abc"), EOS)


def test_a_step_brings_a_delta_to_each_sample_that_got_a_token(engine):
    say(engine, tokens("abc"))
    deltas: list[Delta] = []
    engine.add("x", SamplingParams(n=2), on_delta=deltas.append)
    seen = []
    while engine.has_work:
        engine.step()
        seen.append([(delta.index, delta.text) for delta in deltas])
        deltas.clear()
    assert [each for each in seen if each] == [[(0, c), (1, c)] for c in ["a", "b", "c", ""]]


def test_what_is_told_is_told_one_way():
    with pytest.raises(TypeError, match="give one of them"):
        scripted_engine(ANSWERS).add("short", on_piece=print, on_delta=print)


@BOTH_LOOPS
def test_an_on_delta_that_raises_ends_its_request_and_no_other(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)
    told: list[Delta] = []

    def fail(delta):
        raise OSError("the reader has gone")

    doomed = engine.add("long", on_delta=fail)
    other = engine.add("streamed", on_delta=told.append)
    with pytest.raises(OSError, match="the reader has gone"):
        run(engine)
    found = run(engine)
    assert found[doomed][0].finish_reason == "abort"
    assert found[other][0].text == "one two three"
    assert_joined(told, found[other])
    assert_idle(engine)


def test_a_prompt_whose_tokens_are_known_is_not_read_again(engine):
    say(engine, tokens("!"))
    request_id = engine.add("shown by echo", SamplingParams(echo=True), token_ids=tokens("other"))
    response = run(engine)[request_id][0]
    assert response.prompt_token_ids == tuple(tokens("other"))
    assert response.text == "shown by echo!"
