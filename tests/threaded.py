"""`serving.served` on a thread of its own, for clients that block."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from serving import TIMEOUT, Served, served


@contextlib.contextmanager
def serving(engines: Sequence[Any], **options: Any) -> Iterator[Served]:
    """The server runs as long as the block."""
    started: Future[tuple[Served, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with served(engines, **options) as found:
            started.set_result((found, asyncio.get_running_loop(), stop))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    found, loop, stop = started.result(TIMEOUT)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "the server does not stop"
