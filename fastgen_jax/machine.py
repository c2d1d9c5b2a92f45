"""What the machine calls itself, and where it keeps what can be made again. Standard library only."""

import os
import platform
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgen_jax"


def cpu_model() -> str:
    """The CPU's name, as well as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
