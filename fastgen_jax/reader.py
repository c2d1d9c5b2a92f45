"""`Reader`: a tokenizer's work for many threads, while another one runs the engine's steps."""

import copy
import functools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastgen_jax.intake import Intake, Messages, Prompt
from fastgen_jax.types import SamplingParams

_BAD = "\N{REPLACEMENT CHARACTER}"
_FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Reader:
    """Encodes and decodes as an engine's `intake` does, with a copy of its tokenizer.

    A transformers tokenizer is not safe to use from two threads: the engine's decodes what the steps generate, this
    one serves whoever asks, one at a time.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = copy.copy(intake)
        self._intake.tokenizer = copy.deepcopy(intake.tokenizer)
        self._lock = threading.Lock()
        self._bytes: dict[int, bytes] = {}

    def encode(self, prompt: Prompt | Messages) -> list[int]:
        """The token ids of a text, of a conversation through the chat template, or of token ids themselves.

        ValueError or TypeError for what is none of these, or has a token that the model has not.
        """
        with self._lock:
            if is_conversation(prompt):
                return self._intake.chat_prompt(cast(Messages, prompt))
            token_ids = self._intake.encode(cast(Prompt, prompt))
        self._check("the prompt", token_ids)
        return token_ids

    def text(self, prompt: Prompt, params: SamplingParams) -> str:
        """What `echo` puts in front of a response to `prompt`."""
        with self._lock:
            return self._intake.prompt_text(prompt, params)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; ValueError if there is no tokenizer or no such token."""
        self._check("tokens", token_ids)
        with self._lock:
            return self._decode(list(token_ids), skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for, which need not be whole characters."""
        if token_id not in self._bytes:
            with self._lock:
                self._bytes[token_id] = self._token_bytes(token_id)
        return self._bytes[token_id]

    def _token_bytes(self, token_id: int) -> bytes:
        # Behind a letter, for tokenizers drop the space that begins a text.
        letter = list(self._tokenizer.encode("a", add_special_tokens=False))
        text = self._decode([*letter, token_id])[len(self._decode(letter)) :]
        if _BAD not in text:
            return text.encode()
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if match := _FALLBACK_BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        bytes_of = _bytes_of_characters()
        return bytes(bytes_of[c] for c in name) if all(c in bytes_of for c in name) else text.encode()

    def _decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @property
    def _tokenizer(self) -> Any:
        if self._intake.tokenizer is None:
            raise ValueError("this engine has no tokenizer, so tokens have no text")
        return self._intake.tokenizer

    def _check(self, name: str, token_ids: Sequence[int]) -> None:
        last = self._intake.vocab_size - 1
        for token_id in token_ids:
            if not 0 <= token_id <= last:
                raise ValueError(f"{name} has the token id {token_id}; this model's are 0 to {last}")


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is messages rather than a text or token ids."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """The characters that a byte-level BPE vocabulary writes bytes with (GPT-2's table).

    Printable bytes of Latin-1 are their own characters; the others, in order, those from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
