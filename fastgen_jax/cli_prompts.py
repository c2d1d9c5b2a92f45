"""Where prompts come from: the command line, stdin, or a file of lines."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen_jax.cli_flags import biases
from fastgen_jax.types import SamplingParams

if TYPE_CHECKING:
    from fastgen_jax import Engine

HOW = "give one as an argument, on stdin, or many with --prompts FILE"
SILENCE_S = 2.0

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Job:
    """One prompt to run.

    prompt: text or token ids.
    messages: a conversation, [{"role": ..., "content": ...}, ...], in place of a prompt.
    fields: of SamplingParams, for this prompt alone.
    where: names the prompt in an error; empty if it is the only one.
    """

    prompt: str | list[int] = ""
    messages: Messages | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def encoded(self, engine: "Engine") -> str | list[int]:
        """What the engine takes: a conversation as the token ids of its template."""
        return self.prompt if self.messages is None else engine.chat_prompt(self.messages)

    def in_chat(self, system: str | None) -> "Job":
        """The text as a user's message, behind the system's, which a conversation with its own keeps."""
        if not isinstance(self.prompt, str):
            raise ValueError("--chat and --system are for text, and this prompt is token ids")
        messages = self.messages or [{"role": "user", "content": self.prompt}]
        return replace(self, messages=with_system(system, messages))


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put the name of a prompt in front of what is wrong with it."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def with_system(system: str | None, messages: Messages) -> Messages:
    """`messages` behind the system's one, if there is one to add."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_jobs(prompt: str | None, file: str | None, *, quiet: bool = False) -> list[Job]:
    """The prompts of the command line: `prompt`, or the lines of `file` ("-" is stdin), or all of stdin.

    quiet: do not say so where stdin keeps us waiting. ValueError if there is none; an empty stdin is none.
    """
    if prompt is not None:
        if file is not None:
            raise ValueError("a prompt and --prompts were given; give one of them")
        return [Job(checked_text(prompt))]
    if file is None:
        return [Job(checked_text(_read_stdin(quiet).rstrip("\r\n")))]
    text = _read_stdin(quiet) if file == "-" else _read_file(file)
    name = "stdin" if file == "-" else file
    read = _read_json_line if file.endswith(".jsonl") else _read_text_line
    # Not splitlines: a line of JSON may hold other characters that separate lines.
    lines = [(f"{name} line {i}", line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1)]
    jobs = [read(line, where) for where, line in lines if line.strip()]
    if not jobs:
        raise ValueError(f"{file} holds no prompt")
    return jobs


def stdin_is_terminal() -> bool:
    return _has_stdin() and sys.stdin.isatty()


def _has_stdin() -> bool:
    return sys.stdin is not None and not sys.stdin.closed


def _read_stdin(quiet: bool) -> str:
    """All of stdin, which must have something."""
    if not _has_stdin():
        raise ValueError(f"no prompt: stdin is closed; {HOW}")
    note = threading.Timer(SILENCE_S, print, ["fastgen: waiting for a prompt on stdin"], {"file": sys.stderr})
    note.daemon = True
    if not quiet:
        note.start()
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not {error.encoding} text") from error
    finally:
        note.cancel()
    if not text.strip():
        raise ValueError(f"no prompt: stdin is empty; {HOW}")
    return text


def _read_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"--prompts {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {name} is not UTF-8 text") from error


def checked_text(text: str) -> str:
    """`text`, if it came from valid UTF-8; Python lets other bytes through as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r:.60} is not valid UTF-8") from error
    return text


def _read_text_line(line: str, where: str) -> Job:
    with naming(where):
        return Job(checked_text(line), where=where)


def _read_json_line(line: str, where: str) -> Job:
    with naming(where):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
            raise ValueError('a line is a JSON object with "prompt" or "messages", one of them')
        if "prompt" in entry:
            job = Job(prompt=_prompt(entry.pop("prompt")), where=where)
        else:
            job = Job(messages=_messages(entry.pop("messages")), where=where)
        if isinstance(entry.get("logit_bias"), dict):
            entry["logit_bias"] = biases(entry["logit_bias"])
        check_fields(entry)
        return replace(job, fields=entry)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return checked_text(value)
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise ValueError(f'"prompt" is a string or a list of token ids, not {value!r:.60}')
    return value


def _messages(value: Any) -> Messages:
    if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
        raise ValueError(f'"messages" is a list of {{"role": ..., "content": ...}}, not {value!r:.60}')
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise as SamplingParams does for what no default of a model's can make right."""
    # min_tokens is measured against a max_tokens that only the model's defaults may tell.
    SamplingParams(**{"max_tokens": None, **fields})
