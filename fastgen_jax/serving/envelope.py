"""What is around every HTTP request: its id, its key, its time and its size; and OpenAI's shape for what goes wrong."""

import re
import reprlib
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen_jax.serving.errors import Refusal, invalid
from fastgen_jax.serving.service import key_fits, refusal_of

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TIMEOUT_HEADER = "x-request-timeout"


def add_envelope(app: FastAPI, max_request_bytes: int) -> None:
    """Put every request to `app` into it."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(_Envelope, max_request_bytes=max_request_bytes)


def key_check(api_keys: Sequence[str]) -> Any:
    """A dependency that refuses who brings none of the keys."""

    async def check(request: Request) -> None:
        if not key_fits(request.headers.get("authorization"), api_keys):
            raise Refusal(
                grpc.StatusCode.UNAUTHENTICATED,
                "the API key is missing or wrong; send it as the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    return check


def timeout_of(request: Request) -> float | None:
    """Seconds that the client gives this request, by a header."""
    if (text := request.headers.get(_TIMEOUT_HEADER)) is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise invalid(f"{_TIMEOUT_HEADER}: {text!r:.40} is not a number of seconds above 0", param=_TIMEOUT_HEADER)
    return seconds


def error_body(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    return {
        "error": {
            "message": _utf8(refusal.message),
            "type": refusal.http_type,
            "param": _utf8(refusal.param),
            "code": refusal.code,
        }
    }


def _utf8(text: str | None) -> str | None:
    """`text` with escapes for halves of surrogate pairs, which JSON may have brought."""
    return None if text is None else text.encode(errors="backslashreplace").decode()


class _Envelope:
    """Gives a request its id, sends it back, and refuses a body that is too long. Nothing gets past it unanswered."""

    def __init__(self, app: ASGIApp, max_request_bytes: int) -> None:
        self._app = app
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        scope["headers"] = _as_json(scope["headers"], headers)
        started = False
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_request_bytes:
                raise self._too_long()
            return message

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length[:20]) > self._max_request_bytes:
                raise self._too_long()
            await self._app(scope, counted, tagged)
        except Exception as error:
            if started:
                raise
            response = _http_error(error) if isinstance(error, HTTPException) else _refused(refusal_of(error))
            await response(scope, receive, tagged)

    def _too_long(self) -> HTTPException:
        """Not a `Refusal`, which FastAPI would take for JSON that cannot be read."""
        return HTTPException(413, f"the body is longer than {self._max_request_bytes} bytes (--max-request-bytes)")


def _as_json(headers: list[tuple[bytes, bytes]], by_name: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The headers of a body that is JSON whatever they say, as `curl -d` says that it is a form.

    Not where a web page sends it: what a page may send to any server without asking cannot be called JSON.
    """
    if b"origin" in by_name:
        return headers
    return [*(pair for pair in headers if pair[0] != b"content-type"), (b"content-type", b"application/json")]


# What goes wrong


def _refused(refusal: Refusal) -> Response:
    headers = {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(max(1, round(refusal.retry_after)))
    if refusal.status == grpc.StatusCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(refusal), refusal.http_status, headers)


def _not_valid(error: Any) -> Refusal:
    """A body that is no JSON, or not the right one: the first mistake, with its field."""
    first = error.errors()[0]
    about, shown = first.get("ctx", {}), reprlib.repr(first.get("input"))
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {about.get('error', first['msg'])}")
    if isinstance(first.get("input"), bytes):
        return invalid("send the header content-type: application/json, and a body that is")
    where = _path([*first["loc"][1:], *([about["field"]] if first["type"] == "field" else [])])
    if first["type"] == "field":
        return invalid(first["msg"], param=where)
    got = "" if first["type"] in _SAYS_ALL else f", not {shown:.60}"
    sentence = "give an object" if first["type"] in _NO_OBJECT else first["msg"].removeprefix("Value error, ")
    return invalid(f"{where or 'the body'}: {sentence}{got}", param=where or None)


_SAYS_ALL = ("missing", "too_short", "value_error")
"""Mistakes whose sentences have no need of the value."""

_NO_OBJECT = ("dict_type", "model_attributes_type", "model_type")
"""Mistakes whose sentences are about Python."""


def _path(parts: Iterable[str | int]) -> str:
    """As OpenAI writes the place of a field, shortened where a client's own words are long."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:80]


def _http_error(error: Any) -> Response:
    """What Starlette and FastAPI raise."""
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    code = "body_too_long" if error.status_code == 413 else None
    # FastAPI says no more than that the body is wrong; why is the cause.
    message = f"the body is not JSON: {error.__cause__}" if error.__cause__ else str(error.detail)
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, error.status_code, error.headers)


async def _on_refusal(_request: Request, refusal: Any) -> Response:
    return _refused(refusal)


async def _on_not_valid(_request: Request, error: Any) -> Response:
    return _refused(_not_valid(error))


async def _on_http_error(request: Request, error: Any) -> Response:
    if error.status_code == 404:
        error = HTTPException(404, f"there is no {request.url.path:.80} here; /docs has the paths")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        about = f"{request.url.path:.80} does not take {request.method:.20}; it takes {allowed}"
        error = HTTPException(405, about, error.headers)
    return _http_error(error)


_HANDLERS: dict[Any, Any] = {
    Refusal: _on_refusal,
    RequestValidationError: _on_not_valid,
    HTTPException: _on_http_error,
}
