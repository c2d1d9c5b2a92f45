"""Flags that commands share: `--model`, and one for every field of `SamplingParams` and `EngineConfig`."""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fastgen_jax.types import (
    DEFAULT_MODEL,
    DTYPES,
    KV_CACHE_DTYPES,
    POLICIES,
    QUANTIZATIONS,
    EngineConfig,
    SamplingParams,
)

SAMPLING_HELP = {
    "max_tokens": "generated tokens at most; none is as many as the context holds",
    "min_tokens": "generated tokens before EOS, a stop token or a stop string may end the text",
    "temperature": "0 is greedy",
    "top_p": "sample from the likeliest tokens that together have this probability; 1 is off",
    "top_k": "sample from this many of the likeliest tokens; 0 is off",
    "min_p": "leave out tokens less likely than this share of the likeliest one; 0 is off",
    "repetition_penalty": "on tokens of the prompt and the text; 1 is off",
    "presence_penalty": "on tokens that the text has, -2 to 2",
    "frequency_penalty": "on tokens for each time that the text has them, -2 to 2",
    "logit_bias": "add to a token's logit; repeat it for several, or give a JSON object",
    "allowed_token_ids": "the only tokens that may be generated",
    "stop": "end the text before this string; repeat it for several",
    "stop_token_ids": "tokens that end the text, beside the model's EOS",
    "ignore_eos": "go on after EOS",
    "include_stop_str_in_output": "end the text after the stop string, not before",
    "skip_special_tokens": "leave special tokens out of the text",
    "seed": "of the sampling; sample i of --n uses seed + i",
    "n": "samples of each prompt",
    "logprobs": "report this many of the likeliest tokens for each generated one, 0 to 20 (with --json)",
    "prompt_logprobs": "the same for the prompt's tokens (with --json)",
    "echo": "begin the text with the prompt",
    "return_full_text": "another name for --echo",
}
ENGINE_HELP = {
    "dtype": f"of weights and activations: {', '.join(DTYPES)}; otherwise what suits the device",
    "kv_cache_dtype": f"of the KV pool: {', '.join(KV_CACHE_DTYPES)}; auto is dtype, fp8 holds twice the tokens",
    "block_size": "tokens in a block of KV memory",
    "num_blocks": "blocks of KV memory; otherwise what fits",
    "gpu_memory_utilization": "the share of the GPU's memory to use",
    "max_num_batched_tokens": "the token budget of a step (Dynamic SplitFuse), or auto: where throughput stops growing",
    "max_step_ms": "with auto, the budget is the largest whose step takes no longer",
    "max_num_seqs": "sequences in a step at most",
    "max_model_len": "longest prompt and output together; otherwise the model's own",
    "backend": "attention backend; otherwise the best that runs here",
    "quantization": f"of the projections' weights while they are loaded: {', '.join(QUANTIZATIONS)}",
    "tensor_parallel": "devices that share the model",
    "expert_parallel": "share a mixture out by experts, not within each",
    "seed": "of the prompts that have no --seed",
    "policy": f"what a step is filled with: {', '.join(POLICIES)}; all but the first are for comparison",
    "prefix_caching": "share the KV memory of prompts that begin alike",
    "overlap": "dispatch a step before the last one's tokens are here; the text is the same",
    "warm_up": "compile every program first",
    "compile_cache": "keep compiled programs on disk between runs",
}
ENGINE_FLAGS = {"seed": "--engine-seed", "tensor_parallel": "--tp"}
"""Flags that are not spelled like their field, which has a namesake in `SamplingParams`."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples' lines, and leaves room for long flags."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **{"max_help_position": 32, **options})


def add_model_argument(
    parser: argparse.ArgumentParser, *, positional: bool, default: str | None = DEFAULT_MODEL
) -> None:
    """`--model X`, stored in `args.model`; `positional`: also as the first positional, but not both.

    default: what is stored if none is given.
    """
    text = f"a folder, a .gguf file, a Hub id or an alias such as llama2-7b (default {DEFAULT_MODEL})"
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--model", metavar="MODEL", default=default, help=text)
    if positional:
        either.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="the same")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of `SamplingParams`; `given(args, SamplingParams)` reads them."""
    group = parser.add_argument_group("sampling", "what is not given is the model's own default, if it has one")
    _add_flags(group, SamplingParams, SAMPLING_HELP, {})


def add_engine_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """A flag for every field of `EngineConfig`; `defaults` are the command's, where they differ."""
    group = parser.add_argument_group("engine")
    _add_flags(group, EngineConfig, ENGINE_HELP, ENGINE_FLAGS, defaults)
    parser.set_defaults(**{_dest(EngineConfig, name): value for name, value in defaults.items()})


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that the command line, or the command's own defaults, gave."""
    found = {f.name: _dest(cls, f.name) for f in dataclasses.fields(cls)}
    return {name: getattr(args, dest) for name, dest in found.items() if hasattr(args, dest)}


def _dest(cls: type, name: str) -> str:
    return f"{cls.__name__}.{name}"


def _add_flags(
    group: Any,
    cls: type,
    texts: Mapping[str, str],
    flags: Mapping[str, str],
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flag = flags.get(field.name, "--" + field.name.replace("_", "-"))
        text = texts[field.name] + _default(defaults.get(field.name, field.default))
        options = _SPECIAL.get(field.name) or _options(hints[field.name])
        group.add_argument(flag, dest=_dest(cls, field.name), default=argparse.SUPPRESS, help=text, **options)


def _default(value: Any) -> str:
    """What the help says of a default; nothing of one that its text explains."""
    if isinstance(value, bool):
        return f" (default {'yes' if value else 'no'})"
    return f" (default {value:g})" if isinstance(value, int | float) else ""


def _options(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type: bool, int, float or str, with or without None."""
    kinds = set(typing.get_args(hint)) or {hint}
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if str in kinds:
        return {"metavar": "NAME"}
    if int in kinds:
        return {"type": _whole_or_none if types.NoneType in kinds else _whole, "metavar": "N"}
    return {"type": _number, "metavar": "X"}


def _reader(convert: Callable[[str], Any], wanted: str) -> Callable[[str], Any]:
    """`convert`, whose ValueError becomes argparse's own, naming the value and what is wanted."""

    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return read


def _read_biases(text: str) -> dict[int, float]:
    """ID=BIAS, or a JSON object of them."""
    if text.lstrip().startswith("{"):
        return biases(json.loads(text))
    token_id, _, bias = text.partition("=")
    return {int(token_id): float(bias)}


def biases(value: Mapping[str, Any]) -> dict[int, float]:
    """A logit_bias out of JSON, whose keys are strings; ValueError for one that is no whole number."""
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except ValueError as error:
        raise ValueError(f"logit_bias maps token ids to numbers, not {value!r:.60}") from error


class _Merge(argparse.Action):
    """Merges the dicts of a repeated flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


_whole = _reader(int, "a whole number")
_whole_or_auto = _reader(lambda text: text if text == "auto" else int(text), "a whole number or auto")
_whole_or_none = _reader(lambda text: None if text.lower() == "none" else int(text), "a whole number or none")
_number = _reader(float, "a number")
_token_ids = _reader(lambda text: [int(i) for i in text.split(",")], "token ids with commas between them")
_biases = _reader(_read_biases, "ID=BIAS or a JSON object of token ids and numbers")

# One value to a flag: a flag that took several would swallow the prompt behind it.
_IDS = {"action": "extend", "type": _token_ids, "metavar": "ID,ID,..."}
_SPECIAL: dict[str, dict[str, Any]] = {
    "max_num_batched_tokens": {"type": _whole_or_auto, "metavar": "N"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": _IDS,
    "allowed_token_ids": _IDS,
    "logit_bias": {"action": _Merge, "type": _biases, "metavar": "ID=BIAS"},
}
