"""`fastgen simulate`: what a model would serve on GPUs that are not here, by the engine's own scheduler."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen_jax import progress
from fastgen_jax.cli_flags import HelpFormatter, add_engine_flags, given
from fastgen_jax.cli_plan import table
from fastgen_jax.gpus import GPUS
from fastgen_jax.types import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    from fastgen_jax.bench.simulator import SimulatorConfig, System

DESCRIPTION = """\
Simulate serving: the engine's scheduler and block pool on a virtual clock, with steps as long as a model of the device
says. Without --grid, --trace, --measure or --validate: the highest rate at an SLA, the replicas for --rate, and the
best budget and block size.

The device is --gpu, by its roofline, or --table, by what was measured on one. docs/simulate.md has the assumptions."""

EXAMPLES = """\
examples:
  fastgen simulate --model llama2-7b --gpu h200 --prompt-mean 1200 --output-mean 128 --sla 4 --rate 50
  fastgen simulate --model llama2-70b --gpu a100-80 --tp 4 --trace requests.jsonl
  fastgen simulate --model llama2-7b --gpu h200 --trace synthetic --requests 100000 --rate 16
  fastgen simulate --grid paper --workers 2 --json grid.json --plot grid.png
  fastgen simulate --measure steps.json --model smollm2-135m
  fastgen simulate --table steps.json --sla 2
  fastgen simulate --validate --clients 8

a line of a trace:
  {"arrival": 0.5, "prompt_tokens": 900, "output_tokens": 120, "prefix": "system-1", "prefix_tokens": 512}"""

LOAD = {"prompt_mean": 1200, "output_mean": 128, "requests": 400}
REAL_LOAD = {"prompt_mean": 320, "output_mean": 30, "requests": 48}
"""What is served unless flags say otherwise; the second by a real engine on this machine."""

SYNTHETIC = "synthetic"
ENGINE_ONLY = ("dtype", "kv_cache_dtype", "quantization", "tensor_parallel", "expert_parallel")
"""Engine flags that say what is simulated rather than how it runs."""


def add_command(commands: Any) -> None:
    """Add the command to `commands`, the subparsers of `fastgen`."""
    parser = commands.add_parser(
        "simulate",
        usage="fastgen simulate [--grid NAME | --trace FILE | --measure FILE | --validate] [options]",
        help="what a model would serve, by simulation",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("what to do").add_mutually_exclusive_group()
    text = "the FastGen paper's models, GPUs and loads, or the time per token within a limit"
    group.add_argument("--grid", choices=("paper", "guide"), help=text)
    text = f"serve the requests of a file, one JSON object a line, or of a made-up one: {SYNTHETIC}"
    group.add_argument("--trace", metavar="FILE", help=text)
    text = "time an engine's steps on this machine, and write the table for --table"
    group.add_argument("--measure", metavar="FILE", type=Path, help=text)
    text = "run the same load on an engine and on its simulation by its own table, and compare"
    group.add_argument("--validate", action="store_true", help=text)
    _add_system_flags(parser)
    _add_load_flags(parser)
    _add_output_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def _add_system_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device and model")
    text = f"an alias, a folder, a config.json or a .gguf file (default for --measure and --validate: {DEFAULT_MODEL})"
    group.add_argument("--model", metavar="MODEL", help=text)
    text = f"{', '.join(GPUS)}, or a .json file that describes another"
    group.add_argument("--gpu", metavar="GPU", help=text)
    group.add_argument("--table", metavar="FILE", type=Path, help="measured steps instead of --model and --gpu")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load", "lengths are Normal(mean, 0.3 mean); of a synthetic trace, lognormal")
    for name, kind, text in (
        ("prompt_mean", float, "tokens of a prompt"),
        ("output_mean", float, "tokens of an output"),
        ("requests", int, "how many"),
    ):
        text += f" (default {LOAD[name]}; of --validate {REAL_LOAD[name]})"
        group.add_argument("--" + name.replace("_", "-"), metavar="X" if kind is float else "N", type=kind, help=text)
    text = "requests/s: the demand to find replicas for, or what a synthetic trace has (default there 1)"
    group.add_argument("--rate", metavar="X", type=float, help=text)
    group.add_argument("--clients", metavar="N", type=int, default=8, help="of --validate (default 8)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of lengths and arrivals (default 0)")
    group.add_argument("--sla", metavar="X", type=float, default=4, help="output tokens/s of each request (default 4)")
    text = "prompt tokens/s until the first token (default 512)"
    group.add_argument("--prompt-sla", metavar="X", type=float, default=512, help=text)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", type=Path, help="write the figures; docs/simulate.md has the fields")
    text = "with --grid paper: write a PNG of effective throughput (needs fastgen-jax[plots])"
    group.add_argument("--plot", metavar="FILE", type=Path, help=text)
    text = "with --grid: processes that share the work (default 1)"
    group.add_argument("--workers", metavar="N", type=int, default=1, help=text)
    group.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    """Simulate what `args` ask for, print it and write it; the exit status."""
    from fastgen_jax.bench.metrics import check_sla

    check_sla(args.sla)
    check_sla(args.prompt_sla)
    for name, value in (REAL_LOAD if args.validate else LOAD).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.grid == "guide":
        found, lines = _guide(args)
    elif args.grid == "paper":
        found, lines = _paper(args)
    elif args.measure is not None:
        return _measure(args)
    elif args.validate:
        found, lines = _validate(args)
    elif args.trace is not None:
        found, lines = _trace(args)
    else:
        found, lines = _capacity(args)
    if sys.stdout is not None:
        print("\n".join(lines))
    if args.json is not None:
        from fastgen_jax.bench.machine import about

        args.json.write_text(json.dumps({**about(), **found}, indent=1) + "\n", encoding="utf-8")
    return 0


Answer = tuple[dict[str, Any], Iterable[str]]
"""What goes into the JSON, and the lines for people."""


def _show(args: argparse.Namespace) -> bool | None:
    return False if args.quiet else None


def _paper(args: argparse.Namespace) -> Answer:
    from fastgen_jax.bench import grid, grid_report, plots
    from fastgen_jax.bench.parallel import run_all

    if args.plot is not None:
        plots.require()
    points = grid.points()
    with progress.bar("simulating", len(points), _show(args), "points") as advance:
        results = run_all(grid.run_point, points, workers=args.workers, advance=advance)
    if args.plot is not None:
        grid_report.plot(results, args.plot)

    def lines() -> Iterator[str]:
        for title, head, rows in grid_report.sections(results):
            yield from (f"{title}:", "", *table(head, rows), "")

    return {"points": results}, lines()


def _guide(args: argparse.Namespace) -> Answer:
    from fastgen_jax.bench import guide
    from fastgen_jax.bench.parallel import run_all
    from fastgen_jax.types import POLICIES

    tasks = [(system, policy) for system in guide.SYSTEMS for policy in POLICIES]
    with progress.bar("searching", len(tasks), _show(args), "policies") as advance:
        found = guide.compare(run_all(guide.search, tasks, workers=args.workers, advance=advance))
    return {"policies": found}, table(guide.HEAD, guide.rows(found))


def _capacity(args: argparse.Namespace) -> Answer:
    from fastgen_jax.bench import capacity
    from fastgen_jax.bench.simulate_report import capacity_lines

    config = _config(args, prefix_caching=False)
    system = _system(args)
    longest = system.engine(config).max_model_len
    requests = capacity.cut_requests(args.prompt_mean, args.output_mean, args.requests, longest, args.seed)
    with progress.bar("searching", capacity.NUM_SEARCHES, _show(args), "settings") as advance:
        found = capacity.capacity(
            system,
            config,
            requests,
            seed=args.seed,
            sla=args.sla,
            prompt_sla=args.prompt_sla,
            rate=args.rate,
            advance=advance,
        )
    return found, capacity_lines(found)


def _trace(args: argparse.Namespace) -> Answer:
    from fastgen_jax.bench.replay import replay
    from fastgen_jax.bench.simulate_report import trace_lines
    from fastgen_jax.bench.trace import read_trace, synthetic_trace

    trace = None if args.trace == SYNTHETIC else read_trace(Path(args.trace).expanduser())
    config = _config(args, prefix_caching=True)
    system = _system(args)
    if trace is None:
        trace = synthetic_trace(
            args.requests,
            1.0 if args.rate is None else args.rate,
            prompt_mean=args.prompt_mean,
            output_mean=args.output_mean,
            max_model_len=system.engine(config).max_model_len,
            seed=args.seed,
        )
    with progress.bar("serving", len(trace), _show(args), "requests") as advance:
        found = replay(system, config, trace, sla=args.sla, prompt_sla=args.prompt_sla, advance=advance)
    return found, trace_lines(found)


def _measure(args: argparse.Namespace) -> int:
    measured = _measured_table(args, _engine(args))
    args.measure.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return 0


def _validate(args: argparse.Namespace) -> Answer:
    from fastgen_jax.bench.capacity import cut_requests
    from fastgen_jax.bench.measured_steps import StepTable
    from fastgen_jax.bench.simulate_report import validation_lines
    from fastgen_jax.bench.validate import validate

    engine = _engine(args)
    requests = cut_requests(args.prompt_mean, args.output_mean, args.requests, engine.max_model_len, args.seed)
    measured = StepTable.from_json(_measured_table(args, engine))
    with progress.bar("running", len(requests), _show(args), "requests") as advance:
        found = validate(engine, measured, requests, args.clients, advance)
    return {**found, "table": measured.to_json()}, validation_lines(found)


def _engine(args: argparse.Namespace) -> Any:
    from fastgen_jax import Engine

    return Engine.from_pretrained(args.model or DEFAULT_MODEL, show_progress=_show(args), **given(args, EngineConfig))


def _measured_table(args: argparse.Namespace, engine: Any) -> dict[str, Any]:
    from fastgen_jax.bench.step_table import measure_table, num_measurements

    with progress.bar("timing steps", num_measurements(engine), _show(args), "kinds") as advance:
        return measure_table(engine, advance)


def _system(args: argparse.Namespace) -> "System":
    """What `--table`, or `--model` and `--gpu`, describe."""
    if args.table is not None:
        from fastgen_jax.bench.measured_steps import StepTable

        return StepTable.load(args.table)
    if args.model is None or args.gpu is None:
        raise ValueError("it takes --model and --gpu, or --table; see fastgen simulate --help")
    from fastgen_jax.bench.deployment import Deployment
    from fastgen_jax.gpus import get_gpu

    config = EngineConfig(**given(args, EngineConfig))
    return Deployment.of(
        args.model,
        get_gpu(args.gpu),
        tp=config.tensor_parallel,
        dtype=config.dtype or "bfloat16",
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
    )


def _config(args: argparse.Namespace, *, prefix_caching: bool) -> "SimulatorConfig":
    """What the engine flags say; ValueError for one that means nothing to a simulation."""
    from fastgen_jax.bench.simulator import SimulatorConfig

    fields = {name: value for name, value in given(args, EngineConfig).items() if name not in ENGINE_ONLY}
    of_engine, simulated = ({field.name for field in dataclasses.fields(c)} for c in (EngineConfig, SimulatorConfig))
    if unknown := sorted(set(fields) - simulated):
        raise ValueError(
            f"{unknown[0]} means nothing to a simulated engine; it has {', '.join(sorted(of_engine & simulated))}"
        )
    default = SimulatorConfig()
    budget = fields.get("max_num_batched_tokens", default.max_num_batched_tokens)
    if fields.get("max_num_seqs") is None and isinstance(budget, int):
        fields["max_num_seqs"] = min(default.max_num_seqs, budget)
    return SimulatorConfig(**{"prefix_caching": prefix_caching, **fields})
