"""What a benchmark's results say of where they come from."""

import datetime
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fastgen_jax.machine import cpu_model

PACKAGES = ("fastgen-jax", "jax", "jaxlib", "numpy")


def about() -> dict[str, Any]:
    """The command, the date, the machine's kind and the versions."""
    return {
        "command": _command(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform(terse=True)},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _command(argv: list[str]) -> str:
    """As a shell takes it, an API key left out."""
    name, *args = argv
    for i, arg in enumerate(args):
        if i and args[i - 1] == "--api-key":
            args[i] = "..."
        elif arg.startswith("--api-key="):
            args[i] = "--api-key=..."
    return shlex.join([Path(name).name, *args])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
