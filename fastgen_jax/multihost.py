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
says so in one sentence and exits with status 1, within `SILENCE_S` seconds at most.
"""

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from fastgen_jax import pretrained
from fastgen_jax.orders import Order
from fastgen_jax.types import EngineConfig

log = logging.getLogger(__name__)

PING_EVERY_S = 2.0
SILENCE_S = 20.0
"""A peer that says nothing for so long is given up; a living one pings."""

JOIN_S = 300.0
TRY_EVERY_S, GRACE_S = 0.2, 5.0
REFUSED = b"!"

LOST = 1
"""Exit status of a process that has lost a peer."""


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
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    if coordinator is None:
        jax.distributed.initialize(initialization_timeout=int(timeout))
        return _met_by_jax(timeout)
    # Met here first: JAX's own meeting aborts the process where somebody is missing or comes twice.
    host, _, port = coordinator.rpartition(":")
    assert num_processes is not None and process_id is not None
    if process_id == 0:
        with _listener(host, int(port)) as listener:
            found = _accept(listener, num_processes, timeout)
        address = f"{host}:{_free_port(host)}"
        for connection in found:
            connection.send_bytes(address.encode())
        leader = Leader(found)
        _initialize(address, num_processes, 0)
        return leader
    connection = _connect(host, int(port), process_id, num_processes, timeout)
    address = _reply(connection)
    follower = Follower(connection)  # from here on it watches the leader
    _initialize(address, num_processes, process_id)
    return follower


def _initialize(address: str, num_processes: int, process_id: int) -> None:
    # Detection would give each process of Slurm's one GPU.
    jax.distributed.initialize(address, num_processes, process_id, cluster_detection_method="deactivate")


def _met_by_jax(timeout: float) -> "Leader | Follower":
    """Connect processes that JAX has brought together already."""
    if jax.process_index() > 0:
        host, port = json.loads(_broadcast(""))
        connection = _connect(host, port, jax.process_index(), jax.process_count(), timeout)
        _reply(connection)
        return Follower(connection)
    host = socket.gethostbyname(socket.getfqdn())
    with _listener(host, 0) as listener:
        _broadcast(json.dumps([host, listener.address[1]]))
        found = _accept(listener, jax.process_count(), timeout)
    for connection in found:
        connection.send_bytes(b"ok")
    return Leader(found)


@contextlib.contextmanager
def _listener(host: str, port: int) -> Iterator[Listener]:
    try:
        listener = Listener((host, port), backlog=64)
    except OSError as error:
        raise ValueError(f"process 0 cannot listen on {host}:{port}: {error.strerror or error}") from error
    with contextlib.closing(listener):
        yield listener


def _accept(listener: Listener, count: int, timeout: float) -> list[Connection]:
    """Connections from the processes 1 to count - 1, in order. ValueError if one is not as it should be."""
    found: dict[int, Connection] = {}
    done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed, after the timeout
            while len(found) < count - 1:
                connection = listener.accept()
                rank, theirs, versions = json.loads(connection.recv_bytes())
                wrong = ""
                if rank in found:
                    wrong = f"process_id={rank} has come twice; each process has a number of its own"
                elif theirs != count:
                    wrong = f"num_processes={theirs} says process {rank}, and {count} says process 0"
                elif versions != _versions():
                    wrong = f"process {rank} has {versions}, and process 0 {_versions()}; they must be the same"
                found.setdefault(rank, connection)
                if wrong:
                    for each in {connection, *found.values()}:
                        each.send_bytes(REFUSED + wrong.encode())
                    done.put(wrong)
                    return
            done.put("")

    threading.Thread(target=accept, name="accept", daemon=True).start()
    try:
        wrong = done.get(timeout=timeout)
    except queue.Empty:
        host, port = listener.address
        came = f"{len(found)} of {count - 1} other processes"
        raise TimeoutError(f"{came} came to {host}:{port} within {timeout:g} s") from None
    if wrong:
        raise ValueError(wrong)
    return [found[rank] for rank in sorted(found)]


def _connect(host: str, port: int, rank: int, count: int, timeout: float) -> Connection:
    """To process 0, which may not be there yet."""
    end = time.monotonic() + timeout
    while True:
        try:
            connection = Client((host, port))
            break
        except OSError as error:
            if time.monotonic() > end:
                reason = error.strerror or error
                raise TimeoutError(f"process 0 was not at {host}:{port} within {timeout:g} s: {reason}") from error
            time.sleep(TRY_EVERY_S)
    connection.send_bytes(json.dumps([rank, count, _versions()]).encode())
    if not connection.poll(max(end - time.monotonic(), 0) + GRACE_S):
        raise TimeoutError(f"not all processes came to {host}:{port} within {timeout:g} s")
    return connection


def _reply(connection: Connection) -> str:
    """What process 0 says to a process that has come; ValueError if that is what is wrong."""
    try:
        reply = connection.recv_bytes()
    except (OSError, EOFError):
        raise TimeoutError("process 0 has given up waiting for the others") from None
    if reply.startswith(REFUSED):
        raise ValueError(reply.removeprefix(REFUSED).decode())
    return reply.decode()


def _versions() -> str:
    return f"fastgen-jax {version('fastgen-jax')}, jax {jax.__version__}"


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


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


class Peer:
    """A process at the other end of a connection. Messages are bytes, the first of which says of what kind they are."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self._connection = connection
        self._lock = threading.Lock()
        self._inbox = queue.SimpleQueue[tuple[bytes, bytes]]()
        self._is_leaving = False
        threading.Thread(target=self._listen, name=f"from {name}", daemon=True).start()
        threading.Thread(target=self._ping, name=f"to {name}", daemon=True).start()

    def send(self, kind: bytes, body: bytes = b"") -> None:
        self._is_leaving |= kind == b"q"
        try:
            with self._lock:
                self._connection.send_bytes(kind + body)
        except OSError as error:
            self._lose(f"is gone ({error.strerror or error})")

    def expect_end(self) -> None:
        """That it is gone from now on is no loss."""
        self._is_leaving = True

    def receive(self, kind: bytes) -> bytes:
        """The body of the next message, which must be of this kind."""
        found, body = self._inbox.get()
        if found != kind:
            raise RuntimeError(f"{self.name} sent {found!r} where {kind!r} was due")
        return body

    def receive_any(self) -> tuple[bytes, bytes]:
        return self._inbox.get()

    def _listen(self) -> None:
        while True:
            try:
                if not self._connection.poll(SILENCE_S):
                    self._lose(f"has said nothing for {SILENCE_S:g} s")
                message = self._connection.recv_bytes()
            except (OSError, EOFError):
                self._lose("is gone")
                return
            kind, body = message[:1], message[1:]
            if kind == b"q" or (kind == b"v" and body):  # it leaves, or says why all have to
                self._is_leaving = True
            if kind != b"p":
                self._inbox.put((kind, body))

    def _ping(self) -> None:
        stop = threading.Event()
        while not self._is_leaving:
            self.send(b"p")
            stop.wait(PING_EVERY_S)

    def _lose(self, how: str) -> None:
        if not self._is_leaving:
            end(f"{self.name} {how}: this process cannot go on without it")


def end(sentence: str) -> NoReturn:
    """End the process at once: its main thread may be waiting in a device for one that will not come."""
    print(f"fastgen: error: {sentence}", file=sys.stderr, flush=True)
    os._exit(LOST)


class Leader:
    """Process 0, which schedules: a `Group` for an engine."""

    leads = True

    def __init__(self, connections: list[Connection]) -> None:
        self._peers = [Peer(f"process {i}", connection) for i, connection in enumerate(connections, 1)]

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
        """Have every follower execute `order`."""
        data = order.to_bytes()
        for peer in self._peers:
            peer.send(b"o", data)

    def close(self) -> None:
        """Let the followers go; the model cannot be used any more."""
        for peer in self._peers:
            peer.send(b"q")
        for peer in self._peers:
            peer.receive(b"q")
        jax.distributed.shutdown()


class Follower:
    """Any other process: it does what the leader says."""

    leads = False

    def __init__(self, connection: Connection) -> None:
        self._leader = Peer("process 0, which leads,", connection)

    def agree(self, facts: Mapping[str, str]) -> None:
        """ValueError in every process unless all of them call this with the same facts."""
        self._leader.send(b"f", json.dumps(dict(facts)).encode())
        if verdict := self._leader.receive(b"v").decode():
            self._leader.expect_end()
            raise ValueError(verdict)

    def least(self, number: int) -> int:
        """The least of what all processes call this with."""
        self._leader.send(b"n", str(number).encode())
        return int(self._leader.receive(b"n"))

    def tell(self, order: Order) -> None:
        """Nobody: the leader tells."""

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
        while True:
            kind, body = self._leader.receive_any()
            if kind == b"q":
                break
            runner.execute(Order.from_bytes(body))
        self._leader.send(b"q")
        jax.distributed.shutdown()


def _broadcast(text: str) -> str:
    """Process 0's text, in every process."""
    data = np.zeros(512, np.uint8)
    data[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))).rstrip(b"\0").decode()
