"""The token budget that chooses itself: time a step of each bucket, find where throughput stops growing.

Throughput against the tokens of a step is a concave curve (arXiv 2401.08671, section 3): once the hardware is busy,
a larger step takes longer and brings nothing. The smallest step that is busy, its knee, is the budget, unless one is
given, or a limit on how long a step may take.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from fastgen_jax.machine import cpu_model
from fastgen_jax.params import quantization
from fastgen_jax.progress import bar
from fastgen_jax.runner import ModelRunner
from fastgen_jax.step_times import Steps
from fastgen_jax.types import UNTUNED_BUDGET, EngineConfig

LARGEST = 2048
"""Tokens of the largest step that is timed."""

ENOUGH = 0.95
"""The share of the best throughput at which a step counts as busy."""

FOLDER = "step_curves"


@dataclass(frozen=True)
class Curve:
    """Seconds of a step of prompt tokens, by its tokens, from small to large: one for each bucket that was timed."""

    seconds: Mapping[int, float]

    def tokens_per_s(self) -> dict[int, float]:
        return {tokens: tokens / seconds for tokens, seconds in self.seconds.items()}

    def knee(self) -> int:
        """The smallest step whose throughput is all but the best."""
        rates = self.tokens_per_s()
        return next(tokens for tokens, rate in rates.items() if rate >= ENOUGH * max(rates.values()))

    def choose(self, max_step_ms: float | None = None, at_least: int = 1) -> int:
        """The budget: the knee, or the largest step timed that stays within `max_step_ms`.

        A step beyond the knee brings hardly any throughput, but more of it is prompts: where requests queue for their
        first token and gaps may be longer, they wait less.

        at_least: sequences that a step must have a token for. Where that or the smallest step takes longer than
            allowed, it is taken nevertheless, with a warning.
        """
        steps = [tokens for tokens in self.seconds if tokens >= at_least]
        if not steps:
            return at_least
        if max_step_ms is None:
            return max(self.knee(), steps[0])
        within = [tokens for tokens in steps if self.seconds[tokens] * 1e3 <= max_step_ms]
        if not within:
            took = self.seconds[steps[0]] * 1e3
            warnings.warn(
                f"max_step_ms={max_step_ms:g} cannot be kept: a step of {steps[0]} tokens takes {took:.1f} ms",
                stacklevel=2,
            )
        return within[-1] if within else steps[0]


def largest(config: EngineConfig) -> int:
    """Tokens of the largest step that an engine may come to run."""
    if config.max_num_batched_tokens != "auto":
        return config.max_num_batched_tokens
    return max(LARGEST, config.max_num_seqs or 0)


def choose(curve: Curve | None, config: EngineConfig) -> int:
    """The token budget of an engine: its config's, or what its curve says."""
    if config.max_num_batched_tokens != "auto":
        return config.max_num_batched_tokens
    at_least = config.max_num_seqs or 1
    return max(UNTUNED_BUDGET, at_least) if curve is None else curve.choose(config.max_step_ms, at_least)


def tune(runner: ModelRunner, config: EngineConfig, show_progress: bool | None = None) -> Curve | None:
    """The curve of an engine's steps: kept from before, else measured now, on a runner that nobody uses yet.

    None where the budget is given, and where nothing is kept and `warm_up` is off. Where it is measured, programs are
    compiled first.
    """
    if config.max_num_batched_tokens != "auto":
        return None
    name = key(runner)
    curve = read(name)
    if curve is not None or not config.warm_up:
        return curve
    steps, longest = Steps(runner), runner.max_model_len - 1
    layout, buckets = runner.programs.layout, runner.programs.buckets

    def seconds_of(tokens: int) -> float:
        """A step of one prompt, or of several where one cannot be so long."""
        full, rest = divmod(tokens, longest)
        return steps.seconds([(longest, 0)] * full + [(rest, 0)] * (rest > 0))

    buckets = [bucket for bucket in buckets if bucket <= layout.max_num_seqs * longest]
    if runner.compiles_at_once:  # the largest may not be timed; together they are ready sooner nevertheless
        keys = [("sample", runner.programs.row_buckets[0]), *(("backbone", bucket) for bucket in buckets)]
        with bar("compiling", len(keys), show_progress, "programs") as advance:
            runner.compile_all(keys, advance)
    with bar("timing steps", 2 * len(buckets), show_progress, "sizes") as advance:
        curve = measure(buckets, seconds_of, advance)
    write(name, curve)
    return curve


def measure(buckets: list[int], seconds_of: Callable[[int], float], advance: Callable[[int], None]) -> Curve:
    """Time steps from the smallest bucket up, until two in a row bring no more throughput than those before.

    Then each once more, and the less counts: a machine may have been busy with something else for a while, and where
    the curve is flat that alone would choose. seconds_of: seconds of a step of so many tokens. advance: called with 1
    after each.
    """
    seconds: dict[int, float] = {}
    best, num_worse = 0.0, 0
    for bucket in buckets:
        seconds[bucket] = seconds_of(bucket)
        advance(1)
        rate = bucket / seconds[bucket]
        num_worse = 0 if ENOUGH * rate > best else num_worse + 1
        best = max(best, rate)
        if num_worse == 2:
            break
    for bucket in seconds:
        seconds[bucket] = min(seconds[bucket], seconds_of(bucket))
        advance(1)
    return Curve(seconds)


def key(runner: ModelRunner) -> dict[str, str]:
    """What a curve depends on, for its place in the cache."""
    device, size = jax.devices()[0], runner.model.shards.size
    machine = cpu_model() + f" x {os.cpu_count()}" if device.platform == "cpu" else ""
    return {
        "model": repr(runner.model.config),
        "backend": runner.model.backend.NAME,
        "layout": repr(runner.programs.layout),
        "dtype": str(runner.dtype),
        "quantization": str(quantization(runner.params)),
        "kv_dtype": str(runner.kv_dtype),
        "device": f"{device.device_kind} {machine}".strip() + (f" x {size}" if size > 1 else ""),
        "jax": jax.__version__,
    }


def read(key: Mapping[str, str]) -> Curve | None:
    """The curve kept for `key`, if there is one that can be read."""
    path = _path(key)
    try:
        kept = json.loads(path.read_text()) if path else {}
        if kept.get("key") != dict(key):
            return None
        return Curve({int(tokens): float(seconds) for tokens, seconds in kept["seconds"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write(key: Mapping[str, str], curve: Curve) -> None:
    """Keep a curve; where that cannot be done, it will be measured again."""
    path = _path(key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"key": dict(key), "seconds": curve.seconds}, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return


def _path(key: Mapping[str, str]) -> Path | None:
    """Where a curve is kept: beside the compiled programs, and nowhere if those are not kept, or not on a disk."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or "://" in folder:
        return None
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / FOLDER / f"{name}.json"
