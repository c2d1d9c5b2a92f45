"""A server with OpenAI's completions API as a benchmark's target, in real time."""

import asyncio
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from fastgen_jax.bench.load import Request
from fastgen_jax.bench.metrics import Record

POLL_S = 0.002
"""How long `step` waits for an answer to end, so that requests leave on time."""

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 300.0
"""Without a sign of life for so long, a server counts as gone."""


class HttpTarget:
    """Streams from `url`/completions, as many requests at a time as there are: a thread of its own runs them.

    Greedy, EOS ignored. A token's time is that of the piece which brought it; servers that join tokens say in
    `usage` how many there were. A request that fails gives a record with an error; after the server could not
    be reached or fell silent, those that follow fail at once.

    url: up to and with /v1. model: its name there. decode: makes text of the prompts' token ids, for a server
    that takes no ids. api_key: goes with every request, as "Authorization: Bearer KEY".
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        decode: Callable[[list[int]], str] | None = None,
        api_key: str | None = None,
    ):
        """ValueError if nobody answers at `url`; without a `model`, the first one that the server lists."""
        self._httpx = _import_httpx()
        self.url = url.rstrip("/")
        self._decode = decode
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._numbers = itertools.count()
        self._open = 0
        self._ended: queue.SimpleQueue[tuple[int, Record]] = queue.SimpleQueue()
        self.gone: str | None = None
        """Why the server counts as gone."""
        self.model = model if model is not None else self._first_model()
        timeout = self._httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = self._httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="HttpTarget", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Break off what is under way, and close the connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def now(self) -> float:
        return time.perf_counter()

    def add(self, request: Request) -> int:
        number = next(self._numbers)
        self._open += 1
        asyncio.run_coroutine_threadsafe(self._answer(number, request), self._loop)
        return number

    def step(self) -> list[tuple[int, Record]]:
        ended = []
        try:
            ended.append(self._ended.get(timeout=POLL_S))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            self._open -= len(ended)
            return ended

    @property
    def has_work(self) -> bool:
        return self._open > 0

    def wait(self, until: float) -> None:
        time.sleep(max(until - self.now(), 0.0))

    async def _answer(self, number: int, request: Request) -> None:
        answer = _Answer(len(request.prompt_token_ids))
        sent, error = self.now(), self.gone
        try:
            if error is None:
                await self._stream(request, answer)
                error = answer.error
        except self._httpx.HTTPError as problem:
            error = f"{self.url}: {str(problem) or type(problem).__name__}"
            if isinstance(problem, self._httpx.ConnectError | self._httpx.TimeoutException):
                self.gone = error
        except Exception as problem:  # a request must end, whatever a server sends
            error = f"{self.url}: {type(problem).__name__}: {problem}"
        self._ended.put((number, answer.record(sent, error)))

    async def _stream(self, request: Request, answer: "_Answer") -> None:
        async with self._client.stream("POST", f"{self.url}/completions", json=self._body(request)) as response:
            if response.status_code != 200:
                text = " ".join((await response.aread()).decode(errors="replace").split())
                answer.error = f"{self.url}: status {response.status_code}: {text:.200}"
                return
            async for line in response.aiter_lines():
                answer.read(line, self.now())
        if not answer.is_done and answer.error is None:
            answer.error = f"{self.url}: the answer broke off after {len(answer.times)} pieces"

    def _body(self, request: Request) -> dict[str, Any]:
        prompt = request.prompt_token_ids
        return {
            "model": self.model,
            "prompt": prompt if self._decode is None else self._decode(prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _first_model(self) -> str:
        try:
            response = self._httpx.get(f"{self.url}/models", headers=self._headers, timeout=CONNECT_TIMEOUT_S)
            return response.raise_for_status().json()["data"][0]["id"]
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise ValueError(f"{self.url} does not answer: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.url}/models lists no model; name one with --model") from error

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()


class _Answer:
    """What has come of one streamed answer."""

    def __init__(self, num_prompt_tokens: int):
        self.times: list[float] = []
        self.error: str | None = None
        self.is_done = False
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens: int | None = None

    def read(self, line: str, now: float) -> None:
        """Take in a line of the event stream."""
        field, _, data = line.partition(":")
        if field != "data":
            return
        if data.strip() == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if event.get("error") is not None:
            self.error = f"the server says {json.dumps(event['error']):.200}"
        for choice in event.get("choices") or ():
            # A last event may carry no token, but why there are no more.
            if choice.get("text") or not choice.get("finish_reason"):
                self.times.append(now)
        if usage := event.get("usage"):
            self._num_prompt_tokens = usage.get("prompt_tokens", self._num_prompt_tokens)
            self._num_output_tokens = usage.get("completion_tokens", self._num_output_tokens)

    def record(self, sent: float, error: str | None) -> Record:
        if error is None and not self.times:
            error = "the answer has no tokens"
        return Record(sent, self._num_prompt_tokens, tuple(self.times), error, self._num_output_tokens)


def _import_httpx() -> Any:
    """The HTTP client that the Hugging Face Hub's own library brings."""
    try:
        import httpx2
    except ImportError as error:
        raise ValueError("--url needs an extra: pip install 'fastgen-jax[bench]'") from error
    return httpx2
