"""Progress on stderr, and only where somebody looks at it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[[int], None]


def is_shown(show: bool | None) -> bool:
    """Whether to show progress: as told, else where stderr is a terminal."""
    return sys.stderr.isatty() if show is None else show


@contextmanager
def bar(title: str, total: int, show: bool | None, unit: str = "") -> Iterator[Advance]:
    """A progress bar of `total` steps; yields a function that says how many more are done."""
    if not is_shown(show):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(title, total=total)
        yield lambda done: shown.advance(task, done)


@contextmanager
def spinner(title: str, show: bool | None) -> Iterator[Callable[[], Any]]:
    """A spinner on stderr, where progress is shown; yields a function that takes it away."""
    if not is_shown(show):
        yield lambda: None
        return
    from rich.console import Console

    with Console(stderr=True).status(title) as status:
        yield status.stop
