"""What the HTTP front asks of who comes and gives them: keys, web pages' origins, time, and clients that go away."""

import json
import socket
import time
from collections.abc import Iterator

import httpx2
import openai
import pytest
from openai_client import connect
from scripted import FIRST_BYTE, assert_idle, scripted_engine, tokens
from serving import TIMEOUT
from threaded import serving

from fastgen_jax import Engine

KEYS = ("first key", "second")


@pytest.fixture(scope="module")
def locked() -> Iterator[httpx2.Client]:
    with (
        serving([scripted_engine(tokens("open"))], app={"api_keys": KEYS}) as server,
        httpx2.Client(base_url=server.url, timeout=TIMEOUT) as http,
    ):
        yield http


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer first key", 200),
        ("Bearer second", 200),
        ("bearer second", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer first", 401),
        ("Bearer wrong", 401),
        ("second", 401),
        ("Basic second", 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics"])
def test_api_keys(locked, path, header, status):
    headers = {} if header is None else {"authorization": header}
    is_post = path == "/v1/completions"
    reply = locked.request(
        "POST" if is_post else "GET", path, headers=headers, json={"prompt": "x"} if is_post else None
    )
    assert reply.status_code == status
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"] == {
            "message": "the API key is missing or wrong; send it as the header Authorization: Bearer KEY",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }


@pytest.mark.parametrize("path", ["/health", "/", "/docs", "/openapi.json"])
def test_what_needs_no_key(locked, path):
    assert locked.get(path).status_code == 200


def test_cors_is_off_unless_asked_for():
    page = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with serving([scripted_engine([])]) as server, httpx2.Client(base_url=server.url, timeout=TIMEOUT) as http:
        assert "access-control-allow-origin" not in http.get("/health", headers=page).headers
        assert http.options("/v1/completions", headers=page).status_code == 405
    app = {"cors_origins": [page["origin"]]}
    with serving([scripted_engine([])], app=app) as server, httpx2.Client(base_url=server.url, timeout=TIMEOUT) as http:
        allowed = http.options("/v1/completions", headers=page)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, page["origin"])
        shown = http.get("/health", headers=page).headers["access-control-expose-headers"]
        assert {"x-request-id", "retry-after"} == set(shown.split(", "))
        other = http.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def slow_engine(seconds: float = 0.02) -> Engine:
    """Takes 250 times `seconds` for an answer."""

    def script(seq, index):
        time.sleep(seconds)
        return FIRST_BYTE + ord("x")

    return scripted_engine(script)


def assert_aborted(engine: Engine) -> None:
    """Well before the end of the answer everything is free."""
    end = time.monotonic() + TIMEOUT
    while (stats := engine.stats()).running or stats.waiting or stats.free_blocks < stats.blocks:
        assert time.monotonic() < end, stats
        time.sleep(0.005)
    assert 0 < stats.generated_tokens < 125
    assert_idle(engine)


LONG = {"prompt": "a long answer", "max_tokens": 240}


def test_time_that_is_up_is_a_504():
    engine = slow_engine()
    with serving([engine]) as server, httpx2.Client(base_url=server.url, timeout=TIMEOUT) as http:
        reply = http.post("/v1/completions", json=LONG, headers={"x-request-timeout": "0.3"})
        assert reply.status_code == 504
        expected = {"message": "the request's time is up", "type": "timeout_error", "param": None, "code": "timeout"}
        assert reply.json() == {"error": expected}
        assert_aborted(engine)
        reply = http.post("/v1/completions", json=LONG | {"stream": True}, headers={"x-request-timeout": "0.3"})
        *chunks, last, end = reply.text.split("\n\n")
        assert (reply.status_code, json.loads(last.removeprefix("data: ")), end) == (200, {"error": expected}, "")
        assert len(chunks) > 1
        with connect(server.url) as client, pytest.raises(openai.APIError, match="time is up"):
            list(
                client.completions.create(model="tiny", stream=True, extra_headers={"x-request-timeout": "0.3"}, **LONG)
            )
    assert_idle(engine)


@pytest.mark.parametrize("more", [{}, {"prompt": ["a", "b"], "n": 2}], ids=["one", "several"])
def test_a_client_that_leaves_a_stream_ends_it(more):
    engine = slow_engine()
    with serving([engine]) as server, connect(server.url) as client:
        stream = client.completions.create(model="tiny", stream=True, **LONG | more)
        next(iter(stream))
        stream.close()
        assert_aborted(engine)


def test_a_client_that_hangs_up_while_it_waits_ends_its_request():
    engine = slow_engine()
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving([engine]) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
            while not engine.stats().generated_tokens:
                time.sleep(0.001)
        assert_aborted(engine)
