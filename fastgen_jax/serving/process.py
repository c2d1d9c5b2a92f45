"""How a serving process ends, and what it logs."""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

LOGGER = "fastgen_jax.serving"

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Ending:
    """The end of a process: asked for once, it finishes what runs; asked for twice, it stops at once."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._now = asyncio.Event()
        self.status = 0

    def listen(self) -> None:
        """Have SIGTERM and SIGINT ask for it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)

    def ask(self, now: bool = False) -> None:
        if now or self._begun.is_set():
            self._now.set()
        self._begun.set()

    def fail(self, status: int) -> None:
        """End at once with this exit status."""
        self.status = self.status or status
        self.ask(now=True)

    @property
    def is_begun(self) -> bool:
        return self._begun.is_set()

    async def wait(self) -> None:
        await self._begun.wait()

    async def wait_for(self, finishing: Coroutine[Any, Any, Any]) -> None:
        """Wait for `finishing`, or for being asked again."""
        tasks = [asyncio.ensure_future(finishing), asyncio.ensure_future(self._now.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def end_with_parent(ask: Callable[[], None]) -> None:
    """Call `ask` when standard input closes: whoever started this process and held the other end has gone."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            ask()

    loop.add_reader(sys.stdin.fileno(), read)


def start_logging(level: str, name: str = "") -> None:
    """One JSON object a line on stderr: ours from `level` on, and other libraries' warnings.

    name: of the process, where several write to one place.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(name))
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(LOGGER).setLevel(level.upper())


class _JsonLines(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = {"process": name} if name else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            **self._name,
            "message": record.getMessage(),
        }
        # Names that begin with "_" are other libraries' own: Ray marks every record of its processes.
        extra = {name: value for name, value in vars(record).items() if not name.startswith("_")}
        line |= {name: value for name, value in extra.items() if name not in _OWN_FIELDS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
