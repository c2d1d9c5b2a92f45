"""The console command `fastgen`. Nothing here imports JAX: a command does, once it has work for it."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import fastgen_jax
from fastgen_jax.cli_flags import HelpFormatter

COMMANDS = ("generate", "serve", "client", "plan", "bench", "simulate")
"""Each has a module, `cli_generate` and so on, whose `add_command` adds it to the parser."""

OK, FAILED, USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 128 + 2, 128 + 13
MAX_LINE = 1000
"""Exit statuses; the last two are what a shell reports of a program that SIGINT or SIGPIPE ended."""

EXAMPLES = """\
examples:
  fastgen generate "The capital of France is"
  fastgen generate --model llama2-7b --prompts prompts.txt --json > answers.jsonl
  fastgen generate                              a conversation, on a terminal
  fastgen serve llama2-7b --replicas 2          OpenAI's API, for many
  fastgen plan --model llama2-7b --gpu h200     what it takes there, without the GPU
  fastgen bench --clients 1,4,16                latencies and throughput under load
  fastgen simulate --model llama2-7b --gpu h200 what it would serve there

`fastgen COMMAND --help` explains a command."""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ValueErrors of one sentence, with no usage in front."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def build_parser(command: str | None = None) -> Parser:
    """The parser of every command, or of the one that is named, without importing the others.

    Its namespaces have `run`, which takes them and returns an exit status.
    """
    parser = Parser(
        prog="fastgen",
        usage="fastgen [--version] COMMAND ...",
        description=fastgen_jax.__doc__,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fastgen {fastgen_jax.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS if command is None else (command,):
        importlib.import_module(f"fastgen_jax.cli_{name}").add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastgen` with `argv` (None is the process's own arguments) and return the exit status.

    0; 2 after one line on stderr about a mistake of the user's; 1 after one about what the machine could not
    do (memory, disk, device); 130 after Ctrl-C; 141 when the reader of
    stdout has gone. What is not the user's mistake is a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the model may write what the terminal's encoding lacks
    try:
        status = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except (ValueError, TypeError) as error:
        if not _is_ours(error):
            raise
        return _complain(error, USAGE_ERROR)
    except (OSError, MemoryError, RecursionError) as error:
        return _complain(error, FAILED)
    except RuntimeError as error:
        if not type(error).__module__.startswith("jax"):
            raise
        return _complain(error, FAILED)


def _complain(error: BaseException, status: int) -> int:
    """One line on stderr, and no more on a stdout that may be what failed."""
    text = " ".join(str(error).split()) or type(error).__name__
    print("fastgen: error:", text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}...", file=sys.stderr)
    if isinstance(error, OSError):
        _drop_stdout()
    return status


def _run(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv and argv[0] in COMMANDS else None
    try:
        args = build_parser(command).parse_args(argv)
    except SystemExit:  # --help and --version
        return OK
    return args.run(args)


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it; an error out of a library is a bug, and wants its traceback."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith("fastgen_jax")


def _drop_stdout() -> None:
    """Lead what stdout still buffers nowhere, for the interpreter flushes it once more at exit."""
    with suppress(OSError, ValueError, AttributeError):  # there may be none, or none with a number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
