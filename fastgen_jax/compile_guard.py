"""Counts what XLA compiles, so that "nothing compiles after warm-up" is a fact that is watched."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

# JAX's listeners are the process's, so this count is too.
_EVENT = "/jax/core/compile/backend_compile_duration"
_counter = {"compilations": 0}
_lock = threading.Lock()  # warm-up compiles in threads


def _listen(event: str, _duration: float, **_: object) -> None:
    if event == _EVENT:
        with _lock:
            _counter["compilations"] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """Programs this process has compiled or read from the compile cache since this module was imported."""
    return _counter["compilations"]


@contextmanager
def forbid_compile() -> Iterator[None]:
    """Raise at the end if anything was compiled inside."""
    before = num_compilations()
    yield
    if compiled := num_compilations() - before:
        raise RuntimeError(f"{compiled} programs were compiled where nothing should be")
