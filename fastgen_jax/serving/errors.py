"""Why a request is refused or ends early: one exception, a gRPC status and an HTTP one."""

import dataclasses
import re
from typing import NamedTuple

import grpc

from fastgen_jax.types import SamplingParams


class _Http(NamedTuple):
    status: int
    type: str


_HTTP = {
    grpc.StatusCode.INVALID_ARGUMENT: _Http(400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: _Http(401, "authentication_error"),
    grpc.StatusCode.NOT_FOUND: _Http(404, "not_found_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _Http(429, "rate_limit_error"),
    grpc.StatusCode.CANCELLED: _Http(499, "request_cancelled"),
    grpc.StatusCode.UNAVAILABLE: _Http(503, "service_unavailable_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: _Http(504, "timeout_error"),
}
_INTERNAL = _Http(500, "internal_server_error")


class Refusal(Exception):
    """A request that cannot be served, or served any longer.

    status: gRPC's. code: a word for programs, such as "queue_full". param: the field of the request that is wrong.
    retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def http_status(self) -> int:
        return _HTTP.get(self.status, _INTERNAL).status

    @property
    def http_type(self) -> str:
        """OpenAI's `error.type`."""
        return _HTTP.get(self.status, _INTERNAL).type


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, param=param, code=code)


def unavailable(message: str, *, code: str | None = None, retry_after: float | None = None) -> Refusal:
    return Refusal(grpc.StatusCode.UNAVAILABLE, message, code=code, retry_after=retry_after)


_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
_FIELDS |= {"messages", "model", "priority", "prompt", "request_id", "tokens"}


def field_in(sentence: str) -> str | None:
    """The field of a request that a sentence of an engine or of `SamplingParams` is about: the first that it names."""
    return next((word for word in re.findall(r"\w+", sentence) if word in _FIELDS), None)


def to_metadata(refusal: Refusal) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that tells a refusal beside its status and sentence."""
    parts = {"code": refusal.code, "param": refusal.param}
    found = [(f"fastgen-{name}", value) for name, value in parts.items() if value]
    if refusal.retry_after is not None:
        found.append(("retry-after", f"{refusal.retry_after:g}"))
    return tuple(found)


def from_rpc(error: grpc.aio.AioRpcError) -> Refusal:
    """The refusal that a call ended with."""
    metadata = dict(error.trailing_metadata() or ())
    retry_after = metadata.get("retry-after")
    return Refusal(
        error.code(),
        error.details() or error.code().name,
        code=text_of(metadata.get("fastgen-code")),
        param=text_of(metadata.get("fastgen-param")),
        retry_after=None if retry_after is None else float(retry_after),
    )


def text_of(value: str | bytes | None) -> str | None:
    """A value of gRPC's metadata as text."""
    return value.decode() if isinstance(value, bytes) else value
