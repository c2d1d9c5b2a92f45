"""Replicas on this machine: started, and started again if they die."""

import asyncio
import dataclasses
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from fastgen_jax.serving.replica_process import CANNOT_LOAD, FAILED, USAGE_ERROR, ReplicaSettings

log = logging.getLogger("fastgen_jax.serving")

COMMAND = (sys.executable, "-m", "fastgen_jax.serving.replica_process")

HOPELESS = {USAGE_ERROR: USAGE_ERROR, CANNOT_LOAD: FAILED}
"""What a replica's exit status means for its server if it has never run."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between a death and the next start; doubled with each death in a row."""

LIVED_S = 60.0
"""A process that lived so long did not die of how it was started."""


class LocalReplica:
    """One process, and those that follow it on the same port.

    devices: what CUDA_VISIBLE_DEVICES is for it; None leaves it alone.
    on_hopeless: called with an exit status when the first of them cannot even load its engine, as when there is no
        such model. Later ones are started again whatever happens.
    restarts: whether it is started again when it dies; if not, its end is hopeless, too.
    command: what to run; `COMMAND` unless given.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        devices: str | None = None,
        on_hopeless: Callable[[int], None],
        restarts: bool = True,
        command: Sequence[str] | None = None,
    ) -> None:
        self._settings = dataclasses.replace(settings, port=settings.port or free_port(settings.host), owned=True)
        self._devices = devices
        self._on_hopeless = on_hopeless
        self._restarts = restarts
        self._command = tuple(command or COMMAND)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"{self._settings.host}:{self._settings.port}"

    async def run(self) -> None:
        """Keep a process running; cancel to stop that, and then `stop`."""
        pause = FIRST_PAUSE_S
        for number in itertools.count():
            start = time.monotonic()
            try:
                status: int | OSError = await self._run_once()
            except OSError as error:  # no memory or no file descriptors for another process just now
                status = error
            if number == 0 and isinstance(status, int) and status in HOPELESS:
                self._on_hopeless(HOPELESS[status])
                return
            if not self._restarts:
                log.error("replica %s ended (%s)", self.address, status)
                self._on_hopeless(FAILED)
                return
            pause = FIRST_PAUSE_S if time.monotonic() - start > LIVED_S else pause
            log.warning("replica %s ended (%s); it is started again in %s s", self.address, status, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _run_once(self) -> int:
        """Run a process; its exit status."""
        env = dict(os.environ) if self._devices is None else {**os.environ, "CUDA_VISIBLE_DEVICES": self._devices}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            env=env,
            start_new_session=True,  # Ctrl-C is for whoever starts it to pass on
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._settings.to_json().encode() + b"\n")  # no argument: it has API keys
        return await self._process.wait()

    async def stop(self, *, seconds: float) -> None:
        """End the process, by force if it takes longer than so many seconds."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            process.kill()
            await process.wait()


def free_port(host: str) -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that may be used; empty without any."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return out.stdout.split() if out.returncode == 0 else []


def share_gpus(num_replicas: int, gpus_each: int = 1) -> list[str | None]:
    """GPUs for each replica, or None for all where there are none. ValueError if there are too few."""
    found = gpus() if os.environ.get("JAX_PLATFORMS", "") != "cpu" else []
    if not found:
        return [None] * num_replicas
    if len(found) < num_replicas * gpus_each:
        want = "a GPU each" if gpus_each == 1 else f"{gpus_each} GPUs each"
        raise ValueError(f"replicas={num_replicas} want {want}, and there are {len(found)}: {', '.join(found)}")
    return [",".join(found[i * gpus_each : (i + 1) * gpus_each]) for i in range(num_replicas)]
