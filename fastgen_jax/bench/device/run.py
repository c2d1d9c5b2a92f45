"""The command: starts the stages' processes, gathers what they measure, prints the table."""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fastgen_jax.bench.device import report
from fastgen_jax.bench.device.record import FAILED, NO_TIME, RUNNING, Entry, new_entry, write_json

ROOT = Path(__file__).parents[3]
TICK_S = 0.2
GRACE_S = 3.0  # for a process to end by itself, once its time is up


class Group(NamedTuple):
    """Stages of one process, and the share of the whole budget that it may take."""

    stages: tuple[str, ...]
    share: float


# In order of worth. A stage that breaks the device or hangs takes the rest of its process with it. What is left, two
# fifths or more, is the engine's, whose programs take longest to compile.
GROUPS = (
    Group(("peaks", "parity"), 0.25),
    Group(("decode",), 0.25),
    Group(("prefill",), 0.1),
    Group(("engine", "gaps"), 1.0),
)

Launch = Callable[[Sequence[str], Path, float, Callable[[], None]], str]
"""Run stages, writing to a file, for so many seconds -> why it ended, if not well. The last argument is called now and
then, when there may be more in the file."""


def launch_process(
    stages: Sequence[str], path: Path, limit_s: float, tick: Callable[[], None], *, command: Sequence[str]
) -> str:
    """Run `command`, of `stages`, in a process of its own, which is killed once its time is up."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    arguments = [*stages, "--out", str(path), "--limit-s", f"{limit_s:.1f}"]
    process = subprocess.Popen([*command, *arguments], env=env, stdout=sys.stderr, start_new_session=True)
    deadline = time.monotonic() + limit_s + GRACE_S
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"killed after {limit_s + GRACE_S:.0f} s"
            time.sleep(TICK_S)
            tick()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group: whatever it has started ends too
            process.wait()
    return f"the process ended with exit code {process.returncode}" if process.returncode else ""


def check_device(budget_s: float, launch: Launch, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run all groups within the budget -> {"budget_s", "elapsed_s", "stages", "targets"}.

    save: called with what there is whenever there may be more.
    """
    start = time.monotonic()
    result: dict[str, Any] = {"budget_s": budget_s, "elapsed_s": 0.0, "stages": {}, "targets": []}

    def take(found: dict[str, Entry]) -> None:
        result["stages"] |= found
        result["targets"] = [target._asdict() | {"met": target.met} for target in report.targets(result["stages"])]
        result["elapsed_s"] = round(time.monotonic() - start, 1)
        save(result)

    for group in GROUPS:
        left_s = budget_s - (time.monotonic() - start)
        take(run_group(group, min(left_s, group.share * budget_s), launch, take))
    return result


def run_group(
    group: Group, limit_s: float, launch: Launch, take: Callable[[dict[str, Entry]], None]
) -> dict[str, Entry]:
    """What each stage of a group measured, whatever became of its process. take: told of what there is meanwhile."""
    if limit_s <= 0:
        return {name: new_entry(NO_TIME) for name in group.stages}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.json"
        failure = launch(group.stages, path, limit_s, lambda: take(_read(path)))
        found = _read(path)
    for entry in found.values():
        if entry["status"] == RUNNING:
            entry |= {"status": FAILED, "note": failure}
    return {name: found.get(name) or new_entry(FAILED, failure or "not reached") for name in group.stages}


def _read(path: Path) -> dict[str, Entry]:
    return json.loads(path.read_text()) if path.exists() else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every stage ran to its end and every parity case passed, else 1."""
    parser = argparse.ArgumentParser(
        prog="device_check.py", description="Check and measure the attention kernels and a whole engine on this GPU."
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here, after each stage")
    parser.add_argument("--budget-s", type=float, default=290, metavar="S", help="seconds it may take (default 290)")
    parser.add_argument("--rehearse", action="store_true", help="in miniature, on any device: tests the script itself")
    args = parser.parse_args(argv)
    if not 0 < args.budget_s < math.inf:
        parser.error(f"--budget-s {args.budget_s:g} must be a number of seconds above 0")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json} must be a file in a folder that exists")
    command = [sys.executable, "-m", "fastgen_jax.bench.device.stages", *(["--rehearse"] if args.rehearse else [])]
    launch = partial(launch_process, command=command)
    save = partial(write_json, args.json) if args.json else lambda _: None
    result = check_device(args.budget_s, launch, save)
    print("\n".join(report.table(result)))
    return 0 if report.is_sound(result["stages"]) else 1
