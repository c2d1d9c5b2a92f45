"""What the simulated grid comes to: policies compared case by case, in tables and a plot, beside the paper."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from fastgen_jax.bench.grid import SLAS, Case
from fastgen_jax.bench.plots import DPI, require
from fastgen_jax.types import POLICIES

OURS, *BASELINES = POLICIES
GAP_CLIENTS = 16
LATENCY_S = 9.0
RATE = 1.2

PAPER_CASE = Case("llama2-70b", "a100-80", 4, 2600, 60)
PAPER_GAP_CASE = Case("llama2-70b", "a100-80", 4, 2600, 128)
"""What the figures of the paper and its announcement, FastGen against vLLM 0.2, are set beside. They do not all name
their model or their lengths (docs/simulate.md)."""

CASE_HEAD = ("model, GPUs", "prompt/output")
EFFECTIVE_HEAD = (*CASE_HEAD, "tokens/s", *POLICIES, *(f"over {name}" for name in BASELINES))
LATENCY_HEAD = (*CASE_HEAD, "requests/s", OURS, "prefill_first", "ratio")
GAP_HEAD = (*CASE_HEAD, *POLICIES, *(f"{name} over it" for name in BASELINES))
PAPER_HEAD = ("llama2-70b on 4 a100-80", "paper", "ratio", "simulated", "ratio")

Results = Sequence[dict[str, Any]]


def by_case(results: Results) -> Iterator[tuple[Case, dict[str, list[dict[str, Any]]]]]:
    """Each case, with the points of each policy by ascending clients."""

    def case_of(result: dict[str, Any]) -> Case:
        return Case(*(result[name] for name in ("model", "gpu", "tp", "prompt_mean", "output_mean")))

    for case, mine in groupby(results, key=case_of):
        points = list(mine)
        yield case, {name: [point for point in points if point["policy"] == name] for name in POLICIES}


def best_effective(curve: Results, sla: int) -> float:
    """The highest effective throughput of any number of clients."""
    return max(point["effective"][str(sla)] for point in curve)


def crossing(curve: Results, x: str, y: str, value: float) -> float | None:
    """`y` where `x` first is `value` as the clients grow, on the line between two points; None if it never is."""
    for before, after in pairwise(curve):
        low, high = before[x], after[x]
        if low <= value <= high:
            share = (value - low) / (high - low) if high > low else 0.0
            return before[y] + share * (after[y] - before[y])
    return None


def latencies(ours: Results, other: Results) -> tuple[float, float, float] | None:
    """The highest throughput that both reach, and the mean latency of each at it."""
    rate = min(max(point["requests_per_s"] for point in curve) for curve in (ours, other))
    mine, theirs = (crossing(curve, "requests_per_s", "latency_mean", rate) for curve in (ours, other))
    return None if mine is None or theirs is None else (rate, mine, theirs)


def gap_p95(curve: Results, clients: int = GAP_CLIENTS) -> float:
    return next(point["gap_p95"] for point in curve if point["clients"] == clients)


def names(case: Case) -> tuple[str, str]:
    gpus = f"{case.tp} {case.gpu}" if case.tp > 1 else case.gpu
    return f"{case.model}, {gpus}", f"{case.prompt_mean}/{case.output_mean}"


def effective_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for case, curves in by_case(results):
        for sla in SLAS:
            best = {name: best_effective(curves[name], sla) for name in POLICIES}
            ratios = (ratio(best[OURS], best[name]) for name in BASELINES)
            yield *names(case), str(sla), *(f"{best[name]:.2f}" for name in POLICIES), *ratios


def latency_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for case, curves in by_case(results):
        if (found := latencies(curves[OURS], curves["prefill_first"])) is not None:
            rate, ours, theirs = found
            yield *names(case), f"{rate:.2f}", f"{ours:.2f} s", f"{theirs:.2f} s", ratio(theirs, ours)


def gap_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for case, curves in by_case(results):
        gaps = {name: gap_p95(curves[name]) for name in POLICIES}
        ratios = (ratio(gaps[name], gaps[OURS]) for name in BASELINES)
        yield *names(case), *(f"{gaps[name] * 1e3:.0f} ms" for name in POLICIES), *ratios


def paper_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """What the paper and its announcement say of FastGen and vLLM, beside splitfuse and prefill_first."""
    cases = dict(by_case(results))
    if PAPER_CASE not in cases or PAPER_GAP_CASE not in cases:
        return
    ours, other = (cases[PAPER_CASE][name] for name in (OURS, "prefill_first"))
    effective = [best_effective(curve, 4) for curve in (ours, other)]
    yield _paper_row("effective requests/s at 4 tokens/s, 2600/60", (1.42, 0.63), effective)
    rates = [crossing(curve, "latency_mean", "requests_per_s", LATENCY_S) for curve in (ours, other)]
    yield _paper_row(f"requests/s at a mean latency of {LATENCY_S:g} s, 2600/60", (1.36, 0.67), rates)
    seconds = [crossing(curve, "requests_per_s", "latency_mean", RATE) for curve in (ours, other)]
    yield _paper_row(f"mean latency in s at {RATE} requests/s, 2600/60", (7, 14), seconds)
    gaps = [gap_p95(cases[PAPER_GAP_CASE][name]) for name in (OURS, "prefill_first")]
    row = _paper_row(f"P95 gap in s at {GAP_CLIENTS} clients, 2600/128", (1, 3.7), gaps)
    yield row[0], "-", *row[2:]


def _paper_row(name: str, paper: tuple[float, float], ours: Sequence[float | None]) -> tuple[str, ...]:
    """Figures of FastGen and vLLM, then of splitfuse and prefill_first; ratios are the larger over the smaller."""

    def cells(pair: Sequence[float | None]) -> tuple[str, str]:
        first, second = pair
        if first is None or second is None:
            return "-", "-"
        return f"{first:.2f}, {second:.2f}", ratio(max(first, second), min(first, second))

    return name, *cells(paper), *cells(ours)


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else "-"


def sections(results: Results) -> Iterator[tuple[str, tuple[str, ...], Iterable[tuple[str, ...]]]]:
    """Title, head and rows of each table."""
    yield "The paper's figures (FastGen, vLLM 0.2) and ours (splitfuse, prefill_first)", PAPER_HEAD, paper_rows(results)
    yield "Highest effective throughput of any number of clients, requests/s", EFFECTIVE_HEAD, effective_rows(results)
    yield "Mean latency at the highest throughput that both reach", LATENCY_HEAD, latency_rows(results)
    yield f"P95 of the gaps between tokens at {GAP_CLIENTS} clients", GAP_HEAD, gap_rows(results)


def plot(results: Results, path: Path, sla: int = 4) -> None:
    """Effective throughput over the clients, a panel for each case."""
    require()
    from matplotlib.figure import Figure

    cases = list(by_case(results))
    columns = len({names(case)[1] for case, _ in cases})
    rows = -(-len(cases) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes, (case, curves) in zip(grid.flat, cases, strict=False):
        for name, curve in curves.items():
            clients = [point["clients"] for point in curve]
            axes.plot(clients, [point["effective"][str(sla)] for point in curve], marker=".", label=name)
        axes.set_title("\n".join(names(case)), fontsize=9)
        axes.set_ylim(0, None)
    grid[0][0].legend(fontsize=8)
    figure.supxlabel("clients")
    figure.supylabel(f"effective throughput at {sla} tokens/s, requests/s")
    figure.savefig(path, dpi=DPI)
