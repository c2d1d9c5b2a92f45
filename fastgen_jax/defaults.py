"""What an engine chooses when it is told nothing: dtype, sizes, sampling, where compiled programs are kept."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from fastgen_jax.machine import cache_dir

MAX_NUM_SEQS = 256

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""Fields of generation_config.json that count only where it says `do_sample`."""


def dtype() -> str:
    """The run dtype: bfloat16 on a GPU; float32 on a CPU, where it is as fast and gives the reference's tokens."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def enable_compile_cache() -> None:
    """Keep every compiled program on disk, the small ones too, unless the caller has set up a cache already."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


NOT_SUPPORTED = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "typical_p": 1.0,
}
"""Fields of generation_config.json that change what is generated and have no counterpart -> the value that is off."""


def sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields from a generation_config.json; a warning names what it asks for and we cannot do.

    Only what the file says counts, not the defaults that transformers has for the rest (such as top_k 50).
    """
    given = {name: value for name, value in generation_config.items() if value is not None}
    ignored = {name: given[name] for name, off in NOT_SUPPORTED.items() if name in given and given[name] != off}
    if ignored:
        shown = ", ".join(f"{name}={value!r:.40}" for name, value in ignored.items())
        warnings.warn(f"generation_config.json asks for {shown}, which is not supported and left out", stacklevel=2)
    fields = {name: given[name] for name in ("repetition_penalty",) if name in given}
    for theirs, ours in (("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens")):
        if theirs in given:
            fields[ours] = given[theirs]
    if given.get("do_sample"):
        fields |= {"temperature": 1.0} | {name: given[name] for name in SAMPLING_FIELDS if name in given}
    return fields


def eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The EOS tokens of the first of `sources` (generation_config.json, config.json, ...) that has any."""
    for source in sources:
        eos = source.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return ()
