"""`fastgen bench`: a load on an engine or a server in, latencies and throughputs out."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastgen_jax.bench import curve, machine, plots, report, result, session
from fastgen_jax.bench.load import random_corpus, word_salad
from fastgen_jax.bench.result import Limits, Results, Run
from fastgen_jax.bench.workload import Workload, closed_points, long_prompt_points, open_points
from fastgen_jax.cli_flags import HelpFormatter, add_engine_flags, given
from fastgen_jax.cli_output import note
from fastgen_jax.types import DEFAULT_MODEL, EngineConfig

DESCRIPTION = """\
Measure an engine, several of its scheduling policies on the same work, or any server with OpenAI's completions API.

The load is a closed loop of clients, or with --rate an open loop of Poisson arrivals, or with --long-prompt one long
prompt that arrives among decodes. Everything is greedy and ignores EOS. docs/bench.md defines the metrics."""

EXAMPLES = """\
examples:
  fastgen bench --clients 1,2,4 --json bench.json --plots plots
  fastgen bench --policy splitfuse,prefill_first,orca --prompt-mean 650 --output-mean 60
  fastgen bench --rate 0.5,1,2 --ttft-limit 1 --tpot-limit 0.05
  fastgen bench --policy splitfuse,prefill_first --long-prompt 2000 --decodes 8,15
  fastgen bench --curve --plots plots
  fastgen bench --url http://127.0.0.1:8000/v1 --tokenizer smollm2-135m --clients 8
  fastgen bench --from-json ours.json --from-json theirs.json --plots plots

exit status:
  0; 1 if requests failed, as when a server goes away, with what was measured until then; 2 for a mistake in what you
  gave"""

FAILED = 1
CLIENTS = (1, 2, 4, 8, 16, 32)
DECODES = (8, 15)


def add_command(commands: Any) -> None:
    """Add the command to `commands`, the subparsers of `fastgen`."""
    parser = commands.add_parser(
        "bench",
        usage="fastgen bench [--model MODEL | --url URL] [options]",
        help="measure an engine or a server",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    _add_target_flags(parser)
    _add_load_flags(parser)
    _add_output_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def _add_target_flags(parser: argparse.ArgumentParser) -> None:
    about = "an engine in this process, for every --policy (commas between them) one after the other; or a server"
    group = parser.add_argument_group("target", about)
    text = f"what the engine runs (default {DEFAULT_MODEL}); with --url, its name there (default: the first listed)"
    group.add_argument("--model", metavar="MODEL", help=text)
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model on the Hub")
    group.add_argument("--url", metavar="URL", help="a server's address up to /v1, as http://127.0.0.1:8000/v1")
    text = "with --url: cut prompts from text with this model's tokenizer (default: they are random token ids)"
    group.add_argument("--tokenizer", metavar="MODEL", help=text)
    text = "with --url and --tokenizer: send prompts as text, for servers that take no token ids"
    group.add_argument("--as-text", action="store_true", help=text)
    group.add_argument("--api-key", metavar="KEY", help="with --url: if the server wants one")
    group.add_argument("--name", metavar="NAME", help="with --url: what tables and plots call it (default: the model)")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "load", "lengths are Normal(mean, 0.3 mean), rounded down and clipped to 1 ... cap"
    )
    default = Workload()
    text = "numbers of clients of the closed loop (default 1,2,4,8,16,32)"
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--clients", metavar="N,N,...", type=_list_of(int), default=CLIENTS, help=text)
    text = "requests/s of an open loop, instead of the clients"
    kind.add_argument("--rate", metavar="X,X,...", type=_list_of(float), help=text)
    text = "tokens of one prompt that arrives among --decodes, instead of the clients"
    kind.add_argument("--long-prompt", metavar="N", type=int, help=text)
    text = "how long the engine's steps take, over their tokens and their sequences, instead of a load"
    kind.add_argument("--curve", action="store_true", help=text)
    text = "numbers of decodes, of the mean lengths, for --long-prompt (default 8,15)"
    group.add_argument("--decodes", metavar="N,N,...", type=_list_of(int), default=DECODES, help=text)
    text = "of each number of clients or rate (default 4 x clients + 32)"
    group.add_argument("--requests", metavar="N", type=int, dest="num_requests", help=text)
    for name, noun in (("prompt", "a prompt"), ("output", "an output")):
        mean = getattr(default, f"{name}_mean")
        text = f"mean tokens of {noun} (default {mean:g})"
        group.add_argument(f"--{name}-mean", metavar="X", type=float, default=mean, help=text)
        text = f"most tokens of {noun} (default 3 x the mean)"
        group.add_argument(f"--{name}-cap", metavar="N", type=int, help=text)
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of lengths, prompts and arrivals (default 0)")
    group.add_argument("--prompts-file", metavar="FILE", help="text to cut the prompts from (default: random words)")
    text = "tokens that all prompts begin with, on top of their lengths (default 0)"
    group.add_argument("--shared-prefix", metavar="N", type=int, default=0, help=text)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits and output")
    default = Limits()
    text = "SLAs of the effective throughput, output tokens/s of each request (default 2,4,6)"
    group.add_argument("--sla", metavar="X,X,...", type=_list_of(float), dest="slas", help=text)
    text = f"prompt tokens/s until the first token, for every SLA (default {default.prompt_sla:g})"
    group.add_argument("--prompt-sla", metavar="X", type=float, help=text)
    group.add_argument("--ttft-limit", metavar="S", type=float, help="seconds to the first token, for the goodput")
    group.add_argument("--tpot-limit", metavar="S", type=float, help="mean seconds between tokens, for the goodput")
    group.add_argument("--json", metavar="FILE", type=Path, help="write every record; docs/bench.md has the fields")
    group.add_argument("--plots", metavar="DIR", type=Path, help="write PNG plots (needs fastgen-jax[plots])")
    text = "show such a file again instead of measuring; repeat it to compare several"
    group.add_argument("--from-json", metavar="FILE", type=Path, action="append", help=text)
    group.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    """Measure what `args` ask for; the exit status. Mistakes that show without the target are found first."""
    if args.from_json and args.json is not None:
        raise ValueError("--json is for what is measured, and --from-json measures nothing")
    fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)}
    limits = {name: value for name, value in fields.items() if value is not None}
    Limits(**limits)
    if args.plots is not None:
        plots.require()
    if args.curve:
        return _curve(args)
    if args.from_json:
        results = result.load(args.from_json)
        results.limits = dataclasses.replace(results.limits, **limits)
    else:
        results = _measure(args, Limits(**limits))
    if sys.stdout is not None:
        report.show(results, sys.stdout)
    if args.plots is not None:
        for path in plots.draw(results, args.plots):
            note(f"wrote {path}", args.quiet)
    return FAILED if any(run.errors for run in results.runs) else 0


def _curve(args: argparse.Namespace) -> int:
    """Show what the automatic token budget goes by."""
    if args.url is not None or args.from_json:
        raise ValueError("--curve measures an engine in this process; leave out --url and --from-json")
    show_progress = False if args.quiet else None
    config = given(args, EngineConfig)
    engine = session.load_engine(args.model or DEFAULT_MODEL, args.revision, config, show_progress)
    times = curve.measure(engine, show_progress)
    if sys.stdout is not None:
        curve.show(times, sys.stdout)
    if args.json is not None:
        args.json.write_text(json.dumps(curve.to_json(times, machine.about()), indent=1))
    if args.plots is not None:
        note(f"wrote {curve.draw(times, args.plots)}", args.quiet)
    return 0


def _measure(args: argparse.Namespace, limits: Limits) -> Results:
    text = word_salad() if args.prompts_file is None else _read(args.prompts_file)
    fields = ("prompt_mean", "output_mean", "prompt_cap", "output_cap", "num_requests", "seed", "shared_prefix")
    workload = Workload(**{name: getattr(args, name) for name in fields})
    about = {**machine.about(), "workload": dataclasses.asdict(workload), "prompts_file": args.prompts_file}
    results = Results(about, limits)
    for run in _runs(args, text, _points(args, workload)):
        results.runs.append(run)
        if args.json is not None:
            results.save(args.json)
    return results


def _points(args: argparse.Namespace, workload: Workload) -> session.PointsOf:
    """The benchmark's points, given the corpus of the prompts."""
    if args.long_prompt is not None:
        return lambda corpus: long_prompt_points(workload, args.long_prompt, args.decodes, corpus)
    if args.rate is not None:
        return lambda corpus: open_points(workload, args.rate, corpus)
    return lambda corpus: closed_points(workload, args.clients, corpus)


def _runs(args: argparse.Namespace, text: str, points_of: session.PointsOf) -> Iterator[Run]:
    show_progress = False if args.quiet else None
    points_of(random_corpus())  # finds mistakes before anything is loaded
    if args.url is None:
        if args.as_text or any(flag is not None for flag in (args.tokenizer, args.api_key, args.name)):
            raise ValueError("--tokenizer, --as-text, --api-key and --name are for a server; name it with --url")
        config = given(args, EngineConfig)
        policies = config.pop("policy", EngineConfig().policy).split(",")
        model = args.model or DEFAULT_MODEL
        return session.engine_runs(model, args.revision, policies, config, text, points_of, show_progress)
    if config := given(args, EngineConfig):
        raise ValueError(f"{', '.join(config)}: these are settings of an engine, and --url names a server")
    if args.as_text and args.tokenizer is None:
        raise ValueError("--as-text needs the model's tokenizer; name it with --tokenizer")
    tokenizer = None if args.tokenizer is None else session.tokenizer_of(args.tokenizer, args.revision)
    about = args.url, args.model, args.name, tokenizer, args.as_text
    return session.server_runs(*about, text, points_of, show_progress, args.api_key)


def _read(name: str) -> str:
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"--prompts-file {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts-file {name} is not UTF-8 text") from error
    if not text.strip():
        raise ValueError(f"--prompts-file {name} is empty; it must have text to cut prompts from")
    return text


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Reads numbers with commas between them."""
    wanted = "whole numbers" if kind is int else "numbers"

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted} with commas between them") from None

    return read
