"""`fastgen bench --curve`: how long an engine's steps take, over their tokens and over their sequences."""

from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fastgen_jax.progress import bar

if TYPE_CHECKING:
    from fastgen_jax import Engine

REPEATS = 5


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: of one prompt by its tokens, and of `tokens` prompt tokens by the sequences they are cut into.

    knee: the smallest step whose throughput is all but the best. budget: the engine's max_num_batched_tokens.
    """

    by_tokens: dict[int, float]
    knee: int
    budget: int
    tokens: int
    by_sequences: dict[int, float]


def measure(engine: "Engine", show_progress: bool | None) -> StepTimes:
    """The engine's own curve, and steps of its budget in 1, 2, 4, ... sequences.

    ValueError for an engine whose budget was given: it has no curve.
    """
    from fastgen_jax.step_times import Steps

    if engine.step_curve is None:
        raise ValueError('--curve shows what max_num_batched_tokens="auto" goes by; leave that flag out')
    steps, tokens = Steps(engine._runner), engine.max_num_batched_tokens
    most = min(tokens, engine._runner.programs.layout.max_num_seqs)
    counts = list(takewhile(lambda count: count <= most, (1 << i for i in range(most.bit_length()))))
    by_sequences = {}
    with bar("timing steps", len(counts), show_progress, "steps") as advance:
        for count in counts:
            rows = [(tokens // count + (i < tokens % count), 0) for i in range(count)]
            if rows[0][0] < engine.max_model_len:
                by_sequences[count] = steps.seconds(rows, REPEATS)
            advance(1)
    return StepTimes(dict(engine.step_curve.seconds), engine.step_curve.knee(), tokens, tokens, by_sequences)


def show(times: StepTimes, out: TextIO) -> None:
    """Print both as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, width=None if out.isatty() else 120, highlight=False)
    table = Table("tokens", "ms", "tokens/s", "", title="A step of one prompt")
    for tokens, seconds in times.by_tokens.items():
        marks = ["knee"] * (tokens == times.knee) + ["the budget"] * (tokens == times.budget)
        table.add_row(f"{tokens:,}", f"{seconds * 1e3:.1f}", f"{tokens / seconds:,.0f}", ", ".join(marks))
    console.print(table)
    table = Table("sequences", "ms", title=f"A step of {times.tokens:,} prompt tokens")
    for count, seconds in times.by_sequences.items():
        table.add_row(f"{count:,}", f"{seconds * 1e3:.1f}")
    console.print(table)


def to_json(times: StepTimes, about: dict[str, Any]) -> dict[str, Any]:
    """Times and where they come from."""
    return {"about": about, **asdict(times)}


def draw(times: StepTimes, folder: Path) -> Path:
    """Both as plots in one PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [tokens / seconds for tokens, seconds in times.by_tokens.items()]
    left.plot(list(times.by_tokens), rates, marker="o")
    left.axvline(times.knee, color="tab:red", linestyle="--", label=f"knee: {times.knee}")
    left.set(xlabel="tokens in the step", ylabel="tokens/s", ylim=(0, None), title="Throughput of a step")
    left.legend()
    right.plot(list(times.by_sequences), [seconds * 1e3 for seconds in times.by_sequences.values()], marker="o")
    right.set(xlabel="sequences in the step", ylabel="ms", ylim=(0, None), title=f"A step of {times.tokens} tokens")
    right.set_xscale("log", base=2)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "step_curve.png", dpi=120)
    return folder / "step_curve.png"
