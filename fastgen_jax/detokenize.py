"""Generated tokens to text, a piece at a time, cut at stop strings: `Detokenizer`."""

import re
from collections.abc import Sequence
from typing import Any

_BAD = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes an unfinished character to
_MAX_UTF8 = 4  # bytes, and so tokens, that one character takes at most
_FALLBACK_BYTE = re.compile("<0x([89A-F][0-9A-F])>")


class Detokenizer:
    """The text of one sample, as its tokens come.

    The text is what the generated tokens add to the prompt's: `decode(prompt + generated)` after its
    longest common prefix with `decode(prompt)`, so a leading space stays, and a character that the
    prompt leaves unfinished belongs to the tokens that finish it. One thing differs from decoding the
    whole: a run of byte-fallback tokens that is not valid UTF-8 keeps its valid characters, and only the
    other bytes become U+FFFD each, where `decode` would take back characters already streamed.

    The pieces that `take_piece` hands out, joined, are the final text exactly. A piece never ends inside a
    character, nor in what may still turn out to be the start of a stop string. A push costs a decode of
    a few tokens, however long the text is.

    tokenizer: a transformers fast tokenizer (`encode`, `decode` and `convert_ids_to_tokens` are used).
    prompt_token_ids: only its end is looked at; stop strings are sought in generated text alone.
    stop: non-empty strings. The text ends at the one whose last character comes first, at the longest of
        those that end there together, so that it does not depend on where the tokens part.
    include_stop_str_in_output: end the text after the stop string or stop token, not before.
    skip_special_tokens: special tokens have no text.
    min_tokens: a stop string counts only if it is completed by generated token number min_tokens or later.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._window = _Window(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._safe: list[str] = []
        self._num_taken = 0  # of the entries of _safe
        self._held = ""  # text after _safe: the longest that may be the start of a stop string
        self._stopped = False
        self._ended = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared, which ends the text."""
        return self._stopped

    @property
    def text(self) -> str:
        """The text so far, an unfinished character left out until `finish`. Costs its length."""
        return "".join(self._safe) + self._held

    def push(self, token_id: int, *, is_stop_token: bool = False) -> bool:
        """Add a generated token; return `stopped`. RuntimeError once the text has ended.

        is_stop_token: the token ends the sequence and is left out of the text, unless
            include_stop_str_in_output. Push an EOS without it to let skip_special_tokens decide.
        """
        if self._ended:
            raise RuntimeError(f"token {token_id} was pushed after the end of the text")
        self._num_tokens += 1
        if self._include_stop or not is_stop_token:
            self._append(self._window.push(token_id))
        return self._stopped

    def finish(self) -> None:
        """End the text, for whatever reason: an unfinished character becomes U+FFFD, all else is released."""
        if not self._ended:
            self._append(self._window.flush())
        self._ended = True
        self._safe.append(self._held)
        self._held = ""

    def take_piece(self) -> str:
        """The text that became safe to show since the last call, often empty."""
        piece = "".join(self._safe[self._num_taken :])
        self._num_taken = len(self._safe)
        return piece

    def _append(self, new: str) -> None:
        tail = self._held + new
        num_safe = self._first_begun(tail)
        # A match reaches into `new`, and begins in `tail`: otherwise _held would have been longer.
        if self._num_tokens >= self._min_tokens and (span := _first_stop(tail, self._stop, len(self._held))):
            num_safe = span[1] if self._include_stop else span[0]
            tail = tail[:num_safe]
            self._stopped = self._ended = True
        if num_safe:
            self._safe.append(tail[:num_safe])
        self._held = tail[num_safe:]

    def _first_begun(self, text: str) -> int:
        """Where the first stop string begins that `text` ends in the middle of; the end if there is none."""
        for start in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            rest = text[start:]
            if any(s.startswith(rest) and len(s) > len(rest) for s in self._stop):
                return start
        return len(text)


def _first_stop(text: str, stop: Sequence[str], num_old: int) -> tuple[int, int] | None:
    """[start, end) of the first stop string to end after `num_old` characters, the longest of equals."""
    starts = ((text.find(s, max(0, num_old + 1 - len(s))), len(s)) for s in stop)
    spans = [(start, start + length) for start, length in starts if start >= 0]
    return min(spans, key=lambda span: (span[1], span[0]), default=None)


class _Window:
    """Tokens to text that no later token changes, decoding only the tokens of an unfinished character.

    What a token decodes to depends on its predecessors in two ways only. They may have begun its character:
    such tokens stay open. And tokenizers treat the start of a text differently (SentencePiece drops a space
    there, WordPiece omits one): so tokens are decoded behind a context, whose text is cut off again. Once
    any text has come, a letter is context enough.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._open: list[int] = []  # tokens whose text ends in U+FFFD, or has no more than a dropped space
        self._num_out = 0  # leading characters of their text that have been handed out
        self._bytes = bytearray()  # of an unfinished character in byte-fallback tokens
        self._num_of_prompt = 0  # U+FFFD that end the prompt's text, unless generated tokens change them
        self._at_start = True  # no text yet, not even the prompt's
        if not any(self._decode([token_id]) for token_id in reversed(prompt_token_ids)):
            self._set_context(list(prompt_token_ids))
            return
        self._leave_start()
        # More than an unfinished character has, as some may be special tokens.
        for token_id in prompt_token_ids[-2 * _MAX_UTF8 :]:
            self.push(token_id)
        self._num_of_prompt = len(self._open_text()) + len(self._bytes)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that this settles."""
        if (self._open or self._at_start) and self._is_invisible(token_id):
            return ""
        text = self._open_text(token_id)
        if text.endswith(_BAD) and (byte := self._fallback_byte(token_id)) is not None:
            settled = self._end_open() + self._settle_bytes(byte)
            self._leave_start()
        elif text:
            self._leave_start()
            settled = self._end_bytes() + self._settle_open(token_id, text)
        else:
            settled = self._settle_open(token_id, text)
        return self._after_prompt(settled)

    def flush(self) -> str:
        """Give up waiting; return the text of the unfinished character, U+FFFD."""
        return self._after_prompt(self._end_open() + self._end_bytes())

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_len = len(self._decode(token_ids))

    def _leave_start(self) -> None:
        if self._at_start:
            self._at_start = False
            self._set_context(list(self._tokenizer.encode("a", add_special_tokens=False)))

    def _text(self, token_ids: list[int]) -> str:
        return self._decode(self._context + token_ids)[self._context_len :]

    def _open_text(self, *more: int) -> str:
        return self._text([*self._open, *more])[self._num_out :]

    def _is_invisible(self, token_id: int) -> bool:
        """Whether it is a skipped special token; a space dropped at the start shows when it comes twice."""
        return not self._decode([token_id, token_id])

    def _fallback_byte(self, token_id: int) -> int | None:
        """The byte, not an ASCII character's, that the token is by its name; None for other tokens."""
        match = _FALLBACK_BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        return int(match[1], 16) if match else None

    def _settle_open(self, token_id: int, text: str) -> str:
        """Add a token that makes the open text `text`; return that, but for a final U+FFFD."""
        num_held = int(text.endswith(_BAD))
        if num_held or (self._at_start and not text):
            self._open = [*self._open, token_id][1 - _MAX_UTF8 :]  # a character's last token is yet to come
            self._num_out = len(self._text(self._open)) - num_held
        else:
            self._open, self._num_out = [], 0
        return text[: len(text) - num_held]

    def _settle_bytes(self, byte: int) -> str:
        """Add a byte; return the character it completes, and U+FFFD for each byte that is part of none."""
        self._bytes.append(byte)
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            if len(self._bytes) == 1:
                return self._end_bytes()
            self._bytes.pop()  # the byte does not go on from those before, but may begin a character
            return self._end_bytes() + self._settle_bytes(byte)
        self._bytes.clear()
        return text

    def _end_open(self) -> str:
        text = self._open_text()
        self._open, self._num_out = [], 0
        return text

    def _end_bytes(self) -> str:
        text = _BAD * len(self._bytes)
        self._bytes.clear()
        return text

    def _after_prompt(self, settled: str) -> str:
        """`settled` without the U+FFFD that are still the prompt's."""
        num_shared = min(self._num_of_prompt, len(settled) - len(settled.lstrip(_BAD)))
        self._num_of_prompt = self._num_of_prompt - num_shared if num_shared == len(settled) else 0
        return settled[num_shared:]
