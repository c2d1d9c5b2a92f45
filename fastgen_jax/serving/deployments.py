"""Servers of this user on this machine, by name: a file for each, which it locks while it runs."""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fastgen_jax.machine import cache_dir

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Deployment:
    """Where a server is. http, grpc: host:port."""

    name: str
    pid: int
    http: str
    grpc: str


def folder() -> Path:
    """Where the files are."""
    return cache_dir() / "deployments"


def check_name(name: str) -> str:
    """The name; ValueError if it cannot be one."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} is no name for a deployment: letters, digits, '.', '_' and '-', at most 100")
    return name


def default_name(model: str) -> str:
    """A deployment's name if none is given."""
    return check_name(re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-._")[:100] or "fastgen")


@contextlib.contextmanager
def recorded(name: str, http: str, grpc: str) -> Iterator[None]:
    """Let clients find this process by `name` as long as the block runs; nothing without one.

    ValueError if the name is taken.
    """
    if not name:
        yield
        return
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The lock ends with the process, however that ends. The file stays: who removed it might remove a successor's.
    with open(path, "a+") as file:
        if not _lock_soon(file.fileno()):
            raise ValueError(f"deployment {name!r} runs already; choose another name")
        file.truncate(0)
        file.write(json.dumps(asdict(Deployment(name, os.getpid(), http, grpc))))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def find(name: str) -> Deployment | None:
    """The deployment of that name, if it runs."""
    try:
        with open(_path(name)) as file:
            if _lock(file.fileno(), fcntl.LOCK_SH):  # whoever wrote it has gone
                return None
            return Deployment(**json.loads(file.read()))
    except (OSError, ValueError, TypeError):
        return None


def names() -> list[str]:
    """Of all that run."""
    return [path.stem for path in sorted(folder().glob("*.json")) if find(path.stem) is not None]


def _path(name: str) -> Path:
    return folder() / f"{check_name(name)}.json"


def _lock_soon(file: int) -> bool:
    """Lock it unless a server has; a `find` has it for an instant only."""
    for _ in range(20):
        if _lock(file, fcntl.LOCK_EX):
            return True
        time.sleep(0.01)
    return False


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
