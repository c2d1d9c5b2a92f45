"""DeepSpeed-MII's names of what a request may ask for, as fields of `SamplingParams`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fastgen_jax.types import SamplingParams

RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""MII's names of SamplingParams' fields."""

NOT_OURS = {
    "stream": "use stream()",
    "streaming_fn": "use stream()",
    "min_length": "use min_tokens, which counts generated tokens only",
    "num_return_sequences": "use n",
    "num_beams": "beam search is not supported",
}
"""Names of MII and Hugging Face that are refused, and what to use instead."""

NAMES = {*RENAMED, "max_length", "do_sample", *(f.name for f in dataclasses.fields(SamplingParams))}


def to_fields(
    fields: Mapping[str, Any], num_prompt_tokens: Callable[[], int], default_temperature: Callable[[], float]
) -> dict[str, Any]:
    """The fields of `SamplingParams` that `fields`, under MII's names or ours, mean for one prompt.

    max_length is prompt and output together, beside max_tokens where both are given. do_sample=False is temperature
    0; True is the model's own temperature, or 1, unless one is given. None is the same as not given, except that
    max_tokens=None is as many as the context holds.
    """
    _refuse_unknown(fields)
    ours = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
    for theirs, name in RENAMED.items():
        if theirs in ours:
            if name in ours:
                raise TypeError(f"{theirs} and {name} are one parameter; give one of them")
            ours[name] = ours.pop(theirs)
    if "max_length" in ours:
        room = _room(ours.pop("max_length"), num_prompt_tokens)
        ours["max_tokens"] = min(room, ours.get("max_tokens") or room)
    if "do_sample" in ours:
        ours["temperature"] = _temperature(ours.pop("do_sample"), ours.get("temperature"), default_temperature)
    return ours


def _room(max_length: Any, num_prompt_tokens: Callable[[], int]) -> int:
    """How many tokens `max_length` leaves for the output."""
    if not isinstance(max_length, int) or isinstance(max_length, bool):
        raise TypeError(f"max_length={max_length!r} is {type(max_length).__name__}; it must be a whole number")
    num_prompt = num_prompt_tokens()
    if max_length <= num_prompt:
        raise ValueError(f"max_length={max_length} leaves no room after a prompt of {num_prompt} tokens")
    return max_length - num_prompt


def _temperature(do_sample: Any, temperature: Any, default_temperature: Callable[[], float]) -> Any:
    if not isinstance(do_sample, bool):
        raise TypeError(f"do_sample={do_sample!r} is {type(do_sample).__name__}; it must be True or False")
    if temperature is not None and bool(temperature) is not do_sample:
        means = "samples, and temperature 0 does not" if do_sample else "is greedy, which is temperature 0"
        raise ValueError(f"temperature={temperature!r} contradicts do_sample={do_sample}, which {means}")
    if temperature is None:
        return (default_temperature() or 1.0) if do_sample else 0.0
    return temperature


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name in NOT_OURS:
            raise TypeError(f"there is no parameter {name!r}: {NOT_OURS[name]}")
        if name not in NAMES:
            raise TypeError(f"there is no parameter {name!r}; there are {', '.join(sorted(NAMES))}")
