"""A benchmark's results as tables for people."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TextIO

from fastgen_jax.bench.metrics import Record, percentile, summarize
from fastgen_jax.bench.result import Results, Run
from fastgen_jax.bench.workload import LONG_PROMPT

WIDTH = 200
"""Columns of a table that does not go to a terminal."""

SHOWN_ERRORS = 3


def show(results: Results, out: TextIO) -> None:
    """Print the tables, and a line for each kind of failure."""
    from rich.console import Console

    console = Console(file=out, width=None if out.isatty() else WIDTH, highlight=False)
    loads = [run for run in results.runs if run.load.kind != LONG_PROMPT]
    arrivals = [run for run in results.runs if run.load.kind == LONG_PROMPT]
    if loads:
        console.print(_table(_load_columns(results), loads))
    if arrivals:
        console.print(_table(ARRIVAL_COLUMNS, arrivals))
    for line in failures(results.runs):
        console.print(line, markup=False, soft_wrap=True)


Column = tuple[str, Callable[[Run], str]]
"""A heading, and what stands below it."""


def _load_columns(results: Results) -> list[Column]:
    limits = results.limits
    columns: list[Column] = [
        ("system", lambda run: run.system),
        ("load", lambda run: run.load.title),
        ("requests", lambda run: str(len(run.records))),
        ("failed", lambda run: str(summarize(run.records).failed)),
        ("requests/s", lambda run: f"{summarize(run.records).requests_per_s:.3f}"),
        ("tokens/s", lambda run: f"{summarize(run.records).output_tokens_per_s:.1f}"),
        ("latency s", lambda run: seconds(summarize(run.records).latency_mean)),
        ("TTFT mean s", lambda run: seconds(summarize(run.records).ttft_mean)),
        ("P50", lambda run: seconds(summarize(run.records).ttft_p50)),
        ("P95", lambda run: seconds(summarize(run.records).ttft_p95)),
        ("gap P50 ms", lambda run: milliseconds(summarize(run.records).gap_p50)),
        ("P90", lambda run: milliseconds(summarize(run.records).gap_p90)),
        ("P95", lambda run: milliseconds(summarize(run.records).gap_p95)),
        ("P99", lambda run: milliseconds(summarize(run.records).gap_p99)),
    ]
    for sla in limits.slas:
        columns.append((f"eff. at {sla:g}", lambda run, sla=sla: f"{run.effective_throughput(sla, limits):.3f}"))  # type: ignore[misc]
    if limits.has_goodput:
        columns.append(("goodput", lambda run: f"{run.goodput(limits):.3f}"))
    return columns


ARRIVAL_COLUMNS: list[Column] = [
    ("system", lambda run: run.system),
    ("load", lambda run: run.load.title),
    ("failed", lambda run: str(summarize(run.records).failed)),
    ("long prompt: tokens", lambda run: str(run.records[-1].num_prompt_tokens)),
    ("TTFT s", lambda run: seconds(run.records[-1].ttft if run.records[-1].token_times else None)),
    ("decodes' gaps before: P50 ms", lambda run: milliseconds(percentile(gaps_around_arrival(run.records)[0], 50))),
    ("P95", lambda run: milliseconds(percentile(gaps_around_arrival(run.records)[0], 95))),
    ("meanwhile: P50 ms", lambda run: milliseconds(percentile(gaps_around_arrival(run.records)[1], 50))),
    ("P95", lambda run: milliseconds(percentile(gaps_around_arrival(run.records)[1], 95))),
    ("max", lambda run: milliseconds(percentile(gaps_around_arrival(run.records)[1], 100))),
]


def gaps_around_arrival(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """The decodes' gaps that ended before the long prompt, the last record, was sent; those until its first token."""
    *decodes, long = records
    before: list[float] = []
    meanwhile: list[float] = []
    for record in decodes:
        for earlier, later in pairwise(record.token_times):
            if later <= long.sent:
                before.append(later - earlier)
            elif long.token_times and earlier < long.token_times[0]:
                meanwhile.append(later - earlier)
    return before, meanwhile


def failures(runs: Iterable[Run]) -> list[str]:
    """A line for each kind of failure, the first few."""
    counts: dict[str, int] = {}
    for run in runs:
        for error in run.errors:
            counts[error] = counts.get(error, 0) + 1
    lines = [f"{count} failed: {error}" for error, count in list(counts.items())[:SHOWN_ERRORS]]
    if len(counts) > SHOWN_ERRORS:
        lines.append(f"and {len(counts) - SHOWN_ERRORS} other kinds of failure")
    return lines


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"


def _table(columns: Sequence[Column], runs: Sequence[Run]):  # type: ignore[no-untyped-def]
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="left" if i < 2 else "right", overflow="fold")
    for run in runs:
        table.add_row(*(cell(run) for _, cell in columns))
    return table
