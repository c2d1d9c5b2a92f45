"""Several processes, on as many hosts, that share one model.

JAX runs one program on the devices of all of them if each process calls it. So one process leads: it schedules, packs
each step into one small array, and tells the others, which run the same programs with it in lockstep.

    group = multihost.join("10.0.0.1:9000", num_processes=2, process_id=rank)
    if group.leads:
        engine = Engine.from_pretrained("llama2-70b", tensor_parallel=16, group=group)
        ...
        group.close()
    else:
        group.follow("llama2-70b", tensor_parallel=16)  # returns when the leader closes

A process whose peer has died or hangs cannot go on, nor can it be interrupted while its device waits for the other: it
says so in one sentence and exits with status 1, within `peers.SILENCE_S` seconds at most.
"""

import atexit
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fastgen_jax import pretrained
from fastgen_jax.orders import Order
from fastgen_jax.peers import GONE, Peer, accept, connect, end, free_port, listening, reply_of
from fastgen_jax.types import EngineConfig

log = logging.getLogger(__name__)

JOIN_S, SETTLE_S = 300.0, 3.0


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = JOIN_S,
) -> "Leader | Follower":
    """Meet the other processes; every one of them calls this, before anything else of JAX.

    coordinator: HOST:PORT of process 0, on a port that is free there. Without it, all three are found out from Slurm,
        Open MPI or Kubernetes, as `jax.distributed.initialize` does. timeout: seconds to wait for the others.

    ValueError, one sentence, for numbers that cannot be, here or in another process; TimeoutError if not all come.
    """
    check(coordinator, num_processes, process_id)
    group = _meet(coordinator, num_processes, process_id, timeout)
    atexit.register(_end_others, group)
    return group


def _end_others(group: "Leader | Follower") -> None:
    """At the end of a process that has not parted: JAX would wait minutes for the others, and they for this process."""
    if not group.has_parted:
        end("this process has ended without closing the engine, so those that share it end, too")


def _meet(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: float
) -> "Leader | Follower":
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    if coordinator is None:
        # Slurm's and Open MPI's processes would get one GPU each, by their number on the host.
        jax.distributed.initialize(local_device_ids=_gpus() or None, initialization_timeout=int(timeout))
        return _met_by_jax(timeout)
    # Met here first: JAX's own meeting aborts the process where somebody is missing or comes twice.
    host, _, port = coordinator.rpartition(":")
    assert num_processes is not None and process_id is not None
    if process_id == 0:
        with listening(host, int(port)) as listener:
            found = accept(listener, num_processes, timeout)
        address = f"{host}:{free_port(host)}"
        for connection in found:
            connection.send_bytes(address.encode())
        leader = Leader(found)
        _initialize(address, num_processes, 0)
        return leader
    connection = connect(host, int(port), process_id, num_processes, timeout)
    address = reply_of(connection)
    follower = Follower(connection)  # from here on it watches the leader
    _initialize(address, num_processes, process_id)
    return follower


def _gpus() -> list[int]:
    """Numbers of the GPUs that this process may use; empty without any."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return list(range(len([name for name in visible.split(",") if name])))
    return list(range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def _initialize(address: str, num_processes: int, process_id: int) -> None:
    jax.distributed.initialize(address, num_processes, process_id, cluster_detection_method="deactivate")


def _met_by_jax(timeout: float) -> "Leader | Follower":
    """Connect processes that JAX has brought together already."""
    if jax.process_index() > 0:
        host, port = json.loads(_broadcast(""))
        connection = connect(host, port, jax.process_index(), jax.process_count(), timeout)
        reply_of(connection)
        return Follower(connection)
    host = socket.gethostbyname(socket.getfqdn())
    with listening(host, 0) as listener:
        _broadcast(json.dumps([host, listener.address[1]]))
        found = accept(listener, jax.process_count(), timeout)
    for connection in found:
        connection.send_bytes(b"ok")
    return Leader(found)


def check(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """ValueError, one sentence, for arguments of `join` that cannot be."""
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ValueError(f"coordinator={coordinator!r} is not HOST:PORT, as 10.0.0.1:9000")
    given = (coordinator, num_processes, process_id)
    if None in given and any(each is not None for each in given):
        raise ValueError("coordinator, num_processes and process_id go together; give all of them, or none")
    if num_processes is not None and num_processes < 2:
        raise ValueError(f"num_processes={num_processes} is nobody to join; it must be 2 or more")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"process_id={process_id} of {num_processes} processes; it must be 0 to {num_processes - 1}")


RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
"""Where Slurm, Open MPI and Kubernetes' indexed jobs tell a process its number."""


def detected_rank() -> int:
    """This process's number, as whoever started it says; ValueError if nobody does."""
    for name in RANKS:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    raise ValueError(f"this process's number among the others is not known: none of {', '.join(RANKS)} is set")


def wait_for_leader() -> None:
    """Have the first SIGTERM or SIGINT do nothing: the leader finishes what runs, and lets this process go."""

    def once(number: int, _: Any) -> None:
        print("fastgen: waiting for process 0 to end; once more to stop at once", file=sys.stderr, flush=True)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, once)


class Leader:
    """Process 0, which schedules: a `Group` for an engine."""

    leads = True

    def __init__(self, connections: list[Connection]) -> None:
        self._peers = [Peer(f"process {i}", connection) for i, connection in enumerate(connections, 1)]
        self.has_parted = self._is_broken = False

    def agree(self, facts: Mapping[str, str]) -> None:
        """ValueError in every process unless all of them call this with the same facts."""
        verdict = ""
        for peer in self._peers:
            theirs = json.loads(peer.receive(b"f"))
            different = [name for name in facts if facts[name] != theirs.get(name)]
            if different and not verdict:
                name = different[0]
                verdict = f"{name} differs: process 0 has {facts[name]}, {peer.name} {theirs.get(name)}"
        for peer in self._peers:
            peer.send(b"v", verdict.encode())
        if verdict:
            self.has_parted = True
            for peer in self._peers:
                peer.expect_end()
            raise ValueError(verdict)

    def least(self, number: int) -> int:
        """The least of what all processes call this with."""
        number = min(number, *(int(peer.receive(b"n")) for peer in self._peers))
        for peer in self._peers:
            peer.send(b"n", str(number).encode())
        return number

    def tell(self, order: Order) -> None:
        """Have every follower execute `order`. RuntimeError where none can be told any more."""
        if self.has_parted:
            raise RuntimeError("the engine is closed")
        if self._is_broken:
            raise RuntimeError("a step was broken off, so the processes that share the model are out of step: end them")
        data = order.to_bytes()
        for peer in self._peers:
            peer.send(b"o", data)

    def settle(self) -> None:
        """Leave the watchers time to find somebody gone, which a device's error usually means, and to say so."""
        time.sleep(SETTLE_S)

    def break_off(self) -> None:
        """Let no further order be given: a follower may wait in its device for what this process did not do."""
        self._is_broken = True

    def close(self) -> None:
        """Let the followers go; the model cannot be used any more. Where they are out of step, their end is this one's.

        A second call does nothing.
        """
        if self.has_parted or self._is_broken:
            return
        for peer in self._peers:
            peer.send(b"q")
        for peer in self._peers:
            while (kind := peer.receive_any()[0]) != b"q":
                if kind == GONE:
                    end(f"{peer.name} is gone and has not parted")
        self.has_parted = True
        jax.distributed.shutdown()


class Follower:
    """Any other process: it does what the leader says."""

    leads = False

    def __init__(self, connection: Connection) -> None:
        self._leader = Peer("process 0, which leads,", connection)
        self.has_parted = False

    def agree(self, facts: Mapping[str, str]) -> None:
        """ValueError in every process unless all of them call this with the same facts."""
        self._leader.send(b"f", json.dumps(dict(facts)).encode())
        if verdict := self._leader.receive(b"v").decode():
            self.has_parted = True
            self._leader.expect_end()
            raise ValueError(verdict)

    def least(self, number: int) -> int:
        """The least of what all processes call this with."""
        self._leader.send(b"n", str(number).encode())
        return int(self._leader.receive(b"n"))

    def tell(self, order: Order) -> None:
        """Nobody: the leader tells."""

    def break_off(self) -> None:
        """As little."""

    def settle(self) -> None:
        """As the leader's."""
        time.sleep(SETTLE_S)

    def close(self) -> None:
        """The leader parts."""

    def follow(
        self, name: str, *, revision: str | None = None, show_progress: bool | None = None, **config: Any
    ) -> None:
        """Share the leader's model, until it closes; the arguments are those of its `Engine.from_pretrained`."""
        engine_config = EngineConfig(**config)
        found = pretrained.load(name, engine_config, revision=revision, group=self, show_progress=show_progress)
        runner = pretrained.make_runner(found.model, found.params, engine_config, self)
        log.info("following process 0")
        self._until_closed(runner.execute)

    def wait(self) -> None:
        """Wait until the leader closes."""
        self._until_closed(lambda order: None)

    def _until_closed(self, execute: Callable[[Order], Any]) -> None:
        while True:
            kind, body = self._leader.receive_any()
            if kind == b"q":
                break
            try:
                execute(Order.from_bytes(body))
            except Exception:
                self.settle()
                raise
        self._leader.send(b"q")
        self.has_parted = True
        jax.distributed.shutdown()


def _broadcast(text: str) -> str:
    """Process 0's text, in every process."""
    data = np.zeros(512, np.uint8)
    data[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))).rstrip(b"\0").decode()
