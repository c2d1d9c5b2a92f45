"""The benchmark's metrics, worked by hand."""

import math

import pytest

from fastgen_jax.bench.metrics import (
    Record,
    Summary,
    duration,
    effective_throughput,
    goodput,
    meets_sla,
    moving_averages,
    percentile,
    summarize,
)

# Latency 4, t0 1, gaps 1 and 2; latency 3, t0 3, no gaps; two that failed, one of them late.
LONG = Record(0.0, 512, (1.0, 2.0, 4.0))
SINGLE = Record(1.0, 1536, (4.0,))
BROKEN = Record(2.0, 512, (3.0, 10.0), "it broke off")
REFUSED = Record(3.0, 512, (), "refused")
RECORDS = [LONG, SINGLE, BROKEN, REFUSED]


def test_a_runs_figures():
    assert summarize(RECORDS) == Summary(
        requests=4,
        failed=2,
        duration=10.0,
        requests_per_s=0.2,
        output_tokens_per_s=0.4,
        latency_mean=3.5,
        ttft_mean=2.0,
        ttft_p50=2.0,
        ttft_p95=pytest.approx(2.9),
        gap_p50=1.5,
        gap_p90=pytest.approx(1.9),
        gap_p95=pytest.approx(1.95),
        gap_p99=pytest.approx(1.99),
    )


@pytest.mark.parametrize(("records", "failed"), [([], 0), ([REFUSED], 1)])
def test_nothing_has_no_statistics(records, failed):
    nothing = dict.fromkeys(
        ("latency_mean", "ttft_mean", "ttft_p50", "ttft_p95", "gap_p50", "gap_p90", "gap_p95", "gap_p99")
    )
    assert summarize(records) == Summary(len(records), failed, 0.0, 0.0, 0.0, **nothing)
    assert effective_throughput(records, 2) == 0
    assert goodput(records, ttft_limit=1) == 0


def test_one_request_of_one_token_has_no_gaps():
    found = summarize([SINGLE])
    assert (found.latency_mean, found.ttft_p95, found.gap_p50) == (3.0, 3.0, None)
    assert SINGLE.tpot == 0


def test_joined_tokens_are_counted_as_the_server_counts_them():
    record = Record(0.0, 8, (1.0, 2.0), num_output_tokens=6)
    assert summarize([record]).output_tokens_per_s == 3.0
    assert record.gaps == [1.0]


PERCENTILES = [
    ([1, 2, 3, 4], 0, 1),
    ([4, 3, 2, 1], 50, 2.5),
    ([1, 2, 3, 4], 90, 3.7),
    ([1, 2, 3, 4], 100, 4),
    ([10, 20, 30, 40, 50], 25, 20),
    ([7], 99, 7),
    ([], 50, None),
]


@pytest.mark.parametrize(("values", "q", "expected"), PERCENTILES)
def test_percentiles_are_interpolated(values, q, expected):
    assert percentile(values, q) == (None if expected is None else pytest.approx(expected))


def test_duration_is_from_the_first_start_to_the_last_end():
    assert duration([SINGLE, LONG]) == 4.0
    assert duration([REFUSED, SINGLE]) == 3.0


def test_moving_averages():
    # keep = 15/17: N = 1, 2 + 15/17 = 49/17, 4 + 15/17 * 49/17 = 1891/289; D = 1, 32/17, 769/289.
    assert moving_averages([1, 2, 4]) == pytest.approx([1, 49 / 32, 1891 / 769])
    assert moving_averages([]) == []


def paced(gaps, *, num_prompt=1024, ttft=2.0):
    times = [ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Record(0.0, num_prompt, tuple(times))


SLAS = [
    ("t0 exactly at the limit passes", paced([], ttft=2.0), 4, True),
    ("t0 above it fails", paced([], ttft=2.001), 4, False),
    ("gaps exactly at the limit fail", paced([0.25, 0.25]), 4, False),
    ("gaps below it pass", paced([0.25, 0.25]), 3.9, True),
    ("one token has no gap to fail by", SINGLE, 1000, True),
    ("one long gap among short ones passes", paced([0.1] * 15 + [0.5] + [0.1] * 15), 4, True),
    ("unless it is the first", paced([0.5] + [0.1] * 30), 4, False),
    ("later averages count too", paced([0.1] * 15 + [0.5] * 9), 4, False),
    ("a failed request fails", BROKEN, 0.001, False),
    ("a refused request fails", REFUSED, 0.001, False),
]


@pytest.mark.parametrize(("record", "sla", "expected"), [row[1:] for row in SLAS], ids=[row[0] for row in SLAS])
def test_an_sla(record, sla, expected):
    assert meets_sla(record, sla) is expected


def test_the_prompt_rate_is_a_parameter():
    assert meets_sla(paced([], ttft=4.0), 4, prompt_sla=256)
    assert not meets_sla(paced([], ttft=4.0), 4, prompt_sla=257)


def test_effective_throughput_is_the_share_that_passes():
    # LONG and SINGLE have t0 exactly at their limits; LONG's averages are 1 and 49/32. 10 s, 4 requests.
    assert effective_throughput(RECORDS, 0.5) == pytest.approx(4 / 10 * 2 / 4)
    assert effective_throughput(RECORDS, 0.66) == pytest.approx(4 / 10 * 1 / 4)
    assert effective_throughput(RECORDS, 0.5, prompt_sla=600) == 0


GOODPUT = [
    ({}, 0.2),
    ({"ttft_limit": 1.0}, 0.1),
    ({"ttft_limit": 0.99}, 0.0),
    ({"tpot_limit": 1.5}, 0.2),
    ({"tpot_limit": 1.49}, 0.1),
    ({"ttft_limit": 3.0, "tpot_limit": 1.5}, 0.2),
]


@pytest.mark.parametrize(("limits", "expected"), GOODPUT)
def test_goodput(limits, expected):
    assert goodput(RECORDS, **limits) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_an_sla_is_a_rate(bad):
    with pytest.raises(ValueError, match=f"an SLA of {bad} tokens/s is impossible; it must be a number above 0"):
        meets_sla(LONG, bad)
    with pytest.raises(ValueError, match="it must be a number above 0"):
        effective_throughput([], bad)


def test_a_limit_is_a_time():
    with pytest.raises(ValueError, match="a TPOT limit of 0 s is impossible; it must be above 0"):
        goodput([], tpot_limit=0)
