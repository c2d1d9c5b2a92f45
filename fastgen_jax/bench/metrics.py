"""What a run of a benchmark comes to, by the definitions of FastGen's own benchmark. Pure functions of records.

A request that failed passes no limit and stays out of every statistic of latency; it counts among the requests
that an SLA's share is taken of. Statistics of nothing are None, rates over no time 0.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

EMA_SPAN = 16
"""Of the moving average of gaps: a = 2 / (EMA_SPAN + 1)."""

PROMPT_SLA = 512.0
"""Prompt tokens a second that the time to the first token may take."""


@dataclass(frozen=True)
class Record:
    """What became of one request; times in seconds on the target's clock.

    sent: when the client sent it, or, in an open loop, when it was due.
    token_times: when each token came, in order; for a target that joins tokens, when each piece came.
    error: a sentence if the request failed; the tokens it got until then are kept.
    num_output_tokens: how many tokens the pieces were; None is one each.
    """

    sent: float
    num_prompt_tokens: int
    token_times: tuple[float, ...]
    error: str | None = None
    num_output_tokens: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and bool(self.token_times)

    @property
    def end(self) -> float:
        """When its last token came; when it was sent if none did."""
        return self.token_times[-1] if self.token_times else self.sent

    @property
    def latency(self) -> float:
        return self.end - self.sent

    @property
    def ttft(self) -> float:
        """Seconds to the first token, t0; infinite if none came."""
        return self.token_times[0] - self.sent if self.token_times else math.inf

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens: none for a request of one token."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot(self) -> float:
        """Time per output token after the first: the mean gap; 0 for a request of one token."""
        gaps = self.gaps
        return sum(gaps) / len(gaps) if gaps else 0.0

    @property
    def output_tokens(self) -> int:
        return len(self.token_times) if self.num_output_tokens is None else self.num_output_tokens


@dataclass(frozen=True)
class Summary:
    """A run in figures: seconds, requests/s, output tokens/s. Field names are those of the JSON."""

    requests: int
    failed: int
    duration: float
    requests_per_s: float
    output_tokens_per_s: float
    latency_mean: float | None
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    gap_p50: float | None
    gap_p90: float | None
    gap_p95: float | None
    gap_p99: float | None


def summarize(records: Sequence[Record]) -> Summary:
    """The figures of a run; rates are of the requests that completed."""
    complete = [record for record in records if record.is_complete]
    seconds = duration(records)
    ttfts = sorted(record.ttft for record in complete)
    gaps = sorted(gap for record in complete for gap in record.gaps)
    return Summary(
        requests=len(records),
        failed=len(records) - len(complete),
        duration=seconds,
        requests_per_s=_rate(len(complete), seconds),
        output_tokens_per_s=_rate(sum(record.output_tokens for record in complete), seconds),
        latency_mean=mean([record.latency for record in complete]),
        ttft_mean=mean(ttfts),
        ttft_p50=percentile(ttfts, 50),
        ttft_p95=percentile(ttfts, 95),
        gap_p50=percentile(gaps, 50),
        gap_p90=percentile(gaps, 90),
        gap_p95=percentile(gaps, 95),
        gap_p99=percentile(gaps, 99),
    )


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-th percentile, 0 to 100, by linear interpolation: of n sorted values, the one at (n - 1) q / 100."""
    if not 0 <= q <= 100:
        raise ValueError(f"there is no percentile {q}; it must be from 0 to 100")
    if not (ordered := sorted(values)):
        return None
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def duration(records: Sequence[Record]) -> float:
    """Seconds from the first start to the last end."""
    if not records:
        return 0.0
    return max(record.end for record in records) - min(record.sent for record in records)


def moving_averages(gaps: Iterable[float]) -> list[float]:
    """EMA_k = N_k / D_k with N_k = x_k + (1 - a) N_(k-1), D_k = 1 + (1 - a) D_(k-1), a = 2 / 17."""
    keep = 1 - 2 / (EMA_SPAN + 1)
    numerator = denominator = 0.0
    averages = []
    for gap in gaps:
        numerator = gap + keep * numerator
        denominator = 1 + keep * denominator
        averages.append(numerator / denominator)
    return averages


def meets_sla(record: Record, sla: float, prompt_sla: float = PROMPT_SLA) -> bool:
    """Whether t0 <= prompt tokens / `prompt_sla`, and every moving average of its gaps < 1 / `sla`.

    sla, prompt_sla: tokens/s. A request of one token has no gaps to fail by.
    """
    check_sla(sla)
    check_sla(prompt_sla)
    if not record.is_complete or record.ttft > record.num_prompt_tokens / prompt_sla:
        return False
    return all(average < 1 / sla for average in moving_averages(record.gaps))


def effective_throughput(records: Sequence[Record], sla: float, prompt_sla: float = PROMPT_SLA) -> float:
    """Requests/s that meet the SLA: n / (last end - first start) x the share of the n requests that pass."""
    check_sla(sla)
    check_sla(prompt_sla)
    return _rate_of(records, lambda record: meets_sla(record, sla, prompt_sla))


def goodput(records: Sequence[Record], *, ttft_limit: float | None = None, tpot_limit: float | None = None) -> float:
    """Requests/s with t0 <= `ttft_limit` and mean gap <= `tpot_limit`, both in seconds; None is no limit."""
    ttft_limit = check_limit("TTFT", ttft_limit)
    tpot_limit = check_limit("TPOT", tpot_limit)
    return _rate_of(
        records, lambda record: record.is_complete and record.ttft <= ttft_limit and record.tpot <= tpot_limit
    )


def check_sla(sla: float) -> None:
    """ValueError for an SLA that is no rate."""
    if not 0 < sla < math.inf:
        raise ValueError(f"an SLA of {sla} tokens/s is impossible; it must be a number above 0")


def check_limit(name: str, limit: float | None) -> float:
    """A limit in seconds, None as infinity; ValueError unless it is above 0."""
    if limit is None:
        return math.inf
    if not limit > 0:
        raise ValueError(f"a {name} limit of {limit} s is impossible; it must be above 0")
    return limit


def _rate_of(records: Sequence[Record], passes: Callable[[Record], bool]) -> float:
    return _rate(sum(map(passes, records)), duration(records))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
