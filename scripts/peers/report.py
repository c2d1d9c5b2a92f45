"""The comparison as a table for people and as JSON."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from peers.workload import CASES

OURS = "fastgen"


@dataclass
class Result:
    """What one contestant did in one case and dtype.

    num_equal: how many of num_checked outputs were those of transformers' greedy generation in float32.
    seconds: wall time of each repetition, in the order they ran.
    """

    dtype: str
    case: str
    contestant: str
    num_equal: int
    num_checked: int
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Median over the repetitions."""
        return CASES[self.case].num_output_tokens / statistics.median(self.seconds)


def ratios(ours: Result, theirs: Result) -> list[float]:
    """How many times as fast we were, repetition by repetition: pairs that ran next to each other."""
    return [other / own for own, other in zip(ours.seconds, theirs.seconds, strict=False)]


def markdown(results: Iterable[Result]) -> str:
    """A table for each dtype, a row for each contestant in each case."""
    every = [result for result in results if result.seconds]
    tables = []
    for dtype in dict.fromkeys(result.dtype for result in every):
        lines = [
            f"### {dtype}",
            "",
            f"| case | contestant | output tokens/s | {OURS} is faster by (min..max) | as transformers |",
            "|---|---|---:|---:|---:|",
        ]
        lines += [_row(result, every) for result in every if result.dtype == dtype]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _row(result: Result, every: list[Result]) -> str:
    case = CASES[result.case]
    ours = [r for r in every if (r.dtype, r.case, r.contestant) == (result.dtype, result.case, OURS)]
    ratio = ""
    if ours and result.contestant != OURS and (pairs := ratios(ours[0], result)):
        ratio = f"{statistics.median(pairs):.2f} ({min(pairs):.2f}..{max(pairs):.2f})"
    equal = f"{result.num_equal}/{result.num_checked}"
    return f"| {case.name}: {case.title} | {result.contestant} | {result.tokens_per_second:.1f} | {ratio} | {equal} |"


def as_json(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One object a result: its fields, the case in words, its median tokens/s."""
    return [
        {
            "dtype": result.dtype,
            "case": result.case,
            "title": CASES[result.case].title,
            "contestant": result.contestant,
            "seconds": result.seconds,
            "output_tokens": CASES[result.case].num_output_tokens,
            "output_tokens_per_second": result.tokens_per_second if result.seconds else None,
            "equal": result.num_equal,
            "checked": result.num_checked,
        }
        for result in results
    ]
