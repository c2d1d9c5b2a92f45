"""What every test runs under: the CPU, no network, strict shapes, and a compiler that hurries."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read by JAX and huggingface_hub when they are first imported, so set before any test module is.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "fastgen-jax-tests-xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Tiny programs compile three times faster unoptimised, and their results differ by rounding only.
# Eight devices of the one CPU, for what is shared out over several.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8")


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Free a module's compiled programs: each takes several of the 65,530 mappings that Linux lets a process have.

    A process that has used them up crashes in the compiler.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
