"""`pipeline(name)(prompts, ...)`, in the shape of DeepSpeed-MII's `mii.pipeline`."""

import dataclasses
import gc
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from fastgen_jax.engine import Engine
from fastgen_jax.intake import Prompt, prompt_list
from fastgen_jax.types import DEFAULT_MODEL, Response, SamplingParams

RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""MII's names of SamplingParams' fields."""

NOT_OURS = {
    "stream": "use Engine.stream",
    "streaming_fn": "use Engine.stream",
    "min_length": "use min_tokens, which counts generated tokens only",
    "num_return_sequences": "use n",
    "num_beams": "beam search is not supported",
}
"""Names of MII and Hugging Face that are refused, and what to use instead."""

NAMES = {*RENAMED, "max_length", "do_sample", *(f.name for f in dataclasses.fields(SamplingParams))}


class Pipeline:
    """Calls an engine with MII's or our own parameter names."""

    def __init__(self, engine: Engine):
        self._engine: Engine | None = engine

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError after `destroy`."""
        if self._engine is None:
            raise RuntimeError("this pipeline has been destroyed; make another with pipeline()")
        return self._engine

    def __call__(self, prompts: Prompt | Seq[Prompt], **fields: Any) -> list[Response]:
        """Responses to one prompt or several, in order.

        Fields are those of `SamplingParams`, and MII's: max_new_tokens (max_tokens), min_new_tokens
        (min_tokens), max_length (prompt and output together, beside max_tokens where both are given),
        do_sample (False is temperature 0; True is the model's own temperature, or 1, unless one is given).
        None is the same as not given, except that max_tokens=None is as many as the context holds.
        """
        every = prompt_list(prompts)
        return self.engine.generate(every, [self.params(prompt, fields) for prompt in every])

    def params(self, prompt: Prompt, fields: Mapping[str, Any]) -> SamplingParams:
        """The SamplingParams that `fields` mean for `prompt`; the model's defaults where they say nothing."""
        _refuse_unknown(fields)
        ours = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        for theirs, name in RENAMED.items():
            if theirs in ours:
                if name in ours:
                    raise TypeError(f"{theirs} and {name} are one parameter; give one of them")
                ours[name] = ours.pop(theirs)
        if "max_length" in ours:
            room = self._room(prompt, ours.pop("max_length"))
            ours["max_tokens"] = min(room, ours.get("max_tokens") or room)
        if "do_sample" in ours:
            ours["temperature"] = self._temperature(ours.pop("do_sample"), ours.get("temperature"))
        return self.engine.default_params.replace(**ours)

    def destroy(self) -> None:
        """Let go of the engine and its memory; the pipeline is of no use afterwards."""
        self._engine = None
        gc.collect()  # an engine and its parts refer to each other

    def _room(self, prompt: Prompt, max_length: Any) -> int:
        """How many tokens `max_length` leaves for the output."""
        if not isinstance(max_length, int) or isinstance(max_length, bool):
            raise TypeError(f"max_length={max_length!r} is {type(max_length).__name__}; it must be a whole number")
        num_prompt = self.engine.num_prompt_tokens(prompt)
        if max_length <= num_prompt:
            raise ValueError(f"max_length={max_length} leaves no room after a prompt of {num_prompt} tokens")
        return max_length - num_prompt

    def _temperature(self, do_sample: Any, temperature: Any) -> Any:
        if not isinstance(do_sample, bool):
            raise TypeError(f"do_sample={do_sample!r} is {type(do_sample).__name__}; it must be True or False")
        if temperature is not None and bool(temperature) is not do_sample:
            means = "samples, and temperature 0 does not" if do_sample else "is greedy, which is temperature 0"
            raise ValueError(f"temperature={temperature!r} contradicts do_sample={do_sample}, which {means}")
        if temperature is None:
            return (self.engine.default_params.temperature or 1.0) if do_sample else 0.0
        return temperature


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name in NOT_OURS:
            raise TypeError(f"pipeline does not take {name!r}: {NOT_OURS[name]}")
        if name not in NAMES:
            raise TypeError(f"pipeline does not know {name!r}; it takes {', '.join(sorted(NAMES))}")


def pipeline(name: str = DEFAULT_MODEL, **config: Any) -> Pipeline:
    """A pipeline for a model; `config` is what `Engine.from_pretrained` takes.

    pipe = pipeline("llama2-7b")
    print(pipe(["DeepSpeed is", "Seattle is"], max_new_tokens=64)[0].text)
    """
    return Pipeline(Engine.from_pretrained(name, **config))
