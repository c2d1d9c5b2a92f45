"""A scripted double of `Engine`, for tests of what stands in front of it. No JAX.

`python fake_engine.py ARGS` is `fastgen ARGS` with it: each word of a prompt comes back in capitals, one a step.
"""

import itertools
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import fastgen_jax
from fastgen_jax.types import Response, SamplingParams, Timings, TokenLogprob


@dataclass
class Request:
    request_id: int
    prompt: Any
    params: SamplingParams
    on_piece: Any
    left: list[str]
    done: list[str] = field(default_factory=list)
    aborted: bool = False


class FakeEngine:
    """Every prompt is answered by its own words in capitals; token ids by themselves.

    made: the last engine that `from_pretrained` returned; `loaded` is what it was asked for.
    script: prompt -> the pieces of its answer, where it is not the rule above.
    """

    made: "FakeEngine"
    has_template = True
    default_params = SamplingParams()
    step_seconds = 0.0
    script: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, **loaded: Any):
        self.loaded = loaded
        self.tokenizer = SimpleNamespace(chat_template="a template" if self.has_template else None)
        self.added: list[tuple[Any, SamplingParams]] = []
        self.chats: list[list[dict[str, str]]] = []
        self._ids = itertools.count(100)
        self._requests: list[Request] = []

    @classmethod
    def from_pretrained(cls, name: str, **config: Any) -> "FakeEngine":
        print("a library talks")
        FakeEngine.made = cls(name=name, **config)
        return FakeEngine.made

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The number of the conversation, as far as it has come; `chats` has it."""
        if not self.has_template:
            raise ValueError("no chat template")
        self.chats.append([dict(message) for message in messages])
        return [len(self.chats) - 1]

    def add(self, prompt: Any, params: SamplingParams, *, on_piece: Any = None) -> int:
        if prompt == "too long":
            raise ValueError("the prompt does not fit")
        self.added.append((prompt, params))
        text = prompt if isinstance(prompt, str) else self._text(prompt)
        words = self.script.get(text) or [" " + word.upper() for word in text.split()]
        request = Request(next(self._ids), prompt, params, on_piece, words[: params.max_tokens])
        self._requests.append(request)
        return request.request_id

    def _text(self, prompt: list[int]) -> str:
        if prompt[0] < len(self.chats):
            return self.chats[prompt[0]][-1]["content"]
        return " ".join(map(str, prompt))

    def step(self) -> list[Response]:
        """One word of each; the shortest ends first, whatever its number."""
        time.sleep(self.step_seconds)
        responses = []
        for request in list(self._requests):
            if request.left and not request.aborted:
                piece = request.left.pop(0)
                request.done.append(piece)
                if request.on_piece:
                    request.on_piece(piece)
            if not request.left or request.aborted:
                self._requests.remove(request)
                responses += [self._response(request, index) for index in range(request.params.n)]
        return responses

    def abort(self, request_id: int) -> bool:
        for request in self._requests:
            request.aborted |= request.request_id == request_id
        return True

    def _response(self, request: Request, index: int) -> Response:
        text = "".join(request.done) + (f" #{index}" if request.params.n > 1 else "")
        if request.params.full_text:
            text = (request.prompt if isinstance(request.prompt, str) else "a prompt:") + text
        token_ids = tuple(range(len(request.done)))
        logprobs = tuple(TokenLogprob(i, -0.5, ((i, -0.5), (9, -2.0))) for i in token_ids)
        return Response(
            text=text,
            token_ids=token_ids,
            prompt_token_ids=(1, 2, 3),
            finish_reason="abort" if request.aborted else "length",
            logprobs=None if request.params.logprobs is None else logprobs,
            prompt_logprobs=None if request.params.prompt_logprobs is None else (None, logprobs[0], logprobs[0]),
            index=index,
            request_id=request.request_id,
            timings=Timings(0.25, (0.5, 0.75), 1.5),
        )


def install(monkeypatch: Any = None) -> None:
    """Put it in the place of `fastgen_jax.Engine`, which is then never imported."""
    if monkeypatch is None:
        vars(fastgen_jax)["Engine"] = FakeEngine
    else:
        monkeypatch.setitem(vars(fastgen_jax), "Engine", FakeEngine)


if __name__ == "__main__":
    from fastgen_jax.cli import main

    install()
    FakeEngine.step_seconds = 0.02
    sys.exit(main(sys.argv[1:]))
