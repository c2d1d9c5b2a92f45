"""What tests ask of OpenAI's API, by its official client, and the engine's own answers to compare."""

from typing import Any, NamedTuple

import openai
from scripted import tokens
from serving import TIMEOUT
from tiny import EOS

from fastgen_jax import Engine, SamplingParams

PROMPT = "the quick brown fox"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is the sky blue?"}]
LETTERS = tokens("abcdefghijklmnopqrstuvwxyz")

GREEDY = {"max_tokens": 24, "temperature": 0, "allowed_token_ids": LETTERS}
SAMPLED = GREEDY | {"temperature": 1, "seed": 11}
ENDS = {"max_tokens": 24, "temperature": 0, "logit_bias": {EOS: 100}}

OPENAIS = {
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
}
"""Of these fields, the client's own; the others go into extra_body."""


class Choice(NamedTuple):
    """What is compared of an answer."""

    text: str
    finish_reason: str


def connect(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT)


def engines(own: Engine, prompt: Any, **fields: Any) -> list[Choice]:
    """The engine's own answer."""
    params = SamplingParams(**fields)
    is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
    responses = own.chat(prompt, params) if is_chat else own.generate([prompt], params)
    return [Choice(response.text, response.finish_reason) for response in responses]


def split(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as arguments of the client."""
    ours = {name: value for name, value in fields.items() if name not in OPENAIS}
    theirs = {name: value for name, value in fields.items() if name in OPENAIS}
    if "logit_bias" in theirs:
        theirs["logit_bias"] = {str(token_id): bias for token_id, bias in theirs["logit_bias"].items()}
    return theirs | {"model": "tiny", "extra_body": ours}


def whole(client: openai.OpenAI, prompt: Any, **fields: Any) -> list[Choice]:
    answer = client.completions.create(prompt=prompt, **split(fields))
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [Choice(choice.text, choice.finish_reason) for choice in answer.choices]


def streamed(client: openai.OpenAI, prompt: Any, **fields: Any) -> list[Choice]:
    found: dict[int, Choice] = {}
    for chunk in client.completions.create(prompt=prompt, stream=True, **split(fields)):
        for piece in chunk.choices:
            text, reason = found.get(piece.index, ("", None))
            assert reason is None, "nothing comes after the end"
            found[piece.index] = Choice(text + piece.text, piece.finish_reason)
    return [found[index] for index in sorted(found)]


def chat(client: openai.OpenAI, **fields: Any) -> list[Choice]:
    answer = client.chat.completions.create(messages=MESSAGES, **split(fields))
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    return [Choice(choice.message.content, choice.finish_reason) for choice in answer.choices]


def streamed_chat(client: openai.OpenAI, **fields: Any) -> list[Choice]:
    found: dict[int, Choice] = {}
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **split(fields)):
        for piece in chunk.choices:
            text, reason = found.get(piece.index, ("", None))
            assert reason is None and (piece.delta.role == "assistant") == (piece.index not in found)
            found[piece.index] = Choice(text + (piece.delta.content or ""), piece.finish_reason)
    return [found[index] for index in sorted(found)]
