"""Runs the points of a benchmark on its systems: an engine's policies one after the other, or a server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from sys import stderr
from typing import Any

from fastgen_jax import progress
from fastgen_jax.bench.drive import Target
from fastgen_jax.bench.load import random_corpus
from fastgen_jax.bench.metrics import Record
from fastgen_jax.bench.result import Run
from fastgen_jax.bench.workload import Point, point_requests, run_point
from fastgen_jax.types import EngineConfig

PointsOf = Callable[[Sequence[int]], list[Point]]
"""A benchmark's points, given the corpus of the prompts. Lengths and arrivals do not depend on it."""


def engine_runs(
    model: str,
    revision: str | None,
    policies: Sequence[str],
    config: Mapping[str, Any],
    text: str,
    points_of: PointsOf,
    show_progress: bool | None,
) -> Iterator[Run]:
    """The runs of every policy on the same points, cut from `text`: an engine each, one after the other.

    config: fields of `EngineConfig` for all. ValueError for a policy or a request that cannot run.
    """
    lengths = points_of(random_corpus())
    configs = {policy: policy_config(policy, config, lengths) for policy in policies}
    for fields in configs.values():
        EngineConfig(**fields)
    for policy, fields in configs.items():
        yield from _policy_runs(model, revision, policy, fields, text, points_of, show_progress)


def policy_config(policy: str, config: Mapping[str, Any], points: Sequence[Point]) -> dict[str, Any]:
    """`config` for a policy: one that computes prompts whole gets a budget that holds the longest sequence."""
    if policy == "splitfuse":
        return {**config, "policy": policy}
    longest = max(len(request.prompt_token_ids) + request.max_tokens for request in point_requests(points))
    budget = config.get("max_num_batched_tokens", EngineConfig().max_num_batched_tokens)
    budget = max(budget, longest) if isinstance(budget, int) else longest
    return {**config, "policy": policy, "max_num_batched_tokens": budget}


def _policy_runs(
    model: str,
    revision: str | None,
    policy: str,
    config: Mapping[str, Any],
    text: str,
    points_of: PointsOf,
    show_progress: bool | None,
) -> Iterator[Run]:
    engine = load_engine(model, revision, config, show_progress)
    from fastgen_jax.bench.engine_target import EngineTarget, describe

    points = points_of(encode(engine.tokenizer, text))
    target = EngineTarget(engine)
    target.check(point_requests(points))
    for point in points:
        records = _run(target, point, policy, show_progress)
        start = min(record.sent for record in records)
        steps = tuple(step for step in target.steps if step.time >= start)
        yield Run(policy, point.load, records, steps, {"model": model, **describe(engine)})


def load_engine(model: str, revision: str | None, config: Mapping[str, Any], show_progress: bool | None) -> Any:
    """An `Engine`. Stdout is for the results, whatever a library has to say while it loads."""
    with redirect_stdout(stderr):
        from fastgen_jax import Engine

        return Engine.from_pretrained(model, revision=revision, show_progress=show_progress, **config)


def server_runs(
    url: str,
    model: str | None,
    name: str | None,
    tokenizer: Any,
    as_text: bool,
    text: str,
    points_of: PointsOf,
    show_progress: bool | None,
    api_key: str | None = None,
) -> Iterator[Run]:
    """The runs of a server, called `name`, until it is gone.

    tokenizer: cuts the prompts from `text`, which are sent as token ids, or as_text; without one, the prompts are
        random token ids.
    """
    from fastgen_jax.bench.http_target import HttpTarget

    points = points_of(random_corpus() if tokenizer is None else encode(tokenizer, text))
    with HttpTarget(url, model, tokenizer.decode if as_text else None, api_key) as target:
        system = name or target.model
        config = {"url": url, "model": target.model, "as_text": as_text}
        for point in points:
            yield Run(system, point.load, _run(target, point, system, show_progress), (), config)
            if target.gone:
                return


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without BOS and the like, which every prompt would begin with."""
    return tokenizer.encode(text, add_special_tokens=False)


def tokenizer_of(model: str, revision: str | None) -> Any:
    """The tokenizer of a model that need not be loaded."""
    with redirect_stdout(stderr):
        from fastgen_jax import checkpoint

        return checkpoint.resolve(model, revision=revision).tokenizer()


def _run(target: Target, point: Point, system: str, show_progress: bool | None) -> list[Record]:
    with progress.bar(f"{system}, {point.load.title}", point.num_to_run, show_progress, "requests") as advance:
        return run_point(target, point, advance)
