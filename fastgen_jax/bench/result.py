"""A benchmark's results, and the JSON they are kept in."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastgen_jax.bench.metrics import (
    PROMPT_SLA,
    Record,
    check_limit,
    check_sla,
    effective_throughput,
    goodput,
    summarize,
)
from fastgen_jax.bench.workload import Load

FORMAT = "fastgen bench 1"
DECIMALS = 5
"""Of the seconds in the JSON."""


@dataclass(frozen=True)
class Step:
    """What one step computed: tokens of decodes, tokens of prompts, padding. time: when it was over."""

    time: float
    decode: int
    prompt: int
    padding: int


@dataclass(frozen=True)
class Limits:
    """What a request is held to: SLAs in tokens/s, limits in seconds; None is no limit."""

    slas: tuple[float, ...] = (2, 4, 6)
    prompt_sla: float = PROMPT_SLA
    ttft_limit: float | None = None
    tpot_limit: float | None = None

    def __post_init__(self) -> None:
        for sla in (*self.slas, self.prompt_sla):
            check_sla(sla)
        check_limit("TTFT", self.ttft_limit)
        check_limit("TPOT", self.tpot_limit)

    @property
    def has_goodput(self) -> bool:
        return self.ttft_limit is not None or self.tpot_limit is not None


@dataclass(frozen=True)
class Run:
    """One system at one point of a benchmark.

    system: the policy of an engine, or the name of a server.
    steps: of an engine in this process only. config: what there is to know of the system.
    """

    system: str
    load: Load
    records: Sequence[Record]
    steps: Sequence[Step] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def effective_throughput(self, sla: float, limits: Limits) -> float:
        return effective_throughput(self.records, sla, limits.prompt_sla)

    def goodput(self, limits: Limits) -> float:
        return goodput(self.records, ttft_limit=limits.ttft_limit, tpot_limit=limits.tpot_limit)

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]


@dataclass
class Results:
    """Everything a benchmark has measured so far. about: where, when, how and of what."""

    about: dict[str, Any]
    limits: Limits
    runs: list[Run] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Replace the file; a reader sees the old one or the new one."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self._to_json()) + "\n", encoding="utf-8")
        os.replace(part, path)

    def _to_json(self) -> dict[str, Any]:
        runs = [_run_to_json(run, self.limits) for run in self.runs]
        return {"format": FORMAT, **self.about, "limits": asdict(self.limits), "runs": runs}


def load(paths: Iterable[Path]) -> Results:
    """What was saved, the runs of several files one after the other; the limits are those of the first.

    ValueError for a file that `Results.save` did not write.
    """
    found: Results | None = None
    for path in paths:
        results = _load(path)
        if found is None:
            found = results
        else:
            found.runs += results.runs
    assert found is not None
    return found


def _load(path: Path) -> Results:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("format") != FORMAT:
            raise KeyError
        limits = value.pop("limits")
        runs = [_run_from_json(run) for run in value.pop("runs")]
        return Results(value, Limits(**{**limits, "slas": tuple(limits["slas"])}), runs)
    except OSError as error:
        raise ValueError(f"--from-json {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"--from-json {path} is not a file that fastgen bench --json wrote") from error


def _run_to_json(run: Run, limits: Limits) -> dict[str, Any]:
    """Times in seconds since the first request was sent."""
    start = min((record.sent for record in run.records), default=0.0)
    return {
        "system": run.system,
        "load": asdict(run.load),
        "config": dict(run.config),
        "summary": asdict(summarize(run.records)),
        "effective_throughput": {f"{sla:g}": run.effective_throughput(sla, limits) for sla in limits.slas},
        "goodput": run.goodput(limits) if limits.has_goodput else None,
        "records": [_record_to_json(record, start) for record in run.records],
        "steps": [[round(step.time - start, DECIMALS), step.decode, step.prompt, step.padding] for step in run.steps],
    }


def _record_to_json(record: Record, start: float) -> dict[str, Any]:
    return {
        **asdict(record),
        "sent": round(record.sent - start, DECIMALS),
        "token_times": [round(time - start, DECIMALS) for time in record.token_times],
    }


def _run_from_json(run: dict[str, Any]) -> Run:
    return Run(
        run["system"],
        Load(**run["load"]),
        [Record(**{**record, "token_times": tuple(record["token_times"])}) for record in run["records"]],
        tuple(Step(*step) for step in run["steps"]),
        run["config"],
    )
