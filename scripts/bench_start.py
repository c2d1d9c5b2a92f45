"""How long a start takes, and how fast a checkpoint is loaded.

python scripts/bench_start.py                # the tables of docs/performance.md, "Start-up"
python scripts/bench_start.py start          # from the start of the process to the first token, stage by stage
python scripts/bench_start.py load           # a safetensors checkpoint against plain reads of the same file

A start is a process of its own that runs `fastgen generate` with a cache folder of its own: once empty, then warm.
A checkpoint is read from the page cache.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPT = "The capital of France is"
FIRST_TOKEN = "first token"
IMPORTS = ("fastgen_jax.cli", "numpy", "jax", "flax.linen", "fastgen_jax.engine")
CALLS = {
    "fastgen_jax.checkpoint:resolve": "find the checkpoint, read its header",
    "fastgen_jax.kernels:choose_backend": "choose the attention backend",
    "fastgen_jax.models:param_shapes": "trace for the parameters' shapes",
    "fastgen_jax.checkpoint:Checkpoint.tokenizer": "tokenizer",
    "fastgen_jax.checkpoint:load_params": "weights",
    "fastgen_jax.runner:ModelRunner._do_reset": "allocate the pools",
    "fastgen_jax.programs:Programs.lower": "trace and lower the programs",
    "fastgen_jax.programs:Programs.compile_all": "compile, or read from the cache",
    "fastgen_jax.engine:Engine.step": "steps",
}
"""What is called in a start -> the stage that its time counts to, but for the time of stages inside it."""

MODEL, LAYERS = "llama3.2-1b", 4
"""Of the checkpoint that is loaded: large tensors, and fused ones, about 1 GB."""


class Stages:
    """Seconds of CPU and of wall time, each charged to the innermost stage that is open."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._open = ["other"]
        self._last = (time.process_time(), time.perf_counter())
        self.spent["start of Python"] = [self._last[0], 0.0]

    def charge(self) -> None:
        now = (time.process_time(), time.perf_counter())
        spent = self.spent.setdefault(self._open[-1], [0.0, 0.0])
        for i in range(2):
            spent[i] += now[i] - self._last[i]
        self._last = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.charge()
        self._open.append(name)
        try:
            yield
        finally:
            self.charge()
            self._open.pop()

    def watch(self, target: str, name: str) -> None:
        """Replace a function, "module:name" or "module:Class.name", by one whose time is charged to a stage."""
        module, _, path = target.partition(":")
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, __import__(module, fromlist=["_"]))
        call = getattr(owner, attribute)

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return call(*args, **kwargs)

        setattr(owner, attribute, watched)


def one_start(arguments: list[str]) -> None:
    """In a fresh process: run `fastgen generate`, print the stages up to its first token as JSON on stderr, and end."""
    stages = Stages()
    for module in IMPORTS:
        with stages.stage(f"import {module}"):
            __import__(module)
    for target, name in CALLS.items():
        stages.watch(target, name)
    from fastgen_jax import cli, cli_output

    def report(*_: Any) -> None:
        stages.charge()
        print(json.dumps(stages.spent), file=sys.stderr, flush=True)
        os._exit(0)

    cli_output.Printer.piece = report  # type: ignore[method-assign, assignment]
    raise SystemExit(cli.main(["generate", "--quiet", *arguments, PROMPT]))


def start(cache: str, arguments: list[str]) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "one-start", *arguments]
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stderr.splitlines()[-1])


def print_starts(repeats: int, arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as cache:
        cold = start(cache, arguments)
        warm = [start(cache, arguments) for _ in range(repeats)]
    print(f"| stage | cold cache: CPU s | wall s | warm, median of {repeats}: CPU s | wall s |")
    print("|---|---|---|---|---|")
    for name in dict.fromkeys([*cold, *(name for run in warm for name in run)]):
        medians = [statistics.median(run.get(name, (0, 0))[i] for run in warm) for i in range(2)]
        print_row(name, cold.get(name, (0, 0)), medians)
    totals = [[sum(spent[i] for spent in run.values()) for i in range(2)] for run in (cold, *warm)]
    print_row(FIRST_TOKEN, totals[0], [statistics.median(total[i] for total in totals[1:]) for i in range(2)])


def print_row(name: str, *pairs: Any) -> None:
    print(f"| {name} | " + " | ".join(f"{value:.2f}" for pair in pairs for value in pair) + " |")


def write_checkpoint(folder: Path) -> tuple[Any, Any]:
    """A bfloat16 checkpoint of `MODEL` with few layers; its config, and the shapes of its parameters."""
    import jax
    import ml_dtypes
    import numpy as np
    from flax import traverse_util
    from safetensors.numpy import save_file

    from fastgen_jax import kernels, models
    from fastgen_jax.checkpoint.config_only import read_config

    hf_config = read_config(MODEL) | {"num_hidden_layers": LAYERS}
    family = models.family(hf_config["model_type"])
    config = family.from_hf(hf_config)
    model = family.Model(config, kernels.get_backend("xla"))
    shapes = jax.eval_shape(functools.partial(models.init_params, model), jax.random.key(0))
    tensors = {}
    for path, leaf in traverse_util.flatten_dict(shapes).items():
        *scopes, module, _ = [part.replace("layers_", "layers.") for part in path]
        for part, rows in config.fused().get(module, {module: leaf.shape[0]}).items():
            name = ".".join((*scopes, part, "weight"))
            tensors[name] = np.ones((rows, *leaf.shape[1:]), ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return config, shapes


def print_loads(repeats: int) -> None:
    import numpy as np

    from fastgen_jax.checkpoint import load_params
    from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource

    with tempfile.TemporaryDirectory() as name:
        config, shapes = write_checkpoint(Path(name))
        path = Path(name) / "model.safetensors"
        nbytes = path.stat().st_size

        def read(buffer: np.ndarray) -> None:
            with open(path, "rb", buffering=0) as file:
                view, filled = memoryview(buffer), 0
                while filled < nbytes:
                    filled += file.readinto(view[filled:])

        def load(_: Any) -> Any:
            source = SafetensorsSource(Path(name))
            tied = config.tie_word_embeddings
            return load_params(source, shapes, dtype="bfloat16", fused=config.fused(), tied=tied, progress=False)

        touched = np.ones(nbytes, np.uint8)
        ways: Mapping[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
            "plain reads into memory used before": (read, lambda: touched),
            "plain reads into new memory": (read, lambda: np.empty(nbytes, np.uint8)),
            "load_params": (load, lambda: None),
        }
        for call, given in ways.values():
            call(given())
        times = [[timed(call, given()) for call, given in ways.values()] for _ in range(repeats)]
    print(f"{nbytes / 1e9:.2f} GB of bfloat16\n")
    print("| | CPU s | wall s | GB/s | of it by load_params |\n|---|---|---|---|---|")
    for i, what in enumerate(ways):
        cpu, wall = (statistics.median(run[i][clock] for run in times) for clock in range(2))
        share = statistics.median(run[i][1] / run[-1][1] for run in times)
        print(f"| {what} | {cpu:.2f} | {wall:.2f} | {nbytes / wall / 1e9:.2f} | {share:.0%} |")


def timed(call: Callable[[Any], Any], argument: Any) -> tuple[float, float]:
    """CPU and wall seconds of a call, its result's release not included."""
    cpu, wall = time.process_time(), time.perf_counter()
    kept = call(argument)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    del kept
    return spent


def main() -> None:
    if sys.argv[1:2] == ["one-start"]:
        one_start(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("start", "load"), help="one of the two tables; otherwise both")
    parser.add_argument("--repeats", type=int, default=5)
    args, flags = parser.parse_known_args()
    if args.what != "load":
        print_starts(args.repeats, flags)
    if args.what != "start":
        print_loads(args.repeats)


if __name__ == "__main__":
    main()
