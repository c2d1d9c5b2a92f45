"""`fastgen generate` on a terminal: a conversation, or a loop that continues what is written."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from fastgen_jax import progress
from fastgen_jax.cli_output import WAITING, Printer, note, summary
from fastgen_jax.cli_prompts import with_system
from fastgen_jax.types import Response, SamplingParams

if TYPE_CHECKING:
    from fastgen_jax import Engine

FORGET = "/new"
PROMPT = ">>> "
KEY = (0, 0)
FORBIDDEN = ("n", "logprobs", "prompt_logprobs", "echo", "return_full_text")
"""Fields of SamplingParams that make no sense on a terminal."""


def check(as_json: bool, fields: Mapping[str, Any]) -> None:
    """ValueError for what needs a prompt that is not typed by hand."""
    usual = SamplingParams()
    wrong = [name for name in FORBIDDEN if name in fields and fields[name] != getattr(usual, name)]
    if wrong or as_json:
        flag = "json" if as_json else wrong[0].replace("_", "-")
        raise ValueError(f"--{flag} has no place in a conversation; give a prompt, or --prompts FILE")


def talk(engine: "Engine", fields: Mapping[str, Any], args: argparse.Namespace, out: TextIO) -> None:
    """Answer what is typed, until Ctrl-D."""
    params = engine.default_params.replace(**fields)
    chats = args.chat or args.system is not None
    if chats:  # what the template refuses, it refuses before anything is typed
        engine.chat_prompt(with_system(args.system, [{"role": "user", "content": "Hello"}]))
    elif args.chat is None:
        chats = getattr(engine.tokenizer, "chat_template", None) is not None
    what = f"a conversation, {FORGET} forgets it" if chats else "it continues what you write"
    note(f"{args.model}: {what}; Ctrl-C stops an answer, Ctrl-D ends", args.quiet)
    messages: list[dict[str, str]] = []
    for text in _typed_lines(out):
        if chats and text == FORGET:
            messages.clear()
            continue
        messages.append({"role": "user", "content": text})
        try:
            prompt = engine.chat_prompt(with_system(args.system, messages)) if chats else text
            printer = Printer([KEY], out)
            request_id = engine.add(prompt, params, on_piece=partial(printer.piece, KEY))
        except ValueError as error:  # such as a conversation longer than the model's context
            messages.pop()
            note(f"{error}; {FORGET} begins anew" if chats else str(error), quiet=False)
            continue
        response = _answer(engine, request_id, printer, args.quiet)
        messages.append({"role": "assistant", "content": response.text})
        note(summary([response], response.timings.total or 0.0), args.quiet)


def _typed_lines(out: TextIO) -> Iterator[str]:
    """Lines from the terminal, blank ones left out, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and a history)
    while True:
        try:
            if not out.isatty():  # input() would write its prompt there, and stdout is for the text
                print(PROMPT, end="", file=sys.stderr, flush=True)
            line = input(PROMPT if out.isatty() else "")
        except (EOFError, KeyboardInterrupt) as end:
            print(file=sys.stderr)
            if isinstance(end, KeyboardInterrupt):
                raise
            return
        if line.strip():
            yield line


def _answer(engine: "Engine", request_id: int, printer: Printer, quiet: bool) -> Response:
    """Print an answer as it comes, and return it. Ctrl-C aborts it; a second Ctrl-C raises."""
    with progress.spinner(WAITING, False if quiet else None) as stop_spinner, _ctrl_c_is_noted() as pressed:
        printer.before_first = stop_spinner
        try:
            while True:
                if pressed():
                    engine.abort(request_id)
                for response in engine.step():
                    if response.request_id == request_id:
                        printer.end(KEY, response, streamed=True)
                        return response
        except KeyboardInterrupt:
            printer.end_line()
            raise


@contextmanager
def _ctrl_c_is_noted() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C has come; it raises only the second time.

    An exception in the middle of a step would leave the engine in no state to go on.
    """
    times = 0

    def count(*_: Any) -> None:
        nonlocal times
        times += 1
        if times > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, count)
    try:
        yield lambda: times > 0
    finally:
        signal.signal(signal.SIGINT, before)
