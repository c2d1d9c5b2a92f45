"""`plan`: what a model needs of a GPU, and what it could do there, without having the GPU.

The work is done by `plan_worker`, in a process of its own: it must not touch a GPU that this process may be using, and
what the kernel compiler says goes to a process's standard output.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastgen_jax.compiler_output import parse_ptxas
from fastgen_jax.gpus import get_gpu
from fastgen_jax.types import EngineConfig

MEM_FRACTION = 0.75
"""Share of a GPU's memory that JAX takes unless XLA_CLIENT_MEM_FRACTION says otherwise."""

MAX_TP = 64


def size_text(num_bytes: int) -> str:
    """In GB, less than a tenth of one in MB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


@dataclass(frozen=True)
class Request:
    """What is planned. config: fields of `EngineConfig`."""

    model: str
    gpu: str
    tp: int
    mem_fraction: float
    config: dict[str, Any]
    show_progress: bool | None = None

    def __post_init__(self) -> None:
        get_gpu(self.gpu)
        EngineConfig(**self.config)
        if isinstance(self.tp, bool) or not isinstance(self.tp, int) or not 1 <= self.tp <= MAX_TP:
            raise ValueError(f"tp={self.tp!r} must be a whole number from 1 to {MAX_TP}")
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"mem_fraction={self.mem_fraction!r} must be above 0 and at most 1")


def plan(
    model: str,
    gpu: str,
    *,
    tp: int = 1,
    mem_fraction: float = MEM_FRACTION,
    show_progress: bool | None = None,
    **config: Any,
) -> dict[str, Any]:
    """The plan of an engine, as docs/plan.md describes its fields; all figures are those of one device.

    model: an alias such as "llama2-7b", a folder, a config.json or a .gguf file; no weights are read.
    gpu: a name of `gpus.GPUS`, or a .json file with the fields of `gpus.Gpu`.
    tp: devices that share the model.
    mem_fraction: what XLA_CLIENT_MEM_FRACTION will be.
    show_progress: a bar on stderr while compiling; None is a bar where stderr is a terminal, and a line elsewhere.
    config: fields of `EngineConfig`; `gpu_memory_utilization` is of what JAX takes.

    Takes a few minutes for a model of 7B parameters on two quiet cores (max_num_batched_tokens=16 has one bucket and is
    quick), and the extra `plan`. Raises ValueError with one sentence for what is unknown or cannot be, and
    ChildProcessError if compiling broke down; that something does not fit is an answer, not an error.
    """
    request = Request(model, gpu, tp, mem_fraction, config, show_progress)
    with tempfile.TemporaryDirectory(prefix="fastgen-plan-") as folder:
        answer, report = Path(folder) / "report.json", Path(folder) / "stdout"
        with report.open("wb") as stdout:
            status = subprocess.run(
                [sys.executable, "-m", "fastgen_jax.plan_worker", str(answer)],
                input=json.dumps(asdict(request)).encode(),
                stdout=stdout,
                env=_environment(),
                check=False,
            ).returncode
        if status or not answer.is_file():
            raise ChildProcessError(f"the process that compiles for {gpu} ended with status {status}; see above why")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        printed = report.read_text(encoding="utf-8", errors="replace")
    if "error" in found:
        raise ValueError(found["error"])
    smem_bytes = found.pop("smem_bytes")
    return {**found, "kernels": [asdict(kernel) for kernel in parse_ptxas(printed, smem_bytes)]}


def _environment() -> dict[str, str]:
    """This process's, with the CPU as the platform, the kernel compiler talkative and XLA's warnings off.

    XLA warns of the pool's size at every program, for it takes a fifth of the memory to be out of bounds.
    """
    package = str(Path(__file__).parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
    }
