"""Between what a user passes and gets (`fastgen_jax.types`) and the messages of `fastgen.proto`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.types import Delta, Response, SamplingParams, Timings, TokenLogprob

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or a conversation."""

TokenBytes = Callable[[int], bytes]
"""The UTF-8 bytes of a token."""

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids")


def to_prompt(prompt: Prompt) -> pb.Prompt:
    """TypeError for what is no prompt."""
    if isinstance(prompt, str):
        check_text(prompt)
        return pb.Prompt(text=prompt)
    if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, bytes):
        if all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            return pb.Prompt(token_ids=pb.TokenIds(ids=token_ids(prompt)))
        if all(isinstance(message, Mapping) for message in prompt):
            return pb.Prompt(conversation=pb.Conversation(messages=[_message(m) for m in prompt]))  # type: ignore[arg-type]
    raise TypeError(f"a prompt is a string, a list of token ids or a list of messages, not {prompt!r:.60}")


def _message(message: Mapping[str, Any]) -> pb.Message:
    if set(message) != {"role", "content"} or not all(isinstance(text, str) for text in message.values()):
        raise TypeError(f'a message is {{"role": text, "content": text}}, not {message!r:.60}')
    for text in message.values():
        check_text(text)
    return pb.Message(**message)


def check_text(text: str) -> str:
    """The text; ValueError for half a surrogate pair, as JSON may bring, which is no character and has no UTF-8."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"the text {text!r:.60} has half a surrogate pair, which is no character")
    return text


def token_ids(ids: Sequence[Any]) -> list[int]:
    for token_id in ids:
        if not 0 <= token_id < 1 << 31:
            raise ValueError(f"{token_id} is not a token id; they are 0 to vocabulary size - 1")
    return list(ids)


def from_prompt(message: pb.Prompt) -> Prompt:
    """ValueError if there is none."""
    kind = message.WhichOneof("kind")
    if kind == "text":
        return message.text
    if message.token_ids.ids:
        return list(message.token_ids.ids)
    if message.conversation.messages:
        return [{"role": m.role, "content": m.content} for m in message.conversation.messages]
    raise ValueError("the request has no prompt; set text, or token_ids or a conversation that are not empty")


def to_params(fields: Mapping[str, Any]) -> pb.SamplingParams:
    """Fields of `SamplingParams`; those left out are the model's own. ValueError or TypeError for a wrong one."""
    params = SamplingParams(**fields)
    known: dict[str, Any] = {}
    for name in fields:
        value = getattr(params, name)
        if name == "max_tokens":
            known[name] = value or 0
        elif value is not None:
            known[name] = value
    for text in known.get("stop", ()):
        check_text(text)
    return pb.SamplingParams(**known)


def from_params(message: pb.SamplingParams) -> dict[str, Any]:
    """The fields that were set."""
    fields: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name in _LISTS:
            fields[descriptor.name] = tuple(value)
        elif descriptor.name == "logit_bias":
            fields[descriptor.name] = dict(value)
        else:
            fields[descriptor.name] = value
    if fields.get("max_tokens") == 0:
        fields["max_tokens"] = None
    return fields


def to_delta(delta: Delta, token_bytes: TokenBytes) -> pb.Delta:
    return pb.Delta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_to_logprobs(delta.logprobs or (), token_bytes),
    )


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Each sample's deltas as one, in the order in which they were first seen."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_joined(parts) for parts in by_index.values()]


def _joined(parts: list[Delta]) -> Delta:
    if len(parts) == 1:
        return parts[0]
    logprobs = None if parts[0].logprobs is None else tuple(p for part in parts for p in part.logprobs or ())
    token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
    return Delta(parts[0].index, "".join(part.text for part in parts), token_ids, logprobs)


def to_response(response: Response, token_bytes: TokenBytes) -> pb.Response:
    prompt_logprobs = [logprob for logprob in response.prompt_logprobs or () if logprob is not None]
    return pb.Response(
        index=response.index,
        text=response.text,
        token_ids=response.token_ids,
        prompt_token_ids=response.prompt_token_ids,
        finish_reason=response.finish_reason,
        has_logprobs=response.logprobs is not None,
        logprobs=_to_logprobs(response.logprobs or (), token_bytes),
        has_prompt_logprobs=response.prompt_logprobs is not None,
        prompt_logprobs=_to_logprobs(prompt_logprobs, token_bytes),
        first_prompt_token=b"" if response.prompt_logprobs is None else token_bytes(response.prompt_token_ids[0]),
        num_preemptions=response.num_preemptions,
        cached_tokens=response.cached_tokens,
        timings=pb.Timings(queue=response.timings.queue, tokens=response.timings.tokens, total=response.timings.total),
    )


def from_response(message: pb.Response) -> Response:
    timings = message.timings
    return Response(
        text=message.text,
        token_ids=tuple(message.token_ids),
        prompt_token_ids=tuple(message.prompt_token_ids),
        finish_reason=message.finish_reason,  # type: ignore[arg-type]
        logprobs=_from_logprobs(message.logprobs) if message.has_logprobs else None,
        prompt_logprobs=(None, *_from_logprobs(message.prompt_logprobs)) if message.has_prompt_logprobs else None,
        index=message.index,
        num_preemptions=message.num_preemptions,
        cached_tokens=message.cached_tokens,
        timings=Timings(
            timings.queue if timings.HasField("queue") else None,
            tuple(timings.tokens),
            timings.total if timings.HasField("total") else None,
        ),
    )


def _to_logprobs(logprobs: Iterable[TokenLogprob], token_bytes: TokenBytes) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            token=token_bytes(entry.token_id),
            top=[pb.TopLogprob(token_id=i, logprob=logprob, token=token_bytes(i)) for i, logprob in entry.top],
        )
        for entry in logprobs
    ]


def _from_logprobs(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in messages
    )
