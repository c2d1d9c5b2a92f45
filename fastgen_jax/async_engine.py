"""`AsyncEngine`: an `Engine` on a thread of its own, for asyncio programs with many requests at once."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastgen_jax.engine import Engine
from fastgen_jax.intake import Messages, Prompt
from fastgen_jax.types import EngineStats, Response, SamplingParams

Command = Callable[[], Any]
Item = str | Response | BaseException


class AsyncEngine:
    """Runs `engine` on a background thread; its methods are for coroutines of one event loop.

        engine = AsyncEngine(Engine.from_pretrained())
        async for piece in engine.stream("Once upon a time"):
            print(piece, end="")
        await engine.close()

    A coroutine that is cancelled, or an `async for` that is left, aborts its request.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._watchers: dict[int, Callable[[Item], None]] = {}
        self._lock = threading.Lock()  # of _stopped: no command enters the queue once it is set
        self._closing = self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fastgen-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Response | list[Response]:
        """The response to one prompt; a list of n where params.n > 1."""
        async with aclosing(self._request(prompt, params, priority, stream=False)) as items:
            responses = [item async for item in items if isinstance(item, Response)]
        responses.sort(key=lambda response: response.index)
        return responses if len(responses) > 1 else responses[0]

    async def chat(self, messages: Messages, params: SamplingParams | None = None) -> Response | list[Response]:
        """`generate` through the tokenizer's chat template."""
        # On the engine's thread, for a tokenizer is not safe to use from two.
        prompt = await self._call(partial(self._engine.chat_prompt, messages))
        return await self.generate(prompt, params)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[str]:
        """Pieces of the text as they become final; joined, they are the response's text (without echo)."""
        async with aclosing(self._request(prompt, params, priority, stream=True)) as items:
            async for item in items:
                if isinstance(item, str):
                    yield item

    async def stats(self) -> EngineStats:
        return await self._call(self._engine.stats)

    async def close(self) -> None:
        """Abort what runs, which ends in a RuntimeError for those who wait, and stop the thread."""
        self._closing = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    async def _request(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, *, stream: bool
    ) -> AsyncGenerator[str | Response]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()
        added: list[int] = []

        def put(item: Item) -> None:
            call_soon(loop, items.put_nowait, item)

        def add() -> None:
            added.append(self._engine.add(prompt, params, priority=priority, on_piece=put if stream else None))
            self._watchers[added[0]] = put

        def forget() -> None:
            for request_id in added:
                self._watchers.pop(request_id, None)
                self._engine.abort(request_id)

        num_left = (params or self._engine.default_params).n
        try:
            await self._call(add)
            while num_left:
                item = await items.get()
                if isinstance(item, BaseException):
                    raise RuntimeError("the engine stopped while this request was running") from item
                num_left -= isinstance(item, Response)
                yield item
        finally:
            # Comes after `add` in the queue, even where this coroutine was cancelled while waiting for it.
            self._commands.put(forget)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(set_it: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set_it(value)

        def run() -> None:
            try:
                self._refuse_if_stopped()
                result = function()
            except Exception as error:
                call_soon(loop, settle, future.set_exception, error)
            else:
                call_soon(loop, settle, future.set_result, result)

        with self._lock:
            self._refuse_if_stopped()
            self._commands.put(run)
        return await future

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            why = "is closed" if self._error is None else f"stopped: {self._error!r}"
            raise RuntimeError(f"the engine {why}") from self._error

    def _run(self) -> None:
        """The thread: commands between steps, and while there is nothing to do, only commands."""
        try:
            while not self._closing:
                self._run_commands(wait=not self._engine.has_work)
                if self._engine.has_work:
                    for response in self._engine.step():
                        if response.request_id in self._watchers:
                            self._watchers[response.request_id](response)
            for request_id in self._watchers:
                self._engine.abort(request_id)
            self._engine.step()  # takes in the step that is still on the device, and their responses
        except BaseException as error:
            self._error = error
        with self._lock:
            self._stopped = True
        for put in self._watchers.values():
            put(self._error or RuntimeError("the engine was closed"))
        self._run_commands(wait=False)

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():  # this thread alone takes from it
            self._commands.get()()


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call `function` on the loop's thread; nobody is left to hear of it where the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
