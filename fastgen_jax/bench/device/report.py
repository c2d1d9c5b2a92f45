"""The targets of a device check, and the table that sums it up."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fastgen_jax.bench.device.record import OK, Entry

Stages = dict[str, Entry]
Row = dict[str, Any]

LARGE_READ = 256 << 20  # bytes of K and V, from which a decode has to use the bandwidth
DECODE_SHARE, PREFILL_SHARE, BATCH_1_RATIO, LONGEST_GAP_S = 0.85, 0.60, 1.25, 0.030
DEFAULT_POLICY = "waves"
PARTS = ("before", "during", "after")


class Target(NamedTuple):
    """A figure and what it has to reach. name: which target; case: of what."""

    name: str
    case: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


class Peaks(NamedTuple):
    """Measured on the device: bytes and operations a second."""

    bandwidth: float
    flops: float


def rows_of(stages: Stages, name: str, **wanted: Any) -> list[Row]:
    """A stage's rows that have these values."""
    rows = stages[name]["rows"] if name in stages else []
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def peaks(stages: Stages) -> Peaks | None:
    """None unless both were measured."""
    copies, matmuls = (rows_of(stages, "peaks", of=of) for of in ("copy", "matmul"))
    if not copies or not matmuls:
        return None
    return Peaks(copies[0]["bytes"] / copies[0]["seconds"], matmuls[0]["flops"] / matmuls[0]["seconds"])


def targets(stages: Stages) -> list[Target]:
    """Every figure that has a target and was measured; those against a peak need that too."""
    found = [
        Target("token gap, s", f"{row['decodes']} decodes, {part}", max(row[part]), LONGEST_GAP_S, at_most=True)
        for row in cut_gaps(stages)
        for part in PARTS
    ]
    if (peak := peaks(stages)) is None:
        return found
    decodes = [
        Target("decode / copy bandwidth", _batch(row), _rate(row, "bytes") / peak.bandwidth, DECODE_SHARE)
        for row in rows_of(stages, "decode", policy=DEFAULT_POLICY)
        if row["bytes"] > LARGE_READ
    ]
    prefills = [
        Target("prefill / matmul peak", _chunk(row), _rate(row, "flops") / peak.flops, PREFILL_SHARE)
        for row in rows_of(stages, "prefill", head_dim=128)
    ]
    return decodes + prefills + batch_1(stages, peak) + found


def batch_1(stages: Stages, peak: Peaks) -> list[Target]:
    """A decode step of one sequence against reading the weights."""
    weights = rows_of(stages, "engine", of="weights")
    steps = rows_of(stages, "engine", of="step", kind="decode", rows=1)
    return [
        Target(
            "step / reading the weights",
            f"batch 1, context {step['context'] + 1}",
            step["seconds"] / (weights[0]["step_bytes"] / peak.bandwidth),
            BATCH_1_RATIO,
            at_most=True,
        )
        for step in steps
        if weights
    ]


def cut_gaps(stages: Stages) -> list[Row]:
    """Those of the smaller budget, where the prompt comes in chunks."""
    rows = rows_of(stages, "gaps")
    return [row for row in rows if row["budget"] < row["prompt"]]


def is_sound(stages: Stages) -> bool:
    """Whether every stage ran to its end and no kernel's result was wrong; targets of speed don't count."""
    return all(entry["status"] == OK for entry in stages.values()) and all(
        row["ok"] for row in rows_of(stages, "parity")
    )


def table(result: dict[str, Any]) -> list[str]:
    """The lines of a screenful."""
    stages = result["stages"]
    peak = peaks(stages)
    sections: list[tuple[str, Callable[[Stages, Peaks | None], Iterable[str]]]] = [
        ("peaks", _peaks_lines),
        ("parity", _parity_lines),
        ("decode", _decode_lines),
        ("prefill", _prefill_lines),
        ("engine", _engine_lines),
        ("gaps", _gap_lines),
    ]
    lines = []
    for name, describe in sections:
        entry = stages[name]
        status = entry["status"] + (f" ({entry['note']})" if entry["note"] else "")
        lines.append(f"== {name}: {status}, {entry['seconds']:.0f} s")
        lines += ["   " + line for line in describe(stages, peak)]
    every = targets(stages)
    met = sum(target.met for target in every)
    lines.append(f"== {met} of {len(every)} figures with a target meet it; {result['elapsed_s']:.0f} s in all")
    return lines


def _peaks_lines(stages: Stages, peak: Peaks | None) -> Iterable[str]:
    for row in rows_of(stages, "peaks", of="device"):
        yield f"{row['kind']}, {row['num_sms']} SMs, {row['bytes_limit'] / 1e9:.0f} GB for JAX {row['jax']}"
    if peak:
        yield f"copy {peak.bandwidth / 1e9:.0f} GB/s, matmul {peak.flops / 1e12:.0f} TFLOP/s in bfloat16"


def _parity_lines(stages: Stages, _: Peaks | None) -> Iterable[str]:
    rows = rows_of(stages, "parity")
    if not rows:
        return
    ran = [row for row in rows if "error" in row]
    worst = max((row["error"] / row["tolerance"] for row in ran), default=0)
    backends = ", ".join(sorted({row["backend"] for row in ran}))
    yield f"{sum(row['ok'] for row in rows)} of {len(rows)} within tolerance on {backends}; worst {worst:.2f} of it"
    for row in [row for row in rows if not row["ok"]][:4]:
        yield f"WRONG {row['case']}: {row.get('failed') or row['error']}"


def _decode_lines(stages: Stages, peak: Peaks | None) -> Iterable[str]:
    rows = rows_of(stages, "decode")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    if rows:
        yield f"{'GB/s of K and V':<32}{'MB':>6}" + "".join(f"{policy:>13}" for policy in policies)
    for batch in dict.fromkeys(map(_batch, rows)):
        of = {row["policy"]: row for row in rows if _batch(row) == batch}
        size = next(iter(of.values()))["bytes"]
        cells = "".join(f"{_rate(of[p], 'bytes') / 1e9:>13.0f}" if p in of else f"{'':>13}" for p in policies)
        verdict = ""
        if peak and DEFAULT_POLICY in of:
            verdict = _share(_rate(of[DEFAULT_POLICY], "bytes") / peak.bandwidth, DECODE_SHARE, size > LARGE_READ)
        yield f"{batch:<32}{size / 1e6:>6.0f}{cells}{verdict}"


def _prefill_lines(stages: Stages, peak: Peaks | None) -> Iterable[str]:
    rows = rows_of(stages, "prefill")
    for kv_heads, chunk in dict.fromkeys((row["kv_heads"], row["chunk"]) for row in rows):
        cells = []
        for row in rows_of(stages, "prefill", kv_heads=kv_heads, chunk=chunk):
            rate = _rate(row, "flops")
            verdict = _share(rate / peak.flops, PREFILL_SHARE, row["head_dim"] == 128) if peak else ""
            cells.append(f"after {row['context']}: {rate / 1e12:.0f}{verdict}")
        yield f"K={kv_heads} chunk {chunk}, TFLOP/s " + ", ".join(cells)


def _engine_lines(stages: Stages, peak: Peaks | None) -> Iterable[str]:
    def ms(row: Row) -> str:
        share = f" ({_bound(row, peak) / row['seconds']:.0%})" if peak else ""
        return f"{row['seconds'] * 1e3:.2f}{share}"

    steps = {kind: rows_of(stages, "engine", of="step", kind=kind) for kind in ("decode", "bucket", "sequences")}
    if any(steps.values()):
        yield "step, ms (share of the bound):"
    for kind, key in (("decode", "rows"), ("bucket", "tokens"), ("sequences", "rows")):
        if rows := steps[kind]:
            what = {"decode": "decode, sequences", "bucket": "tokens, 1 prompt", "sequences": "tokens, sequences"}[kind]
            what = f"{rows[0]['tokens']} {what}" if kind == "sequences" else what
            yield f"{what}: " + ", ".join(f"{row[key]}: {ms(row)}" for row in rows)
    if peak:
        for target in batch_1(stages, peak):
            yield f"{target.case}: {target.value:.2f} of {target.name.split(' / ')[1]}{_verdict(target)}"
    for row in rows_of(stages, "engine", of="compile"):
        longest = max(row["programs"].values())
        yield (
            f"{len(row['programs'])} programs compiled in {row['seconds']:.0f} s, several at once "
            f"(longest {longest:.0f} s); first steps {row['first_steps_s']:.1f} s"
        )
    if layers := {row["unrolled"]: row for row in rows_of(stages, "engine", of="layers")}:
        parts = [
            f"{'unrolled' if unrolled else 'scan'} {row['seconds'] * 1e3:.2f} ms, {row['temp_bytes'] / 1e6:.0f} MB of "
            f"temporaries, compiled in {row['compile_s']:.0f} s"
            for unrolled, row in layers.items()
        ]
        yield "layers' matmuls: " + "; ".join(parts)
    for overlap in (False, True):
        runs = rows_of(stages, "engine", of="generate", overlap=overlap)
        if runs:
            yield f"overlap {'on' if overlap else 'off'}: {max(r['tokens'] / r['seconds'] for r in runs):.0f} tokens/s"
    for row in rows_of(stages, "engine", of="command buffers"):
        in_hlo = "yes" if row["in_hlo"] else "no"
        yield f"command buffers: seen in HLO: {in_hlo}; launches seen in a profile: {row['in_profile']:.60}"


def _gap_lines(stages: Stages, _: Peaks | None) -> Iterable[str]:
    cut = cut_gaps(stages)
    for row in rows_of(stages, "gaps"):
        cells = ", ".join(f"{part} {_spread(row[part])}" for part in PARTS)
        worst = max(max(row[part]) for part in PARTS)
        verdict = _verdict(Target("", "", worst, LONGEST_GAP_S, at_most=True)) if row in cut else ""
        yield f"{row['decodes']} decodes, budget {row['budget']}; gap ms p50/p99/max: {cells}{verdict}"


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at = [ordered[round(q * (len(ordered) - 1))] for q in (0.5, 0.99, 1.0)]
    return "/".join(f"{1e3 * value:.1f}" for value in at)


def _bound(row: Row, peak: Peaks) -> float:
    """The least seconds of a step: its bytes at the copy bandwidth or its operations at the matmul peak."""
    return max(row["bytes"] / peak.bandwidth, row["flops"] / peak.flops)


def _rate(row: Row, unit: str) -> float:
    return row[unit] / row["seconds"]


def _batch(row: Row) -> str:
    return f"K={row['kv_heads']} {row['batch']}"


def _chunk(row: Row) -> str:
    return f"K={row['kv_heads']} chunk {row['chunk']} after {row['context']}"


def _share(share: float, limit: float, judged: bool) -> str:
    return f" {share:>5.0%}" + (_verdict(Target("", "", share, limit)) if judged else "")


def _verdict(target: Target) -> str:
    return " pass" if target.met else " MISS"
