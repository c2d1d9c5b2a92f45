"""The HTTP target against a small server in this process that speaks, or misspeaks, OpenAI's completions API."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fastgen_jax import cli
from fastgen_jax.bench.drive import closed_loop, open_loop
from fastgen_jax.bench.http_target import HttpTarget
from fastgen_jax.bench.load import Request

REQUEST = Request([7, 8, 9], 4)


def token(text, **choice):
    return f"data: {json.dumps({'choices': [{'text': text, **choice}]})}\n\n"


def usage(prompt, completion):
    return (
        f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': prompt, 'completion_tokens': completion}})}\n\n"
    )


DONE = "data: [DONE]\n\n"
ANSWER = [token("a"), token("b"), token("", logprobs=None), token("d", finish_reason="length"), usage(3, 4), DONE]


class Handler(BaseHTTPRequestHandler):
    """Answers with `server.answer`, pieces of an event stream or a status and a body, and notes what it was asked."""

    def do_GET(self):
        self.server.keys.append(self.headers["Authorization"])
        self._send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self):
        self.server.keys.append(self.headers["Authorization"])
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if len(self.server.asked) > self.server.lifetime:
            self.server.die()
            return
        if isinstance(self.server.answer, tuple):
            self._send(*self.server.answer)
            return
        self.send_response(200)
        self.end_headers()
        for piece in self.server.answer:
            self.wfile.write(piece.encode())
            self.wfile.flush()

    def _send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """lifetime: requests it answers before it goes away."""

    daemon_threads = True

    def __init__(self, answer, lifetime):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.lifetime, self.asked, self.keys = answer, lifetime, [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def die(self):
        self.shutdown()
        self.server_close()


@contextmanager
def serving(answer=ANSWER, lifetime=1000):
    server = Server(answer, lifetime)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.die()
        thread.join()


def measured(answer, num_requests=1, **options):
    with serving(answer) as server, HttpTarget(server.url, **options) as target:
        return closed_loop(target, [REQUEST] * num_requests, 2), server.asked


def test_a_streamed_answer():
    (record, other), asked = measured(ANSWER, num_requests=2)
    assert (record.error, other.error) == (None, None)
    assert (record.num_prompt_tokens, record.output_tokens, len(record.token_times)) == (3, 4, 4)
    assert record.sent < record.token_times[0] <= record.token_times[3]
    assert asked[0] == {
        "model": "the-model",
        "prompt": [7, 8, 9],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_prompts_as_text_and_a_named_model():
    _, asked = measured(ANSWER, model="other", decode=lambda ids: "-".join(map(str, ids)))
    assert (asked[0]["model"], asked[0]["prompt"]) == ("other", "7-8-9")


@pytest.mark.parametrize(
    ("flags", "header"),
    [([], None), (["--api-key", "of-mine"], "Bearer of-mine"), (["--api-key=of-mine"], "Bearer of-mine")],
)
def test_the_key_goes_with_every_request_and_into_no_result(flags, header, tmp_path, monkeypatch):
    with serving() as server:
        load = ["--clients", "1", "--requests", "2", "--quiet", "--json", str(tmp_path / "x.json")]
        args = ["bench", "--url", server.url, *load, *flags]
        monkeypatch.setattr("sys.argv", ["/bin/fastgen", *args])
        assert cli.main(args) == 0
    assert len(server.keys) >= 3  # the list of models, and the requests
    assert set(server.keys) == {header}
    assert "of-mine" not in (tmp_path / "x.json").read_text()


ANSWERS = [
    ("tokens joined, counted by the server", [token("ab"), token("cd"), usage(5, 4), DONE], (5, 4, 2)),
    ("no usage: tokens counted by pieces", [token("a"), token("b"), DONE], (3, 2, 2)),
    ("a last event that only says why", [token("a"), token("", finish_reason="length"), DONE], (3, 1, 1)),
    ("comments and other fields", [": hello\n\n", "event: x\n", token("a"), DONE], (3, 1, 1)),
    ("an error that is null", ['data: {"error": null, "choices": [{"text": "a"}]}\n\n', DONE], (3, 1, 1)),
]


@pytest.mark.parametrize(("answer", "counts"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_tokens_are_counted(answer, counts):
    (record,), _ = measured(answer)
    assert record.error is None
    assert (record.num_prompt_tokens, record.output_tokens, len(record.token_times)) == counts


FAILURES = [
    ((400, b'{"error": "no ignore_eos here"}'), 'status 400: {"error": "no ignore_eos here"}', 0),
    ([token("a"), 'data: {"error": {"message": "out of memory"}}\n\n', DONE], "out of memory", 1),
    ([token("a"), token("b")], "the answer broke off after 2 pieces", 2),
    ([DONE], "the answer has no tokens", 0),
    (["data: {broken\n\n"], "JSONDecodeError", 0),
]


@pytest.mark.parametrize(("answer", "error", "num_tokens"), FAILURES)
def test_a_failed_request_is_marked(answer, error, num_tokens):
    (record,), _ = measured(answer)
    assert error in record.error
    assert len(record.token_times) == num_tokens


@pytest.mark.parametrize("loop", [lambda t, r: closed_loop(t, r, 1), open_loop])
def test_a_server_that_goes_away_leaves_what_was_measured(loop):
    requests = [Request([7, 8], 4, arrival=i / 5) for i in range(5)]
    with serving(lifetime=2) as server, HttpTarget(server.url) as target:
        records = loop(target, requests)
        assert server.url in target.gone
    assert [record.error is None for record in records] == [True, True, False, False, False]
    assert records[4].error == target.gone


def test_leaving_breaks_off_what_is_under_way():
    with serving([token("a")] * 3) as server:
        with HttpTarget(server.url) as target:
            for _ in range(8):
                target.add(REQUEST)
            while not target.step():
                pass
        assert not target._thread.is_alive()


# The command

ARGS = ["--requests", "3", "--prompt-mean", "4", "--clients", "1,2", "--quiet"]


def test_the_command_measures_a_server(capsys, tmp_path):
    with serving() as server:
        status = cli.main(["bench", "--url", server.url, *ARGS, "--json", str(tmp_path / "found.json")])
    assert status == 0
    out = capsys.readouterr().out
    assert out.count("the-model") == 2
    found = json.loads((tmp_path / "found.json").read_text())
    assert [run["load"]["clients"] for run in found["runs"]] == [1, 2]
    assert [run["summary"]["requests"] for run in found["runs"]] == [3, 3]
    assert found["runs"][0]["config"] == {"url": server.url, "model": "the-model", "as_text": False}
    assert all(300 <= token_id < 1000 for asked in server.asked for token_id in asked["prompt"])
    assert len(server.asked) == 3 + 3 + 1 + 2


def test_the_command_keeps_what_a_dying_server_gave(capsys, tmp_path):
    path = tmp_path / "found.json"
    with serving(lifetime=2) as server:
        assert cli.main(["bench", "--url", server.url, *ARGS, "--json", str(path)]) == 1
    (run,) = json.loads(path.read_text())["runs"]
    assert run["summary"]["failed"] == 2
    assert [record["error"] is None for record in run["records"]] == [True, False, False]
    assert " failed: " in capsys.readouterr().out


def refusal(capsys, *args):
    assert cli.main(["bench", *args, *ARGS]) == 2
    return capsys.readouterr().err


def test_nobody_there(capsys):
    with serving() as server:
        url = server.url
    assert f"fastgen: error: {url} does not answer: " in refusal(capsys, "--url", url)
    assert f"fastgen: error: {url}: " in refusal(capsys, "--url", url, "--model", "x")
    assert "does not answer" in refusal(capsys, "--url", "nonsense")


def test_a_server_that_refuses_the_warm_up(capsys):
    with serving((404, b"no such model")) as server:
        assert "status 404: no such model" in refusal(capsys, "--url", server.url, "--model", "x")
