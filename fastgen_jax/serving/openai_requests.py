"""OpenAI's request bodies, and ours beside them: checked, and turned into what a replica is asked for.

A field that is not honoured is refused by name, unless its value asks for nothing.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import wire
from fastgen_jax.serving.errors import field_in, invalid

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; a chat's is what the context holds."""

_Neutral = Mapping[str, tuple[Any, ...]]

NEUTRAL: _Neutral = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""OpenAI's fields that we cannot honour -> the values with which there is nothing to honour."""

NEUTRAL_IN_MESSAGES: _Neutral = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}
"""The same of a message, as it comes back from a client that keeps what we answered."""


class Body(BaseModel):
    """What every body has in common: no field that is not known, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    NEUTRALS: ClassVar[_Neutral] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = dict(data)
        for name in data:
            if name in cls.model_fields:
                continue
            if name not in cls.NEUTRALS:
                known = ", ".join(sorted(cls.model_fields))
                raise _field_error(name, f"there is no field {name!r:.80}; the fields are {known}")
            if kept.pop(name) not in cls.NEUTRALS[name]:
                raise _field_error(name, f"{name} is not supported by this server; leave it out")
        return kept


def _field_error(name: str, sentence: str) -> PydanticCustomError:
    """What is wrong with a field by its name alone, which may have halves of surrogate pairs."""
    field = name.encode(errors="backslashreplace").decode()
    return PydanticCustomError("field", "{sentence}", {"sentence": sentence, "field": field})


def _one_of(kinds: str) -> WrapValidator:
    """Says what a value may be, where pydantic says what is wrong with it as each of these."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            for each in error.errors():
                if each["type"] == "value_error":
                    raise ValueError(str(each["ctx"]["error"])) from error
            raise PydanticCustomError("kind", "{kinds}", {"kinds": kinds}) from error

    return WrapValidator(check)


Text = Annotated[str, AfterValidator(wire.check_text)]

Prompts = Annotated[
    Text | list[Text] | list[int] | list[list[int]],
    _one_of("give a text, a list of texts, a list of token ids or a list of such lists"),
]
Stop = Annotated[Text | list[Text], _one_of("give a string or a list of strings")]


class StreamOptions(Body):
    include_usage: bool = Field(False, description="a last chunk with the usage")
    include_obfuscation: Literal[False] = False


_AS_THEY_ARE = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
"""Fields that mean what `SamplingParams` means by them."""


class Sampled(Body):
    """Fields of `SamplingParams` under OpenAI's names and our own, and how to answer. null is the same as left out."""

    PROMPT: ClassVar[str] = "prompt"
    """The field that has the prompt."""

    model: Text | None = Field(None, description="may be left out where one model is served")
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="accepted, and of no effect")
    safety_identifier: str | None = Field(None, description="accepted, and of no effect")
    prompt_cache_key: str | None = Field(None, description="accepted, and of no effect: prefixes are always cached")

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    n: int | None = Field(None, ge=1, le=1024)
    temperature: float | None = Field(None, ge=0, description="0 is greedy; default: the model's own")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stop | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, description="token id -> added to its logit")

    top_k: int | None = Field(None, ge=0, lt=2**31, description="not OpenAI's: the k likeliest tokens only; 0 is all")
    min_p: float | None = Field(
        None, ge=0, le=1, description="not OpenAI's: least share of the likeliest's probability"
    )
    repetition_penalty: float | None = Field(None, gt=0, description="not OpenAI's: over prompt and output; 1 is off")
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="not OpenAI's: tokens before the text may end")
    stop_token_ids: list[int] | None = Field(None, description="not OpenAI's: tokens that end the text")
    allowed_token_ids: list[int] | None = Field(None, description="not OpenAI's: the only tokens to generate")
    ignore_eos: bool | None = Field(None, description="not OpenAI's: go on after the end-of-sequence token")
    include_stop_str_in_output: bool | None = Field(None, description="not OpenAI's: leave the stop string in the text")
    skip_special_tokens: bool | None = Field(None, description="not OpenAI's: leave special tokens out of the text")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="not OpenAI's: the higher goes first")
    replica_class: Text | None = Field(None, description='not OpenAI\'s: replicas to run on; default "interactive"')

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that were given."""
        fields = {name: value for name in _AS_THEY_ARE if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            fields["logit_bias"] = {_token_id(name): bias for name, bias in self.logit_bias.items()}
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is for stream=true", param="stream_options")
        return fields

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def to_replica(self, prompt: wire.Prompt, fields: Mapping[str, Any]) -> pb.GenerateRequest:
        """What to ask a replica for; a `Refusal` for what can never be done."""
        return pb.GenerateRequest(
            model=self.model or "",
            prompt=checked(self.PROMPT, wire.to_prompt, prompt),
            params=checked(None, wire.to_params, fields),
            priority=self.priority or 0,
            replica_class=self.replica_class or "",
        )


class CompletionRequest(Sampled):
    """The body of /v1/completions."""

    prompt: Prompts
    echo: bool | None = Field(None, description="the text starts with the prompt")
    logprobs: int | None = Field(None, ge=0, le=20, description="so many of the likeliest tokens for each token")
    best_of: int | None = Field(None, description="n, and nothing else")

    def prompts(self) -> list[str | list[int]]:
        """Every prompt there is."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise invalid("prompt=[] has no prompt", param="prompt")
        return list(prompt) if isinstance(prompt[0], str | list) else [prompt]

    def to_replicas(self) -> list[pb.GenerateRequest]:
        """One request for each prompt."""
        if self.best_of not in (None, self.n or 1):
            raise invalid(
                f"best_of={self.best_of} is not n={self.n or 1}, and nothing else is supported", param="best_of"
            )
        fields = self.sampling() | {"max_tokens": self.max_tokens or COMPLETION_TOKENS}
        if self.echo:
            fields["echo"] = True
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
            if self.echo:
                fields["prompt_logprobs"] = self.logprobs
                if self.stream:
                    raise invalid("echo with logprobs cannot be streamed; leave out one of the three", param="echo")
        return [self.to_replica(prompt, fields) for prompt in self.prompts()]


class TextPart(Body):
    NEUTRALS = {}

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    NEUTRALS = NEUTRAL_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | list[TextPart],
        _one_of('images, audio and files are not supported; give a text or a list of {"type": "text", "text": ...}'),
    ]

    def plain(self) -> dict[str, str]:
        """As a chat template wants it. "developer" is OpenAI's newer name for "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(Sampled):
    """The body of /v1/chat/completions."""

    PROMPT = "messages"

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def to_replicas(self) -> list[pb.GenerateRequest]:
        """One request."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise invalid("max_tokens and max_completion_tokens are one field; give one of them", param="max_tokens")
        fields = self.sampling() | {"max_tokens": limits.pop() if limits else None}
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            raise invalid("top_logprobs needs logprobs=true", param="top_logprobs")
        return [self.to_replica([message.plain() for message in self.messages], fields)]


class TokenizeRequest(Body):
    """The body of /tokenize: a text or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = None

    def to_replica(self) -> pb.TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt or messages", param="prompt")
        prompt: Any = self.prompt if self.messages is None else [message.plain() for message in self.messages]
        name = "prompt" if self.messages is None else "messages"
        return pb.TokenizeRequest(model=self.model or "", prompt=checked(name, wire.to_prompt, prompt))


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: Text | None = None
    tokens: list[int]

    def to_replica(self) -> pb.DetokenizeRequest:
        return pb.DetokenizeRequest(model=self.model or "", token_ids=checked("tokens", wire.token_ids, self.tokens))


def checked[T](param: str | None, convert: Callable[[T], Any], value: T) -> Any:
    """`convert(value)`, whose mistakes become a `Refusal` that names the parameter."""
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid(str(error), param=param or field_in(str(error))) from error


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit()):
        raise invalid(f"logit_bias maps token ids to numbers, and {name!r:.40} is no token id", param="logit_bias")
    return int(name[:20])
