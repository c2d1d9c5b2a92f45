"""A process of a device check: some stages, one after the other, on the device that JAX sees."""

import argparse
import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fastgen_jax.bench.device.record import Record, Stage
from fastgen_jax.bench.device.sizes import FULL, REHEARSAL, Sizes

# Stage -> the module and function that measure it. Modules are imported in their stage, where a failure belongs.
STAGES = {
    "peaks": ("peaks", "measure"),
    "parity": ("parity", "measure"),
    "decode": ("attention", "measure_decode"),
    "prefill": ("attention", "measure_prefill"),
    "engine": ("whole_engine", "measure"),
    "gaps": ("token_gaps", "measure"),
}
SHARING = ("engine", "gaps")
"""Stages that take a `Session`, which holds an engine, in place of the sizes."""

NOT_NEEDED = {"gguf": ("gguf", "gguf.quants"), "jinja2": ("jinja2",)}
"""Packages and their modules that the engine imports for checkpoints and chat templates; there are none here."""


class Shared:
    """What the stages of one process have in common."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @cached_property
    def session(self) -> Any:
        from fastgen_jax.bench.device.whole_engine import Session

        return Session(self.sizes)

    def measure(self, name: str, stage: Stage) -> None:
        module, function = STAGES[name]
        measure = getattr(importlib.import_module(f"fastgen_jax.bench.device.{module}"), function)
        measure(stage, self.session if name in SHARING else self.sizes)


def run_stages(names: Sequence[str], sizes: Sizes, path: Path, limit_s: float) -> None:
    """Run stages for at most `limit_s` seconds; what they have measured is in the file `path` at any moment."""
    record, shared = Record(path, time.monotonic() + limit_s), Shared(sizes)
    for name in names:
        record.run(name, partial(shared.measure, name))
        entry = record.stages[name]
        print(f"{name}: {entry['status']}, {entry['seconds']} s", file=sys.stderr, flush=True)
        gc.collect()


def stand_in_for_missing(packages: dict[str, tuple[str, ...]]) -> None:
    """Have imports of what is not installed find an empty module; whatever is asked of it is a class."""
    for package, names in packages.items():
        if importlib.util.find_spec(package) is None:
            for name in names:
                module: Any = ModuleType(name)
                module.__getattr__ = lambda attribute: type(attribute, (Exception,), {})
                sys.modules[name] = module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--out", type=Path, required=True, help="file for what is measured")
    parser.add_argument("--limit-s", type=float, required=True, help="seconds that there are")
    parser.add_argument("--rehearse", action="store_true", help="in miniature")
    args = parser.parse_args()
    stand_in_for_missing(NOT_NEEDED)
    run_stages(args.stages, REHEARSAL if args.rehearse else FULL, args.out, args.limit_s)


if __name__ == "__main__":
    main()
