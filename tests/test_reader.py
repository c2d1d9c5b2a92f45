"""`Reader`: text to tokens and back for many threads, as the engine's own tokenizer does it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import NUM_TOKENS, SPECIAL, TOKENIZER, WORDS, scripted_engine, tokens
from tiny import EOS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastgen_jax import SamplingParams
from fastgen_jax.intake import Intake
from fastgen_jax.reader import Reader, is_conversation

CHAT = [{"role": "user", "content": "né"}]
quick = settings(max_examples=60, deadline=None)


def reader_of(tokenizer, vocab_size=NUM_TOKENS) -> Reader:
    return Reader(Intake(tokenizer, vocab_size, (EOS,), 256, 0))


@pytest.fixture(scope="module")
def reader() -> Reader:
    return reader_of(TOKENIZER)


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2's kind: ▁ for a space, one of which in front of a text is dropped, and tokens for single bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "the", "▁the"]
    vocab = {name: i for i, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# Text to tokens


@pytest.mark.parametrize("prompt", ["né 👍", [3, 5, NUM_TOKENS - 1], (7,)])
def test_prompts_are_what_the_engine_makes_of_them(reader, prompt):
    expected = list(TOKENIZER(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
    assert reader.encode(prompt) == expected


def test_a_conversation_goes_through_the_chat_template(reader):
    assert reader.encode(CHAT) == scripted_engine([]).chat_prompt(CHAT) == tokens(3, "n", "é".encode(), 4)


@pytest.mark.parametrize(
    ("prompt", "is_one"), [(CHAT, True), (tuple(CHAT), True), ("text", False), ([1, 2], False), ([], False)]
)
def test_a_conversation_is_a_list_of_messages(prompt, is_one):
    assert is_conversation(prompt) is is_one


@pytest.mark.parametrize("token_id", [-1, NUM_TOKENS])
def test_a_token_that_the_model_has_not_is_refused(reader, token_id):
    text = f"has the token id {token_id}; this model's are 0 to {NUM_TOKENS - 1}"
    with pytest.raises(ValueError, match=text):
        reader.encode([1, token_id])
    with pytest.raises(ValueError, match=text):
        reader.decode([1, token_id])


@pytest.mark.parametrize("prompt", [None, 3, [], ["a"], [1.5], "\ud83d"])
def test_what_is_no_prompt_is_refused(reader, prompt):
    with pytest.raises((TypeError, ValueError)):
        reader.encode(prompt)


# Tokens to text


@quick
@given(text=st.text(st.characters(codec="utf-8"), max_size=12))
def test_text_survives_there_and_back(reader, text):
    assert reader.decode(reader.encode(text) if text else []) == text


def test_special_tokens_are_shown_unless_they_are_skipped(reader):
    assert reader.decode(tokens(3, "x")) == "<|user|>x"
    assert reader.decode(tokens(3, "x"), skip_special_tokens=True) == "x"


@pytest.mark.parametrize(("prompt", "text"), [("<|user|>né", "<|user|>né"), (tokens(3, "né"), "né")])
def test_echo_is_the_prompts_text(reader, prompt, text):
    assert reader.text(prompt, SamplingParams(echo=True)) == text


def test_every_token_of_a_byte_level_vocabulary_has_its_bytes(reader):
    expected = [name.encode() for name in SPECIAL] + [bytes([byte]) for byte in range(256)]
    expected += [word.encode() for word in WORDS]
    assert [reader.token_bytes(token_id) for token_id in range(NUM_TOKENS)] == expected


@quick
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
def test_the_bytes_of_a_texts_tokens_are_its_own(reader, text):
    assert b"".join(map(reader.token_bytes, reader.encode(text))) == text.encode()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("▁the", b" the"),
        ("▁", b" "),
        ("the", b"the"),
        ("<0xF0>", b"\xf0"),
        ("<0x9F>", b"\x9f"),
        ("<0x0A>", b"\n"),
        ("<s>", b"<s>"),
    ],
)
def test_tokens_of_sentencepiece_keep_their_space_and_their_byte(sentencepiece, name, expected):
    reader = reader_of(sentencepiece, len(sentencepiece))
    assert reader.token_bytes(sentencepiece.convert_tokens_to_ids(name)) == expected


def test_a_token_of_the_model_that_the_tokenizer_has_not_has_no_bytes(sentencepiece):
    assert reader_of(sentencepiece, 1000).token_bytes(999) == b""


# Threads, and engines without text


def test_many_threads_at_once_get_what_one_would(reader):
    prompts = [f"prompt {i} né " * 50 for i in range(64)]
    expected = [list(TOKENIZER(prompt)["input_ids"]) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(reader.encode, prompts))
        assert encoded == expected
        assert list(pool.map(reader.decode, encoded)) == prompts


def test_an_engine_has_one_reader_with_a_tokenizer_of_its_own():
    engine = scripted_engine([])
    assert engine.reader is engine.reader
    assert vars(vars(engine.reader)["_intake"])["tokenizer"] is not engine.tokenizer


def test_without_a_tokenizer_there_are_token_ids_only():
    reader = reader_of(None)
    assert reader.encode([1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="has no tokenizer"):
        reader.encode("text")
    for read in (lambda: reader.decode([1]), lambda: reader.token_bytes(1)):
        with pytest.raises(ValueError, match="has no tokenizer, so tokens have no text"):
            read()
