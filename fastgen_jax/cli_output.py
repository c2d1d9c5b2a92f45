"""Text on stdout in the order of its prompts, and remarks on stderr."""

import dataclasses
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from fastgen_jax.types import Response

Key = tuple[int, int]
"""Number of the prompt, number of its sample."""

WAITING = "compiling what is not in the cache, reading the prompt"


class Printer:
    """Prints samples in the order of `keys`, whichever order they come in: the first unfinished as it grows.

    Texts are parted by a blank line and end in a newline.
    as_json: print one object to a line instead, when a sample has ended.
    before_first: called before the first character.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        out: TextIO,
        *,
        as_json: bool = False,
        before_first: Callable[[], Any] = lambda: None,
    ):
        self._keys = deque(keys)
        self._out = out
        self._as_json = as_json
        self.before_first = before_first
        self._held: dict[Key, list[str]] = defaultdict(list)
        self._ended: dict[Key, Response] = {}
        self._last = ""

    def piece(self, key: Key, text: str) -> None:
        """More of a sample's text."""
        self._held[key].append(text)
        self._advance()

    def end(self, key: Key, response: Response, *, streamed: bool) -> None:
        """A sample has ended; its text has come in pieces if it was `streamed`."""
        if not streamed:
            self._held[key].append(response.text)
        self._ended[key] = response
        self._advance()

    def end_line(self) -> None:
        """Leave the cursor at the start of a line."""
        if self._last and not self._last.endswith("\n"):
            self._write("\n")

    def _advance(self) -> None:
        while self._keys:
            key = self._keys[0]
            text = "".join(self._held.pop(key, ()))
            if text and not self._as_json:
                self._write(text)
            if key not in self._ended:
                return
            response = self._ended.pop(key)
            self._keys.popleft()
            if self._as_json:
                self._write(json.dumps(to_json(key, response)) + "\n")
            else:
                self.end_line()
                if self._keys:
                    self._write("\n")

    def _write(self, text: str) -> None:
        if not self._last:
            self.before_first()
        self._last = text  # first: Ctrl-C may come as soon as the text is out
        self._out.write(text)
        self._out.flush()


def to_json(key: Key, response: Response) -> dict[str, Any]:
    """A response as --json prints it; seconds in `timings`, log-probabilities only if asked for."""
    found = {
        "prompt_index": key[0],
        "sample_index": key[1],
        "text": response.text,
        "token_ids": response.token_ids,
        "finish_reason": response.finish_reason,
        "num_prompt_tokens": response.num_prompt_tokens,
        "num_generated_tokens": response.num_generated_tokens,
        "num_preemptions": response.num_preemptions,
        "timings": {"first_token": response.timings.first_token, **dataclasses.asdict(response.timings)},
    }
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(response, name)) is not None:
            found[name] = [entry and dataclasses.asdict(entry) for entry in entries]
    return found


def note(text: str, quiet: bool) -> None:
    """A remark on stderr, unless `quiet`."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def summary(responses: Sequence[Response], seconds: float) -> str:
    """How much was generated in `seconds`, and how fast."""
    num_prompts = len({response.request_id for response in responses})
    num_prompt = sum({r.request_id: r.num_prompt_tokens for r in responses}.values())
    num_generated = sum(r.num_generated_tokens for r in responses)
    prompts = f"{counted(num_prompts, 'prompt')} ({counted(num_prompt, 'token')})"
    if len(responses) > 1:
        rate = num_generated / seconds
        return f"{prompts}, {num_generated} generated in {seconds:.2f} s ({rate:.1f} tokens/s)"
    first, total = responses[0].timings.first_token, responses[0].timings.total
    text = f"{prompts}, {num_generated} generated ({responses[0].finish_reason})"
    if first is None or total is None:
        return text
    text += f", the first after {first:.2f} s"
    if num_generated > 1 and total > first:
        text += f", the others in {total - first:.2f} s ({(num_generated - 1) / (total - first):.1f} tokens/s)"
    return text


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
