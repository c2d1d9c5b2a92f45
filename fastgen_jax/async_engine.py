"""`AsyncEngine`: an `Engine` on a thread of its own, for asyncio programs with many requests at once."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from fastgen_jax.engine import Engine
from fastgen_jax.intake import Messages, Prompt
from fastgen_jax.types import Delta, EngineStats, Response, SamplingParams

Command = Callable[[], Any]
Item = Delta | Response | BaseException


class _Watcher(NamedTuple):
    """Who waits for a request, and on which event loop."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Item]


class AsyncEngine:
    """Runs `engine` on a background thread; its methods are for coroutines of one event loop.

        engine = AsyncEngine(Engine.from_pretrained())
        async for piece in engine.stream("Once upon a time"):
            print(piece, end="")
        await engine.close()

    A coroutine that is cancelled, or an `async for` that is left, aborts its request. Text is tokenised on other
    threads, beside the steps, and what a step brings to all requests reaches the loop at once.

    on_step, on_failure: called on the engine's thread: after each step, with how many seconds it took; when an
        exception has ended it, which then ends every request.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[float], Any] | None = None,
        on_failure: Callable[[BaseException], Any] | None = None,
    ):
        self._engine = engine
        self._reader = engine.reader  # made here, while nobody uses the tokenizer that it copies
        self._on_step = on_step
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._watchers: dict[int, _Watcher] = {}
        self._outbox: list[tuple[_Watcher, Item]] = []
        self._lock = threading.Lock()  # of _stopped: no command enters the queue once it is set
        self._closing = self._stopped = False
        self._error: BaseException | None = None
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="fastgen-engine", daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended, by `close` or by an exception; every call is then a RuntimeError."""
        return self._stopped

    @property
    def step_seconds(self) -> float:
        """For how long the step that runs now has been running; 0 between steps."""
        return 0.0 if (began := self._step_began) is None else time.perf_counter() - began

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Response | list[Response]:
        """The response to one prompt; a list of n where params.n > 1."""
        async with aclosing(self.events(prompt, params, priority=priority)) as events:
            responses = [item async for batch in events for item in batch if isinstance(item, Response)]
        responses.sort(key=lambda response: response.index)
        return responses if len(responses) > 1 else responses[0]

    async def chat(self, messages: Messages, params: SamplingParams | None = None) -> Response | list[Response]:
        """`generate` through the tokenizer's chat template."""
        return await self.generate(await asyncio.to_thread(self._reader.encode, messages), params)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[str]:
        """Pieces of the text as they become final; joined, they are the response's text (without echo)."""
        if params is not None and params.n > 1:
            raise ValueError(f"n={params.n} samples cannot be streamed as one text; use events")
        if self._engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer, so there is no text to stream; use events")
        async with aclosing(self.events(prompt, params, priority=priority)) as events:
            async for batch in events:
                for item in batch:
                    if isinstance(item, Delta) and item.text:
                        yield item.text

    async def abort(self, request_id: int) -> bool:
        """End a request, known from `on_added`; its responses come from `events`.

        False if it is unknown or has ended.
        """
        return await self._call(lambda: self._engine.abort(request_id))

    async def stats(self) -> EngineStats:
        return await self._call(self._engine.stats)

    async def close(self) -> None:
        """Abort what runs, which ends in a RuntimeError for those who wait, and stop the thread."""
        self._closing = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    async def events(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        token_ids: list[int] | None = None,
        on_added: Callable[[int], Any] | None = None,
    ) -> AsyncGenerator[list[Delta | Response]]:
        """What has come since the last time: what steps brought, and each sample's response when it ends.

        The first list is empty: the request has been taken in.

        token_ids: the prompt's, where they are known. on_added: called with the request's id, for `abort`.
        """
        watcher = _Watcher(asyncio.get_running_loop(), asyncio.Queue())
        added: list[int] = []

        def tell(item: Item) -> None:
            self._outbox.append((watcher, item))

        def add() -> None:
            added.append(self._engine.add(prompt, params, priority=priority, token_ids=token_ids, on_delta=tell))
            self._watchers[added[0]] = watcher

        def forget() -> None:
            for request_id in added:
                self._watchers.pop(request_id, None)
                self._engine.abort(request_id)

        num_left = (params or self._engine.default_params).n
        if token_ids is None:
            token_ids = await asyncio.to_thread(self._reader.encode, prompt)
        try:
            await self._call(add)
            if on_added is not None:
                on_added(added[0])
            yield []
            while num_left:
                batch = [await watcher.items.get()]
                while not watcher.items.empty():
                    batch.append(watcher.items.get_nowait())
                events: list[Delta | Response] = []
                for item in batch:
                    if isinstance(item, BaseException):
                        raise RuntimeError("the engine stopped while this request was running") from item
                    num_left -= isinstance(item, Response)
                    events.append(item)
                yield events
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
                    self._step()
            for request_id in self._watchers:
                self._engine.abort(request_id)
            self._engine.step()  # takes in the step that is still on the device, and their responses
        except BaseException as error:
            self._error = error
        with self._lock:
            self._stopped = True
        for watcher in self._watchers.values():
            self._outbox.append((watcher, self._error or RuntimeError("the engine was closed")))
        self._deliver()
        self._run_commands(wait=False)
        if self._error is not None and self._on_failure is not None:
            self._on_failure(self._error)

    def _step(self) -> None:
        self._step_began = start = time.perf_counter()
        for response in self._engine.step():
            if response.request_id in self._watchers:
                self._outbox.append((self._watchers[response.request_id], response))
        self._step_began = None
        self._deliver()
        if self._on_step is not None:
            self._on_step(time.perf_counter() - start)

    def _deliver(self) -> None:
        """Hand out what has come, with one call into each event loop."""
        outbox, self._outbox = self._outbox, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Watcher, Item]]] = {}
        for watcher, item in outbox:
            by_loop.setdefault(watcher.loop, []).append((watcher, item))
        for loop, told in by_loop.items():
            call_soon(loop, _put_all, told)

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():  # this thread alone takes from it
            self._commands.get()()


def _put_all(told: list[tuple[_Watcher, Item]]) -> None:
    for watcher, item in told:
        watcher.items.put_nowait(item)


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call `function` on the loop's thread; nobody is left to hear of it where the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
