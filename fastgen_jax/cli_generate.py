"""`fastgen generate`: a prompt, a file of prompts or a conversation in, text on stdout."""

import argparse
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from fastgen_jax import progress
from fastgen_jax.cli_flags import (
    HelpFormatter,
    add_engine_flags,
    add_model_argument,
    add_sampling_flags,
    given,
)
from fastgen_jax.cli_output import WAITING, Key, Printer, note, summary
from fastgen_jax.cli_prompts import Job, check_fields, checked_text, naming, read_jobs, stdin_is_terminal
from fastgen_jax.types import EngineConfig, Response, SamplingParams

if TYPE_CHECKING:
    from fastgen_jax import Engine

DESCRIPTION = """\
Generate text: stdout gets the text and nothing else, stderr the progress and the speed.

The prompt is the argument, or else all of stdin. With neither, on a terminal, it is a conversation; with a
model that has no chat template, a loop that continues what you write."""

EXAMPLES = """\
examples:
  fastgen generate "The capital of France is"
  fastgen generate --chat --temperature 0.7 --seed 1 "Why is the sky blue?"
  cat story.txt | fastgen generate --max-tokens none --stop "The End"
  fastgen generate --model llama2-7b --prompts prompts.jsonl --json > answers.jsonl

a line of prompts.jsonl:
  {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0.8}
  {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}

exit status:
  0; 2 for a mistake in what you gave; 130 after Ctrl-C, what was written stays"""


def add_command(commands: Any) -> None:
    """Add the command to `commands`, the subparsers of `fastgen`."""
    parser = commands.add_parser(
        "generate",
        usage="fastgen generate [--model MODEL] [options] [PROMPT]",
        help="generate text from prompts, or talk to a model",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue (with --chat, to answer)")
    add_model_argument(parser, positional=False)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model on the Hub")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="many prompts: one to a line, or .jsonl with one object to a line; - is stdin, as text",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="prompts are a user's messages, for the model's chat template (default: on a terminal only)",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message; implies --chat")
    parser.add_argument("--json", action="store_true", help="one JSON object to a line: text, token ids, timings, ...")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    add_sampling_flags(parser)
    # One prompt needs few of the programs, and the cache on disk has them the next time.
    add_engine_flags(parser, warm_up=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate what `args` ask for; the exit status. Mistakes that show without the model are found first."""
    fields = given(args, SamplingParams)
    check_fields(fields)
    # Requests without a seed differ from run to run.
    config = {"seed": secrets.randbelow(2**31)} | given(args, EngineConfig)
    EngineConfig(**config)
    if args.system is not None:
        checked_text(args.system)
        if args.chat is False:
            raise ValueError("--system is for a chat, which --no-chat forbids")
    out = sys.stdout
    if out is None:
        raise ValueError("stdout is closed, so there is nowhere to write the text")
    if args.prompt is None and args.prompts is None and stdin_is_terminal():
        from fastgen_jax import cli_chat

        cli_chat.check(args.json, fields)
        cli_chat.talk(_load(args, config), fields, args, out)
        return 0
    jobs = [_settled(job, fields, args) for job in read_jobs(args.prompt, args.prompts, quiet=args.quiet)]
    _generate(_load(args, config), jobs, args, out)
    return 0


def _settled(job: Job, fields: Mapping[str, Any], args: argparse.Namespace) -> Job:
    """The job with the flags' `fields` under its own, and as a conversation if one is wanted."""
    with naming(job.where):
        job = replace(job, fields={**fields, **job.fields})
        check_fields(job.fields)
        if not args.json and any(job.fields.get(name) is not None for name in ("logprobs", "prompt_logprobs")):
            raise ValueError("logprobs and prompt_logprobs are printed with --json only")
        return job.in_chat(args.system) if args.chat or args.system is not None else job


def _load(args: argparse.Namespace, config: Mapping[str, Any]) -> "Engine":
    start = time.perf_counter()
    with redirect_stdout(sys.stderr):  # stdout is for the text, whatever a library has to say
        from fastgen_jax import Engine

        engine = Engine.from_pretrained(
            args.model, revision=args.revision, show_progress=False if args.quiet else None, **config
        )
    note(f"{args.model} loaded in {time.perf_counter() - start:.1f} s", args.quiet)
    return engine


def _generate(engine: "Engine", jobs: list[Job], args: argparse.Namespace, out: TextIO) -> None:
    """Run all `jobs` at once and print their samples in order."""
    each = [_params(engine, job) for job in jobs]
    keys = [(i, j) for i, params in enumerate(each) for j in range(params.n)]
    show = False if args.quiet else None
    has_bar = len(keys) > 1 and not out.isatty()  # it would run into the text on the same terminal
    with (
        progress.spinner(WAITING, False if has_bar else show) as stop_spinner,
        progress.bar("generating", len(keys), show if has_bar else False, "samples") as advance,
    ):
        printer = Printer(keys, out, as_json=args.json, before_first=stop_spinner)
        start = time.perf_counter()
        try:
            requests = _add_all(engine, jobs, each, printer)
            responses: list[Response] = []
            while len(responses) < len(keys):
                for response in engine.step():
                    i, streamed = requests[response.request_id]
                    printer.end((i, response.index), response, streamed=streamed)
                    responses.append(response)
                    advance(1)
        except KeyboardInterrupt:
            printer.end_line()
            raise
        seconds = time.perf_counter() - start
    note(summary(responses, seconds), args.quiet)


def _params(engine: "Engine", job: Job) -> SamplingParams:
    with naming(job.where):
        return engine.default_params.replace(**job.fields)


def _add_all(
    engine: "Engine", jobs: list[Job], each: list[SamplingParams], printer: Printer
) -> dict[int, tuple[int, bool]]:
    """Queue every job; request id -> number of its prompt, whether it streams. ValueError if any cannot run."""
    requests: dict[int, tuple[int, bool]] = {}
    echoes: list[tuple[Key, str]] = []
    for i, (job, params) in enumerate(zip(jobs, each, strict=True)):
        with naming(job.where):
            prompt = job.encoded(engine)
            # The pieces of an echo lack the prompt, whose text is known beforehand only if it is text.
            streamed = params.n == 1 and (isinstance(prompt, str) or not params.full_text)
            on_piece = partial(printer.piece, (i, 0)) if streamed else None
            requests[engine.add(prompt, params, on_piece=on_piece)] = i, streamed
        if streamed and params.full_text:
            echoes.append(((i, 0), str(prompt)))
    for key, text in echoes:
        printer.piece(key, text)
    return requests
