"""The HTTP front: OpenAI's API, and ours beside it, over a `Router`."""

import asyncio
import json
import math
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import fastgen_jax
from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import openai_requests as bodies
from fastgen_jax.serving.envelope import add_envelope, error_body, key_check, timeout_of
from fastgen_jax.serving.errors import Refusal, invalid
from fastgen_jax.serving.openai_replies import ChatCompletions, Completions, Usage
from fastgen_jax.serving.page import add_page
from fastgen_jax.serving.router import Router
from fastgen_jax.serving.service import refusal_of

MAX_REQUEST_BYTES = 4 << 20


def make_app(
    router: Router,
    *,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    max_request_bytes: int = MAX_REQUEST_BYTES,
    page_s: float = math.inf,
) -> FastAPI:
    """The application.

    api_keys: any of them opens everything but the page, /health and the API's own documentation; none opens it to all.
    cors_origins: web pages of these origins may call it.
    max_request_bytes: a longer body is refused (413).
    page_s: seconds after which an open page has to connect again.
    """
    app = FastAPI(
        title="fastgen-jax",
        version=fastgen_jax.__version__,
        description="OpenAI's completions and chat, and what is ours: docs/serving.md.",
    )
    locked = [Depends(key_check(api_keys))] if api_keys else []
    add_routes(app, router, locked)
    add_page(app, router, locked, page_s)
    add_envelope(app, max_request_bytes)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def add_routes(app: FastAPI, router: Router, locked: list[Any]) -> None:
    """Every path. `locked`: what those that take a key depend on."""

    @app.post("/v1/completions", dependencies=locked, responses=_ERRORS)
    async def completions(body: bodies.CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await _answer(router, request, body, body.to_replicas(), Completions)

    @app.post("/v1/chat/completions", dependencies=locked, responses=_ERRORS)
    async def chat_completions(body: bodies.ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, through the model's chat template."""
        return await _answer(router, request, body, body.to_replicas(), ChatCompletions)

    @app.get("/v1/models", dependencies=locked)
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return {"object": "list", "data": [_model(router, name) for name in router.fleet.models]}

    @app.get("/v1/models/{name:path}", dependencies=locked, responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return _model(router, router.fleet.find_model(name))

    @app.post("/tokenize", dependencies=locked, responses=_ERRORS)
    async def tokenize(body: bodies.TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text or a conversation."""
        reply = await router.tokenize(body.to_replica())
        return {"tokens": list(reply.token_ids), "count": len(reply.token_ids), "max_model_len": reply.max_model_len}

    @app.post("/detokenize", dependencies=locked, responses=_ERRORS)
    async def detokenize(body: bodies.DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        return {"prompt": (await router.detokenize(body.to_replica())).text}

    @app.get("/health", responses={503: {"description": "no replica takes requests"}})
    async def health() -> Response:
        """200 once every model has a replica that is warmed up."""
        replicas = {replica.address: replica.state for replica in router.fleet.replicas}
        status = "ready" if router.is_ready else "not ready"
        return JSONResponse({"status": status, "replicas": replicas}, 200 if router.is_ready else 503)

    @app.get("/metrics", dependencies=locked, response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(router.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


_STATUSES: dict[int | str, str] = {
    400: "the request is wrong; error.param says where",
    401: "the API key is missing or wrong",
    404: "no such model",
    413: "the body is too long",
    429: "the queue is full; Retry-After has seconds",
    503: "no replica takes requests, or the one that ran this was lost",
    504: "the request's time is up",
    "default": "any other error, in OpenAI's shape as these are",
}
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"description": about} for status, about in _STATUSES.items()}


def _model(router: Router, name: str) -> dict[str, Any]:
    replicas = [replica.stats for replica in router.fleet.replicas if replica.stats.model == name]
    return {
        "id": name,
        "object": "model",
        "created": int(min(stats.started for stats in replicas)),
        "owned_by": "fastgen-jax",
        "max_model_len": max(stats.max_model_len for stats in replicas) or None,  # not known before it is loaded
    }


# One request


class _Told(NamedTuple):
    """An event of the request for prompt number `number`."""

    number: int
    event: pb.GenerateEvent


async def _answer(
    router: Router,
    request: Request,
    body: bodies.Sampled,
    asked: list[pb.GenerateRequest],
    answers: type[Completions],
) -> Response:
    """The whole answer, or the beginning of a stream. What cannot run is refused before anything is sent."""
    if len(asked) > router.max_queue:
        raise invalid(f"{len(asked)} prompts are more than may wait at once, {router.max_queue}", param="prompt")
    model, usage = asked[0].model or (router.fleet.models[0] if router.fleet.models else ""), Usage()
    to_json = answers(request.state.request_id, model, body.n or 1)
    for number, one in enumerate(asked):
        one.request_id = f"{request.state.request_id}.{number}.{uuid.uuid4().hex[:8]}"
    told = _all_events(router, asked, bool(body.stream), timeout_of(request))
    try:
        if not body.stream:
            responses = await _unless_gone(request, _collect(told, usage))
            return JSONResponse(to_json.whole(responses, usage))
        first = await _first(told, len(asked))
    except Refusal as refusal:
        if refusal.param == "prompt":  # a replica's word for messages, too
            refusal.param = body.PROMPT
        raise
    return _EventStream(_lines(first, told, to_json, usage, body.includes_usage), told)


async def _first(told: AsyncGenerator[_Told], number: int) -> list[_Told]:
    """The first events; `told` is closed if one of them is an error."""
    try:
        return [await anext(told) for _ in range(number)]
    except BaseException:
        await told.aclose()
        raise


class _EventStream(StreamingResponse):
    """Server-sent events. What they come from is closed whatever becomes of the client."""

    def __init__(self, lines: AsyncGenerator[str], told: AsyncGenerator[_Told]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._sources = (lines, told)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()


async def _all_events(
    router: Router, asked: Sequence[pb.GenerateRequest], stream: bool, timeout: float | None
) -> AsyncGenerator[_Told]:
    """The events of several requests as they come; all end when one fails, or when this is closed.

    Each request's first event comes before any request's second one, so that what cannot run shows at once.
    """
    queue: asyncio.Queue[_Told | BaseException | None] = asyncio.Queue()
    all_accepted = asyncio.Event()
    left = len(asked)

    async def run(number: int, request: pb.GenerateRequest) -> None:
        nonlocal left
        is_first = True
        try:
            async with aclosing(router.generate(request, stream=stream, timeout=timeout)) as events:
                async for event in events:
                    if not is_first:
                        await all_accepted.wait()
                    queue.put_nowait(_Told(number, event))
                    if is_first:
                        is_first = False
                        left -= 1
                        if not left:
                            all_accepted.set()
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(run(number, request)) for number, request in enumerate(asked)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(told: AsyncGenerator[_Told], usage: Usage) -> list[tuple[int, pb.Response]]:
    responses = []
    async with aclosing(told) as events:
        async for number, event in events:
            if event.HasField("accepted"):
                usage.prompt(event.accepted.num_prompt_tokens)
            elif event.HasField("response"):
                usage.response(number, event.response)
                responses.append((number, event.response))
    return responses


async def _lines(
    first: list[_Told], told: AsyncGenerator[_Told], to_json: Completions, usage: Usage, with_usage: bool
) -> AsyncGenerator[str]:
    """Server-sent events."""

    def chunk(*choices: dict[str, Any]) -> str:
        return _sse(to_json.chunk(list(choices), with_usage=with_usage))

    async with aclosing(told) as rest:
        try:
            for number, event in first:
                usage.prompt(event.accepted.num_prompt_tokens)
                for choice in to_json.first(number, event.accepted):
                    yield chunk(choice)
            async for number, event in rest:
                if event.HasField("delta"):
                    yield chunk(to_json.delta(number, event.delta))
                elif event.HasField("response"):
                    usage.response(number, event.response)
                    yield chunk(to_json.last(number, event.response))
            if with_usage:
                yield _sse(to_json.chunk([], usage.json(), with_usage=True))
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield _sse(error_body(refusal_of(error)))


def _sse(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _unless_gone[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Refusal(grpc.StatusCode.CANCELLED, "the client went away", code="client_gone")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
