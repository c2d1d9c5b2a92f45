"""What simulations found, as lines for people."""

from collections.abc import Iterator
from typing import Any

from fastgen_jax.bench.validate import COMPARED
from fastgen_jax.cli_plan import table


def capacity_lines(found: dict[str, Any]) -> Iterator[str]:
    """Of `capacity.capacity`."""
    sla = f"{found['sla']:g} tokens/s"
    if not found["max_rate"]:
        yield f"No rate meets {sla} for 99 % of the requests."
    else:
        at = found["at_max_rate"]
        yield f"{found['max_rate']:.2f} requests/s at most, so that 99 % of the requests meet {sla}. At that rate:"
        yield f"  time to the first token {at['ttft_mean']:.2f} s on average, P95 {at['ttft_p95']:.2f} s"
        yield f"  gaps between tokens P50 {at['gap_p50'] * 1e3:.1f} ms, P95 {at['gap_p95'] * 1e3:.1f} ms"
    if found["replicas"]:
        yield f"  {found['rate']:g} requests/s take {found['replicas']} of them"
    for name, key in (("max_num_batched_tokens", "by_budget"), ("block_size", "by_block_size")):
        yield ""
        rates = [(str(value), "-" if rate is None else f"{rate:.2f}") for value, rate in found[key].items()]
        yield from table((name, "requests/s"), rates)


def trace_lines(found: dict[str, Any]) -> Iterator[str]:
    """Of `replay.replay`."""
    summary = found["summary"]
    yield f"{summary['requests']:,} requests in {found['virtual_s']:,.1f} s of {found['steps']:,} steps"
    yield f"  {summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:,.0f} output tokens/s"
    yield f"  effective throughput at {found['sla']:g} tokens/s: {found['effective']:.2f} requests/s"
    yield f"  time to the first token {summary['ttft_mean']:.2f} s on average, P95 {summary['ttft_p95']:.2f} s"
    yield f"  gaps between tokens {_gaps(summary)}"
    yield f"  {found['cached_share']:.1%} of the prompt tokens found in the prefix cache"
    yield f"  {found['preemptions']:,} preemptions"
    yield f"  scheduling a step here, by tenths of the run: {', '.join(f'{us:.0f}' for us in found['host_us'])} us"


def _gaps(summary: dict[str, Any]) -> str:
    if summary["gap_p50"] is None:
        return "none: no output has two"
    return f"P50 {summary['gap_p50'] * 1e3:.1f} ms, P95 {summary['gap_p95'] * 1e3:.1f} ms"


def validation_lines(found: dict[str, Any]) -> Iterator[str]:
    """Of `validate.validate`."""
    rows = [(name, *(_figure(found[side][name]) for side in ("real", "simulated", "ratio"))) for name in COMPARED]
    yield from table(("", "real", "simulated", "simulated / real"), rows)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
