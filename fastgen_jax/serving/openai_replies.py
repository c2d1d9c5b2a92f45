"""Events of replicas as OpenAI's answers: whole, or in chunks."""

import codecs
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastgen_jax.serving import fastgen_pb2 as pb

Json = dict[str, Any]

FINISH_REASONS = {"abort": "stop"}
"""Ours -> OpenAI's, where they differ. Who aborts a request by its name is told so by its text's end only."""


@dataclass
class Usage:
    """Tokens of all prompts and samples of one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict)

    def prompt(self, num_tokens: int) -> None:
        self.prompt_tokens += num_tokens

    def response(self, prompt_number: int, response: pb.Response) -> None:
        self.completion_tokens += len(response.token_ids)
        # Samples of one prompt share it; it counts once, as the prompt does.
        self._cached[prompt_number] = max(self._cached.get(prompt_number, 0), response.cached_tokens)

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Completions:
    """Answers of /v1/completions. Choices are numbered through all samples of all prompts."""

    WHOLE, CHUNK, PREFIX = "text_completion", "text_completion", "cmpl"

    def __init__(self, request_id: str, model: str, num_samples: int) -> None:
        self._num_samples = num_samples
        self._head = {"id": f"{self.PREFIX}-{request_id}", "created": int(time.time()), "model": model}
        self._offsets: dict[int, _Offsets] = {}

    def whole(self, responses: Iterable[tuple[int, pb.Response]], usage: Usage) -> Json:
        """The answer to a request that is not streamed; `responses` come with the numbers of their prompts."""
        choices = [self.choice(self.index(number, response.index), response) for number, response in responses]
        choices.sort(key=lambda choice: choice["index"])
        return {**self._head, "object": self.WHOLE, "choices": choices, "usage": usage.json()}

    def chunk(self, choices: list[Json], usage: Json | None = None, *, with_usage: bool = False) -> Json:
        body = {**self._head, "object": self.CHUNK, "choices": choices}
        return {**body, "usage": usage} if with_usage else body

    def index(self, prompt_number: int, sample: int) -> int:
        return prompt_number * self._num_samples + sample

    def choice(self, index: int, response: pb.Response) -> Json:
        return {
            "index": index,
            "text": response.text,
            "logprobs": _whole_logprobs(response) if response.has_logprobs else None,
            "finish_reason": _reason(response),
        }

    def first(self, prompt_number: int, accepted: pb.Accepted) -> list[Json]:
        """Choices of the chunk, if there is to be one, that comes before all tokens."""
        if not accepted.echo:
            return []
        return [
            {"index": self.index(prompt_number, i), "text": accepted.echo, "logprobs": None, "finish_reason": None}
            for i in range(self._num_samples)
        ]

    def delta(self, prompt_number: int, delta: pb.Delta) -> Json:
        index = self.index(prompt_number, delta.index)
        offsets = self._offsets.setdefault(index, _Offsets())
        logprobs = _legacy_logprobs(delta.logprobs, offsets) if delta.logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}

    def last(self, prompt_number: int, response: pb.Response) -> Json:
        index = self.index(prompt_number, response.index)
        return {"index": index, "text": "", "logprobs": None, "finish_reason": _reason(response)}


class ChatCompletions(Completions):
    """Answers of /v1/chat/completions."""

    WHOLE, CHUNK, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, response: pb.Response) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": response.text, "refusal": None},
            "logprobs": {"content": _logprobs(response.logprobs)} if response.has_logprobs else None,
            "finish_reason": _reason(response),
        }

    def first(self, prompt_number: int, accepted: pb.Accepted) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": sample, "delta": delta, "logprobs": None, "finish_reason": None}
            for sample in range(self._num_samples)
        ]

    def delta(self, prompt_number: int, delta: pb.Delta) -> Json:
        logprobs = {"content": _logprobs(delta.logprobs)} if delta.logprobs else None
        return {"index": delta.index, "delta": {"content": delta.text}, "logprobs": logprobs, "finish_reason": None}

    def last(self, prompt_number: int, response: pb.Response) -> Json:
        return {"index": response.index, "delta": {}, "logprobs": None, "finish_reason": _reason(response)}


def _reason(response: pb.Response) -> str:
    return FINISH_REASONS.get(response.finish_reason, response.finish_reason)


def _logprobs(entries: Iterable[pb.TokenLogprob]) -> list[Json]:
    """A chat's: each token with the likeliest in its place."""
    return [{**_entry(entry), "top_logprobs": [_entry(top) for top in entry.top]} for entry in entries]


def _entry(entry: pb.TokenLogprob | pb.TopLogprob) -> Json:
    text = entry.token.decode(errors="replace")
    return {"token": text, "logprob": entry.logprob, "bytes": list(entry.token)}


class _Offsets:
    """Where tokens begin in a choice's text, of which a character may take several.

    text: of the choice, where it is known; a token that is not there, as one left out of it, takes no room.
    """

    def __init__(self, text: str | None = None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0
        self._text = text

    def take(self, token: bytes) -> int:
        start, new = self._next, self._decoder.decode(token)
        if self._text is None or self._text.startswith(new, start):
            self._next += len(new)
        return start


def _whole_logprobs(response: pb.Response) -> Json:
    """A completion's, the prompt's in front where they were asked for."""
    offsets = _Offsets(text=response.text)
    if not response.has_prompt_logprobs:
        return _legacy_logprobs(response.logprobs, offsets)
    token = response.first_prompt_token  # nothing comes before it that it could follow from
    first = {
        "tokens": [_legacy_text(token)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [offsets.take(token)],
    }
    others = _legacy_logprobs([*response.prompt_logprobs, *response.logprobs], offsets)
    return {name: values + others[name] for name, values in first.items()}


def _legacy_logprobs(entries: Iterable[pb.TokenLogprob], offsets: _Offsets) -> Json:
    """A completion's: lists of equal length. The likeliest tokens have the one that was taken among them."""
    lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        token = _legacy_text(entry.token)
        lists["tokens"].append(token)
        lists["token_logprobs"].append(entry.logprob)
        lists["top_logprobs"].append(
            {_legacy_text(top.token): top.logprob for top in entry.top} | {token: entry.logprob}
        )
        lists["text_offset"].append(offsets.take(entry.token))
    return lists


def _legacy_text(token: bytes) -> str:
    """As OpenAI writes a token of bytes that are no text alone."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
