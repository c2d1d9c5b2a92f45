"""A contestant's process: load once, then answer each batch of prompts with its tokens and its wall time.

Standard input and output carry one JSON object a line:

    -> nothing                                          <- {"versions": {"torch": "2.13.0"}, "load_seconds": 4.2}
    -> {"prompts": [[1, 2], [3]], "max_tokens": [8, 4]} <- {"seconds": 0.9, "outputs": [[...], [...]], "notes": []}

Whatever the contestant prints itself goes to standard error.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

KV_BYTES = 2 << 30
"""What every contestant may take for the keys and values of what is running."""

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, tokens to generate for each) -> the generated tokens of each; greedy, EOS ignored."""


@dataclass(frozen=True)
class Settings:
    """model: a Hugging Face folder. dtype: "float32" or "bfloat16", of weights, activations, keys and values."""

    model: Path
    dtype: str
    threads: int


@dataclass(frozen=True)
class Contestant:
    """generate: runs a batch. distributions: whose versions count. notes: what a reader of its figures must know."""

    generate: Generate
    distributions: tuple[str, ...]
    notes: list[str] = field(default_factory=list)


def kv_bytes_per_token(settings: Settings) -> int:
    """Bytes of one token's keys and values over all layers."""
    config = json.loads((settings.model / "config.json").read_text())
    itemsize = {"float32": 4, "bfloat16": 2}[settings.dtype]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize


def serve(load: Callable[[Settings], Contestant]) -> None:
    """Answer standard input until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    settings = Settings(**vars(parser.parse_args()))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    start = time.perf_counter()
    contestant = load(settings)
    versions = {name: metadata.version(name) for name in contestant.distributions}
    answer(versions=versions, load_seconds=time.perf_counter() - start)
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        outputs = contestant.generate(work["prompts"], work["max_tokens"])
        answer(seconds=time.perf_counter() - start, outputs=outputs, notes=contestant.notes)
    os._exit(0)  # some leave threads behind that would keep the process
