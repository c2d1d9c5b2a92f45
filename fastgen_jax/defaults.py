"""What an engine chooses when it is told nothing: dtype, sizes, sampling, where compiled programs are kept."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

MAX_NUM_SEQS = 256

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""Fields of generation_config.json that count only where it says `do_sample`."""


def dtype() -> str:
    """The run dtype: bfloat16 on a GPU; float32 on a CPU, where it is as fast and gives the reference's tokens."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def cache_dir() -> Path:
    """The user's cache folder for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgen_jax"


def enable_compile_cache() -> None:
    """Keep every compiled program on disk, the small ones too, unless the caller has set up a cache already."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields from a generation_config.json."""
    given = {name: value for name, value in generation_config.items() if value is not None}
    fields = {name: given[name] for name in ("repetition_penalty",) if name in given}
    if "max_new_tokens" in given:
        fields["max_tokens"] = given["max_new_tokens"]
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
