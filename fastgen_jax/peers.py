"""How processes on several hosts find each other and notice when one is gone: plain connections, without JAX's help."""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Client, Connection, Listener
from typing import NoReturn

PING_EVERY_S = 2.0
SILENCE_S = 20.0
"""A peer that says nothing for so long is given up; a living one pings."""

TRY_EVERY_S, GRACE_S = 0.2, 5.0
MAX_GREETING = 4096
REFUSED = b"!"
LOST = 1
"""Exit status of a process that has lost a peer."""

GONE = b""
"""The kind of what is received after the last message."""


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[Listener]:
    try:
        listener = Listener((host, port), backlog=64)
    except OSError as error:
        raise ValueError(f"process 0 cannot listen on {host}:{port}: {error.strerror or error}") from error
    with contextlib.closing(listener):
        yield listener


def accept(listener: Listener, count: int, timeout: float) -> list[Connection]:
    """Connections from the processes 1 to count - 1, in order. ValueError if one is not as it should be."""
    found: dict[int, Connection] = {}
    done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take() -> None:
        with contextlib.suppress(OSError):  # closed, after the timeout
            while len(found) < count - 1:
                connection = listener.accept()
                if (greeting := _greeting(connection)) is None:
                    connection.close()
                    continue
                rank, theirs, versions = greeting
                wrong = ""
                if rank in found:
                    wrong = f"process_id={rank} has come twice; each process has a number of its own"
                elif theirs != count:
                    wrong = f"num_processes={theirs} says process {rank}, and {count} says process 0"
                elif versions != our_versions():
                    wrong = f"process {rank} has {versions}, and process 0 {our_versions()}; they must be the same"
                found.setdefault(rank, connection)
                if wrong:
                    for each in {connection, *found.values()}:
                        each.send_bytes(REFUSED + wrong.encode())
                    done.put(wrong)
                    return
            done.put("")

    threading.Thread(target=take, name="accept", daemon=True).start()
    try:
        wrong = done.get(timeout=timeout)
    except queue.Empty:
        host, port = listener.address
        came = f"{len(found)} of {count - 1} other processes"
        raise TimeoutError(f"{came} came to {host}:{port} within {timeout:g} s") from None
    if wrong:
        raise ValueError(wrong)
    return [found[rank] for rank in sorted(found)]


def _greeting(connection: Connection) -> tuple[int, int, str] | None:
    """What `connect` says first; None if it is somebody else, as a probe of the port."""
    try:
        if not connection.poll(GRACE_S):
            return None
        rank, count, versions = json.loads(connection.recv_bytes(MAX_GREETING))
        return int(rank), int(count), str(versions)
    except (OSError, EOFError, ValueError, TypeError):
        return None


def connect(host: str, port: int, rank: int, count: int, timeout: float) -> Connection:
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
    connection.send_bytes(json.dumps([rank, count, our_versions()]).encode())
    if not connection.poll(max(end - time.monotonic(), 0) + GRACE_S):
        raise TimeoutError(f"not all processes came to {host}:{port} within {timeout:g} s")
    return connection


def reply_of(connection: Connection) -> str:
    """What process 0 says to a process that has come; ValueError if that is what is wrong."""
    try:
        reply = connection.recv_bytes()
    except (OSError, EOFError):
        raise TimeoutError("process 0 has given up waiting for the others") from None
    if reply.startswith(REFUSED):
        raise ValueError(reply.removeprefix(REFUSED).decode())
    return reply.decode()


def our_versions() -> str:
    return f"fastgen-jax {version('fastgen-jax')}, jax {version('jax')}"


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


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
        found, body = self.receive_any()
        if found != kind:
            raise RuntimeError(f"{self.name} sent {found!r} where {kind!r} was due")
        return body

    def receive_any(self) -> tuple[bytes, bytes]:
        """The next message, or `GONE` where none can come."""
        return self._inbox.get()

    def _listen(self) -> None:
        while True:
            try:
                if not self._connection.poll(SILENCE_S):
                    self._lose(f"has said nothing for {SILENCE_S:g} s")
                message = self._connection.recv_bytes()
            except (OSError, EOFError):
                self._lose("is gone")
                self._inbox.put((GONE, b""))
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
    with contextlib.suppress(OSError, ValueError, AttributeError):  # its reader may be gone, or there is no stdout
        sys.stdout.flush()
    print(f"fastgen: error: {sentence}", file=sys.stderr, flush=True)
    os._exit(LOST)
