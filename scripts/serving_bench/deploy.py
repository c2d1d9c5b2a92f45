"""A server for a benchmark: stub replicas in processes of their own, and `fastgen serve` in front of them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from fastgen_jax.serving.replica_process import ReplicaSettings
from fastgen_jax.serving.supervisor import free_port
from serving_bench.stub import Speed

HERE = Path(__file__).parent
READY_S = 60.0


class Replica:
    """One process, which can be killed and started again on its port."""

    def __init__(self, speed: Speed, replica_class: str = "", max_num_seqs: int = 256) -> None:
        self._speed, self._max_num_seqs = speed, max_num_seqs
        self._settings = ReplicaSettings(
            "stub", port=free_port("127.0.0.1"), replica_class=replica_class, log_level="warning", owned=True
        )
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._settings.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        arguments = map(str, (self._speed.step, self._speed.token, self._max_num_seqs))
        command = [sys.executable, str(HERE / "stub_replica.py"), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(self._settings.to_json().encode() + b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Front:
    """`fastgen serve`, with what was said to it. url: of HTTP."""

    def __init__(self, *arguments: str) -> None:
        """It is there, and all of its replicas are ready, when this returns."""
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        command = [sys.executable, "-m", "fastgen_jax.cli", "serve", "--port", "0", "--grpc-port", "0", *arguments]
        with open(self._log, "wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        self.url = self._when_ready()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _when_ready(self) -> str:
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process.poll() is None:
            if match := re.search(r"HTTP on (http://\S+?),", self.log()):
                with contextlib.suppress(httpx2.HTTPError):
                    if set(httpx2.get(f"{match[1]}/health").json()["replicas"].values()) == {"ready"}:
                        return match[1]
            time.sleep(0.1)
        raise RuntimeError(f"the server did not get ready:\n{self.log()[-2000:]}")

    def health(self) -> dict[str, Any]:
        return httpx2.get(f"{self.url}/health").json()

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, as Prometheus writes them."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def deployment(
    num_replicas: int, speed: Speed, *arguments: str, max_num_seqs: int = 256
) -> Iterator[tuple[Front, list[Replica]]]:
    """So many stub replicas behind a server with these arguments."""
    replicas = [Replica(speed, max_num_seqs=max_num_seqs) for _ in range(num_replicas)]
    try:
        where = [part for replica in replicas for part in ("--replica", replica.address)]
        front = Front(*where, *arguments)
        try:
            yield front, replicas
        finally:
            front.stop()
    finally:
        for replica in replicas:
            replica.stop()


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
