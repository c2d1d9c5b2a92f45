"""What a benchmark's results say of where they come from."""

import datetime
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("fastgen-jax", "jax", "jaxlib", "numpy")


def about() -> dict[str, Any]:
    """The command, the date, the machine's kind and the versions."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform(terse=True)},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def cpu_model() -> str:
    """The CPU's name, as well as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
