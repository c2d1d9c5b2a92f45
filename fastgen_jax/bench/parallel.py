"""Simulations side by side."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from fastgen_jax.progress import Advance

CHUNK = 4
"""Tasks that a process takes at once: neighbours share what they cache."""


def run_all[T, R](function: Callable[[T], R], tasks: Sequence[T], *, workers: int, advance: Advance) -> list[R]:
    """`function` of each task, in order, in `workers` processes (1: in this one). advance: told of each that is done.

    Both must be found by name in a process that is started anew, for JAX's threads do not outlive a fork.
    """
    if workers < 1:
        raise ValueError(f"{workers} workers are too few; it takes at least 1")
    if workers == 1:
        return list(_counted(map(function, tasks), advance))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(_counted(pool.map(function, tasks, chunksize=CHUNK), advance))


def _counted[R](results: Iterable[R], advance: Advance) -> Iterator[R]:
    for result in results:
        advance(1)
        yield result
