"""What the machine calls itself. Standard library only."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name, as well as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
