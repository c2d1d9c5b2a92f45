"""Jobs that run beside one another, as compiling does, in threads that keep no process from ending."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue


def in_threads[K, T](jobs: Iterable[tuple[K, Callable[[], T]]], num_threads: int) -> Iterator[tuple[K, T]]:
    """Each job's key with what it returns, as soon as it does; the jobs themselves are made in the caller's thread.

    An exception of a job comes out here. From then on, or when the caller stops early, no other is begun, and nobody
    waits for those that run.
    """
    todo: SimpleQueue[tuple[K, Callable[[], T]] | None] = SimpleQueue()
    done: SimpleQueue[tuple[K, T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        while (item := todo.get()) is not None:
            key, job = item
            try:
                done.put((key, job(), None))
            except BaseException as error:
                done.put((key, None, error))

    def take() -> tuple[K, T]:
        key, result, error = done.get()
        if error is not None:
            raise error
        return key, result  # type: ignore[return-value]

    num_running = 0
    for _ in range(num_threads):
        threading.Thread(target=work, daemon=True).start()
    try:
        for job in jobs:
            todo.put(job)
            num_running += 1
            while not done.empty():
                num_running -= 1
                yield take()
        for _ in range(num_running):
            yield take()
    finally:
        with suppress(Empty):  # a thread may take the last one first
            while True:
                todo.get_nowait()
        for _ in range(num_threads):
            todo.put(None)
