"""`Intake`: what a user asks for, checked and turned into the sequences the scheduler runs."""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, cast

import numpy as np

from fastgen_jax.batch import Settings
from fastgen_jax.detokenize import Detokenizer
from fastgen_jax.request import Sample
from fastgen_jax.sampling_state import SlotRow, pack_row, seed_words
from fastgen_jax.scheduler import Sequence
from fastgen_jax.types import Delta, SamplingParams

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, Any]]
OnDelta = Callable[[Delta], Any]


class Intake:
    """Prompts to token ids, requests to samples, samples to what the device has to know of them.

    tokenizer: a transformers tokenizer, or None where prompts are token ids and there is no text.
    seed: of requests that bring none.
    short_context: see `dynamic_rope_len`.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Seq[int],
        max_model_len: int,
        seed: int,
        *,
        short_context: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self._seed = seed
        self._short_context = short_context
        self._seq_ids = itertools.count()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer; give prompts as lists of token ids")
            if not prompt.isascii() and any("\ud800" <= c <= "\udfff" for c in prompt):
                raise ValueError(f"the prompt {prompt!r:.60} has half a surrogate pair, which is no character")
            return list(self.tokenizer(prompt)["input_ids"])
        if not is_token_ids(prompt):
            raise TypeError(f"a prompt is a string or a list of token ids, not {prompt!r:.60}")
        return [int(token_id) for token_id in prompt]

    def chat_prompt(self, messages: Messages) -> list[int]:
        """The token ids that the tokenizer's chat template makes of a conversation."""
        if not isinstance(messages, Seq) or isinstance(messages, str | bytes) or not messages:
            raise TypeError(f"a conversation is a list of messages, not {messages!r:.60}")
        for message in messages:
            known = isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))
            if not known:
                raise TypeError(f'a message is {{"role": text, "content": text}}, not {message!r:.60}')
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("this model's tokenizer has no chat template; use generate with a plain prompt")
        import jinja2

        try:
            out = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return list(out["input_ids"])

    def check(self, token_ids: list[int], params: SamplingParams, *, streamed: bool) -> None:
        """Raise for what this model cannot do, whatever memory there is."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params={params!r:.60} is {type(params).__name__}; it must be SamplingParams")
        named = {
            "the prompt": token_ids,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias,
        }
        for name, ids in named.items():
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(f"{name} has the token id {token_id}; this model's are 0 to {self.vocab_size - 1}")
        if params.min_tokens >= self.max_model_len:
            raise ValueError(f"min_tokens={params.min_tokens} does not fit into max_model_len={self.max_model_len}")
        if self.tokenizer is None and params.stop:
            raise ValueError("stop strings need a tokenizer, which this engine does not have; use stop_token_ids")
        if self.tokenizer is None and streamed:
            raise ValueError("this engine has no tokenizer, so there is no text to stream; use add and step")
        if params.n > 1 and streamed:
            raise ValueError(f"n={params.n} samples cannot be streamed as one text; stream them one by one")

    def sequence(self, seq_id: int, token_ids: list[int], params: SamplingParams, priority: int) -> Sequence:
        """The sequence of one sample, as the scheduler wants it."""
        eos_token_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        # A token's frequencies under "dynamic" rope and "longrope" follow from its position and this (`Rope.cos_sin`).
        context = 0 if self._short_context is None else max(len(token_ids), self._short_context)
        return Sequence(
            seq_id=seq_id,
            prompt_token_ids=token_ids,
            max_tokens=params.max_tokens or self.max_model_len,
            stop_token_ids=eos_token_ids.union(params.stop_token_ids),
            min_tokens=params.min_tokens,
            priority=priority,
            max_cached_tokens=max_cached_tokens(len(token_ids), params),
            cache_salt=context,
        )

    def samples(
        self,
        request_id: int,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        priority: int,
        on_delta: OnDelta | None,
    ) -> list[Sample]:
        """The `n` samples of a request that has passed `check`; `token_ids` are the prompt's."""
        text = self.prompt_text(prompt, params) if params.full_text else ""
        return [
            Sample(
                seq=self.sequence(next(self._seq_ids), token_ids, params, priority),
                params=params,
                request_id=request_id,
                index=index,
                prompt=text,
                detokenizer=self._detokenizer(token_ids, params),
                on_delta=on_delta,
            )
            for index in range(params.n)
        ]

    def settings(self, sample: Sample) -> Settings:
        """How a sample's tokens are drawn, as numbers for the device."""
        seq, p = sample.seq, sample.params
        # Requests without a seed get one of the engine's, from the half of the range that no request can name.
        drawn = (1 << 63) + (self._seed << 32) + seq.seq_id
        seed = drawn if p.seed is None else (p.seed + sample.index) % (1 << 63)
        seed_high, seed_low = seed_words(seed).tolist()
        return Settings(
            num_prompt_tokens=len(seq.prompt_token_ids),
            min_tokens=p.min_tokens,
            top_k=p.top_k,
            seed_low=seed_low,
            seed_high=seed_high,
            has_bias=bool(p.logit_bias),
            has_allowed=p.allowed_token_ids is not None,
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
        )

    def masks(self, sample: Sample) -> SlotRow | None:
        """What sampling needs beside the settings, for the few requests that ask for it."""
        p = sample.params
        if not (p.logit_bias or p.allowed_token_ids is not None or p.min_tokens):
            return None
        return pack_row(p, sample.seq.stop_token_ids, self.vocab_size)

    def _detokenizer(self, token_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        return Detokenizer(
            self.tokenizer,
            token_ids,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def prompt_text(self, prompt: Prompt, params: SamplingParams) -> str:
        """A prompt's text, for echo."""
        if isinstance(prompt, str) or self.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return self.tokenizer.decode(
            list(prompt), skip_special_tokens=params.skip_special_tokens, clean_up_tokenization_spaces=False
        )


def max_cached_tokens(num_prompt_tokens: int, params: SamplingParams) -> int:
    """How many of a sequence's first tokens need not be computed if the prefix cache has them.

    A prompt's log-probabilities come from its hidden states, and the tokens that penalties count from the device's
    token pool, which has those of computed rows only: the prompt's and the generated ones, or only the latter.
    """
    if params.prompt_logprobs is not None or params.repetition_penalty != 1:
        return 0
    return num_prompt_tokens if params.presence_penalty or params.frequency_penalty else sys.maxsize


def dynamic_rope_len(model_config: Any) -> int | None:
    """The longest context whose tokens a model turns alike that has "dynamic" rope or "longrope"; None for others."""
    rope = getattr(model_config, "rope", None)
    return rope.original_max_len if rope is not None and rope.varies else None


def is_token_ids(prompt: Any) -> bool:
    """Whether `prompt` is a list of token ids rather than a string or a list of prompts."""
    return (
        isinstance(prompt, Seq | np.ndarray)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in prompt)
    )


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    one = not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | Mapping)
    alone = one or is_token_ids(prompts)
    return cast(list[Prompt], [prompts] if alone else list(prompts))
