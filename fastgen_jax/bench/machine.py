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
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform(terse=True)},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
