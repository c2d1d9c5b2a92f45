"""What the stages of a device check have measured, kept in a file that is whole at any moment."""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

OK, NO_TIME, FAILED, RUNNING, SKIPPED = "ok", "no time", "failed", "running", "skipped"

Entry = dict[str, Any]
"""A stage: its `status`, one of those above; `note`, why; `seconds` it took; `rows`, what it measured."""


class OutOfTime(Exception):
    """A stage's time is up."""


def new_entry(status: str, note: str = "") -> Entry:
    return {"status": status, "note": note, "seconds": 0.0, "rows": []}


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value`; a reader sees the old one or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


class Stage:
    """A stage that is running; `add` keeps one more measurement."""

    def __init__(self, record: "Record", entry: Entry) -> None:
        self._record, self._entry = record, entry

    def add(self, **row: Any) -> None:
        """Keep a row: what it is of, and raw figures such as `seconds` and `bytes`."""
        self._entry["rows"].append(row)
        self._record.save()

    def note(self, text: str) -> None:
        """Say something of the stage as a whole."""
        self._entry["note"] = "; ".join(filter(None, (self._entry["note"], text)))

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._record.left_s

    def check_time(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTime unless more than `needed_s` seconds are left."""
        if self.left_s <= needed_s:
            raise OutOfTime


class Record:
    """The stages of one process. deadline: by `time.monotonic`."""

    def __init__(self, path: Path, deadline: float) -> None:
        self._path, self._deadline = path, deadline
        self.stages: dict[str, Entry] = {}

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def run(self, name: str, measure: Callable[[Stage], None]) -> None:
        """Run a stage. Whatever it raises is noted, and what it measured before that is kept."""
        entry = self.stages[name] = new_entry(RUNNING)
        self.save()
        start = time.monotonic()
        stage = Stage(self, entry)
        try:
            stage.check_time()
            measure(stage)
            entry["status"] = OK
        except OutOfTime:
            entry["status"] = NO_TIME
        except Exception as error:
            traceback.print_exc()
            entry["status"] = FAILED
            stage.note(one_line(error))
        entry["seconds"] = round(time.monotonic() - start, 1)
        self.save()

    def save(self) -> None:
        write_json(self._path, self.stages)


def one_line(error: BaseException) -> str:
    """Its type and the first line of what it says."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]:.200}"
