"""A benchmark's results as PNG files, drawn with matplotlib, the extra `plots`."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastgen_jax.bench.metrics import summarize
from fastgen_jax.bench.result import Results, Run
from fastgen_jax.bench.workload import CLOSED, LONG_PROMPT

MAX_STEPS = 300
"""Steps in a plot of their composition."""

DPI = 120
COLORS = ("tab:blue", "tab:orange", "lightgrey")
"""Of decode tokens, prompt tokens and padding."""


def require() -> Any:
    """matplotlib, drawing to files; ValueError where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plots needs an extra: pip install 'fastgen-jax[plots]'") from error
    matplotlib.use("Agg")
    return matplotlib


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the plots that the runs have figures for; their paths."""
    require()
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[tuple[str, Callable[[Results], Any]]] = [
        ("throughput_latency.png", throughput_against_latency),
        ("effective_throughput.png", effective_throughput),
        ("token_gaps.png", token_gaps),
        ("batch_composition.png", batch_composition),
    ]
    written = []
    for name, figure_of in figures:
        if (figure := figure_of(results)) is not None:
            figure.savefig(folder / name, dpi=DPI)
            written.append(folder / name)
    return written


def throughput_against_latency(results: Results) -> Any:
    """Mean latency over requests/s, a line for each system, its points labelled with clients or rates."""
    runs = [
        run for run in results.runs if run.load.kind != LONG_PROMPT and summarize(run.records).latency_mean is not None
    ]
    if not runs:
        return None
    figure, ((axes,),) = _figure(1, 1)
    for system in _systems(runs):
        mine = [run for run in runs if run.system == system]
        xs = [summarize(run.records).requests_per_s for run in mine]
        ys = [summarize(run.records).latency_mean for run in mine]
        axes.plot(xs, ys, marker="o", label=system)
        for run, x, y in zip(mine, xs, ys, strict=True):
            label = str(run.load.clients) if run.load.kind == CLOSED else f"{run.load.rate:g}/s"
            axes.annotate(label, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(xlabel="throughput, requests/s", ylabel="mean latency, s", xlim=(0, None), ylim=(0, None))
    axes.set_title("Throughput against latency, by number of clients or rate")
    axes.legend()
    return figure


def effective_throughput(results: Results) -> Any:
    """Requests/s that meet each SLA, over the clients of the closed loop."""
    runs = [run for run in results.runs if run.load.kind == CLOSED]
    if not runs or not results.limits.slas:
        return None
    figure, (row,) = _figure(1, len(results.limits.slas))
    for axes, sla in zip(row, results.limits.slas, strict=True):
        for system in _systems(runs):
            mine = [run for run in runs if run.system == system]
            ys = [run.effective_throughput(sla, results.limits) for run in mine]
            axes.plot([run.load.clients for run in mine], ys, marker="o", label=system)
        axes.set(title=f"SLA {sla:g} tokens/s", xlabel="clients", ylim=(0, None))
    row[0].set_ylabel("effective throughput, requests/s")
    row[0].legend()
    return figure


def token_gaps(results: Results) -> Any:
    """Every gap of the decodes over time, around a long prompt's arrival; a row for each system."""
    runs = [run for run in results.runs if run.load.kind == LONG_PROMPT]
    if not runs:
        return None
    systems, numbers = _systems(runs), sorted({run.load.clients for run in runs})
    figure, grid = _figure(len(systems), len(numbers), sharey=True)
    for run in runs:
        axes = grid[systems.index(run.system)][numbers.index(run.load.clients)]
        *decodes, long = run.records
        start = min(record.sent for record in run.records)
        gaps = [pair for record in decodes for pair in pairwise(record.token_times)]
        axes.plot([b - start for _, b in gaps], [(b - a) * 1e3 for a, b in gaps], ".", markersize=3)
        first_token = long.token_times[0] if long.token_times else long.sent
        label = f"prompt of {long.num_prompt_tokens} tokens"
        axes.axvspan(long.sent - start, first_token - start, alpha=0.2, label=label)
        axes.set(title=f"{run.system}, {run.load.clients} decodes", xlabel="s", ylabel="gap, ms")
        axes.legend()
    grid[0][0].set_ylim(bottom=0)  # last: it fixes the scale that all share
    return figure


def batch_composition(results: Results) -> Any:
    """What the steps of each system's busiest run computed."""
    runs = [run for run in results.runs if run.steps]
    if not runs:
        return None
    systems = _systems(runs)
    figure, grid = _figure(len(systems), 1, sharey=True)
    for (axes,), system in zip(grid, systems, strict=True):
        # The last one is the busiest: points are listed by their load.
        run = [run for run in runs if run.system == system][-1]
        steps = run.steps[:MAX_STEPS]
        parts = [[step.decode for step in steps], [step.prompt for step in steps], [step.padding for step in steps]]
        axes.stackplot(range(len(steps)), *parts, labels=["decode", "prompt", "padding"], colors=COLORS, step="mid")
        axes.set(title=f"{system}, {run.load.title}", xlabel="step", ylabel="tokens")
        axes.legend(loc="upper right")
    return figure


def _figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure, and its axes [rows][columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 4.5 * columns if columns > 1 else 8, 1 + 3.5 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _systems(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.system for run in runs))
