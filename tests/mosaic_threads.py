"""Cooperative threads: one runs at a time and goes on until it has to wait, so every run is the same run."""

import threading
from collections.abc import Callable


class Deadlock(RuntimeError):
    """Every thread waits and nothing is left that could wake one."""


class _Cancelled(Exception):
    """Raised in the other threads once one has failed."""


class Threads:
    """Runs `bodies` in turns. Only one thread ever runs, so what they share needs no lock.

    `make_progress(waits_for)` is called when all threads wait, with what they wait for: it completes one asynchronous
    operation and returns True, or False when there is none. Nothing asynchronous completes earlier than that.
    """

    def __init__(self, bodies: list[Callable[[], object]], make_progress: Callable[[list[object]], bool]):
        self._bodies = bodies
        self._make_progress = make_progress
        self._turns = [threading.Semaphore(0) for _ in bodies]
        self._waits: dict[int, tuple[Callable[[], bool], object]] = {}
        self._unfinished = list(range(len(bodies)))
        self._running = 0
        self._error: BaseException | None = None
        self._all_done = threading.Semaphore(0)

    def run(self) -> None:
        """Returns when all bodies have; raises the first error, after every thread has ended."""
        threads = [threading.Thread(target=self._main, args=(i,), daemon=True) for i in range(len(self._bodies))]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        self._all_done.acquire()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait_until(self, ready: Callable[[], bool], waits_for: object) -> None:
        """Lets the others run until `ready()`. To be called by the running thread."""
        me = self._running
        if ready():
            return
        self._waits[me] = ready, waits_for
        try:
            self._switch(me)
        finally:
            del self._waits[me]

    def _main(self, me: int) -> None:
        self._turns[me].acquire()
        try:
            if self._error is None:
                self._bodies[me]()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = self._error or error
        self._unfinished.remove(me)
        if not self._unfinished:
            self._all_done.release()
            return
        try:
            self._wake(self._next(me))
        except BaseException as error:
            self._error = self._error or error
            self._wake(self._unfinished[0])

    def _switch(self, me: int) -> None:
        other = self._next(me)
        if other != me:
            self._wake(other)
            self._turns[me].acquire()
        if self._error is not None:
            raise _Cancelled

    def _wake(self, other: int) -> None:
        self._running = other
        self._turns[other].release()

    def _next(self, me: int) -> int:
        """The first thread after `me`, in a ring, that can run."""
        ring = sorted(self._unfinished, key=lambda i: (i <= me, i))
        while True:
            for i in ring:
                if self._error is not None or i not in self._waits or self._waits[i][0]():
                    return i
            if not self._make_progress([waits_for for _, waits_for in self._waits.values()]):
                raise Deadlock("every thread waits: for " + ", for ".join(str(w) for _, w in self._waits.values()))
