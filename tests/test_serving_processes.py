"""Serving as processes: they start, answer, die, come back and end, and nobody who asks them hangs."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import scripted_process
from doubles import ENDLESS, Stub, refused, request, text_of, until
from scripted import TOKENIZER
from serving import run
from tiny import HF_CONFIG

import fastgen_jax
from fastgen_jax.serving import deployments
from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.clients import ServerError
from fastgen_jax.types import Response

SCRIPTED = [sys.executable, scripted_process.__file__]
REAL = [sys.executable, "-m", "fastgen_jax.cli"]
READY_S = 90


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """Deployments of these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Process:
    """`fastgen ARGUMENTS`, and what it says on stderr."""

    def __init__(self, folder: Path, *arguments: str, command: list[str] = SCRIPTED) -> None:
        self._path = folder / f"stderr-{time.monotonic_ns()}"
        with open(self._path, "wb") as log:
            self.process = subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._path.read_text()

    def said(self, pattern: str) -> re.Match | None:
        return re.search(pattern, self.log)

    def wait_for(self, pattern: str, seconds: float = READY_S) -> re.Match:
        end = time.monotonic() + seconds
        while (found := self.said(pattern)) is None:
            assert time.monotonic() < end and self.process.poll() is None, f"no {pattern!r} in:\n{self.log}"
            time.sleep(0.05)
        return found

    @property
    def grpc(self) -> str:
        return self.wait_for(r"gRPC on ([\d.:]+)")[1]

    def when_ready(self) -> "Process":
        self.wait_for(r'"process": "server", "message": "ready: \w')
        return self

    def ends(self, seconds: float = 30) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def children(self) -> list[int]:
        """Its replicas."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, command: list[str] = SCRIPTED):
    """A server that is ready, and that is no more when the block ends, nor are its replicas."""
    server = Process(folder, "serve", *arguments, "--port", "0", "--grpc-port", "0", command=command)
    try:
        yield server.when_ready()
    finally:
        replicas = server.children() if server.process.poll() is None else []
        server.process.kill()
        server.process.wait()
        wait_until_gone(replicas)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while any(map(is_there, pids)):
        assert time.monotonic() < end, "replicas are left behind"
        time.sleep(0.05)


async def states(stub: Stub) -> list[str]:
    return [replica.state for replica in (await stub.raw.Stats(pb.StatsRequest())).replicas]


async def until_states(stub: Stub, wanted: list[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while (found := sorted(await states(stub))) != wanted:
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def stream(stub: Stub, asked: pb.GenerateRequest):
    """Its events, and the error that it ended with."""
    events: list[pb.GenerateEvent] = []
    try:
        async for event in stub.raw.GenerateStream(asked, timeout=50):
            events.append(event)
    except grpc.aio.AioRpcError as error:
        return events, error
    return events, None


# One server


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two replicas behind a server, for tests that leave them as they were."""
    with serving(tmp_path_factory.mktemp("pair"), "scripted", "--replicas", "2", "--name", "pair") as server:

        async def both():
            async with Stub(server.grpc) as stub:
                await until_states(stub, ["ready", "ready"], READY_S)

        run(both())
        yield server


def test_it_answers_by_its_name_and_by_its_address(pair):
    for where in ("pair", pair.grpc):
        with fastgen_jax.client(where) as client:
            assert client("hello", max_tokens=5)[0].text == "xxxxx"
            assert "".join(client.stream("hello", max_tokens=5)) == "xxxxx"
            assert [stats.state for stats in client.stats()] == ["ready", "ready"]


def test_the_log_has_a_json_line_for_each_request_and_never_its_text(pair):
    with fastgen_jax.client("pair") as client:
        client("a secret prompt", max_tokens=3)
    found = pair.wait_for(r'.*"message": "request".*"prompt_tokens": 15.*\n', 10)
    line = json.loads(found[0])
    assert (line["end"], line["model"], line["generated_tokens"]) == ("ok", "scripted", 3)
    assert len(line["request_id"]) == 32
    assert "secret" not in pair.log
    for text in pair.log.splitlines():
        assert {"time", "level", "process", "message"} <= set(json.loads(text))


def test_a_local_replica_answers_its_own_server_only(pair):
    address = pair.wait_for(r"listening on ([\d.:]+)")[1]

    async def main():
        async with Stub(address) as nobody, Stub(address, "") as guess:
            return [await refused(stub.generate(request("x"))) for stub in (nobody, guess)]

    assert [error.code() for error in run(main())] == [grpc.StatusCode.UNAUTHENTICATED] * 2


def test_a_second_server_of_the_same_name_is_refused(pair, tmp_path):
    second = Process(tmp_path, "serve", "scripted", "--name", "pair", "--port", "0", "--grpc-port", "0")
    assert second.ends() == 2
    assert second.log == "fastgen: error: deployment 'pair' runs already; choose another --name\n"


@pytest.mark.parametrize("which", ["http", "grpc"])
def test_a_port_that_is_taken_is_an_error_and_nothing_is_started(pair, tmp_path, which):
    taken = pair.wait_for(r"HTTP on http://127.0.0.1:(\d+), gRPC on 127.0.0.1:(\d+)")
    ports = [taken[1], "0"] if which == "http" else ["0", taken[2]]
    second = Process(tmp_path, "serve", "scripted", "--name", which, "--port", ports[0], "--grpc-port", ports[1])
    assert second.ends() == 1
    last = second.log.splitlines()[-1]
    assert last.startswith("fastgen: error: ")
    assert "Address already in use" in last if which == "http" else f":{taken[2]} cannot be listened on" in last
    assert "listening on" not in second.log
    assert deployments.find(which) is None


def test_a_replica_that_is_stopped_is_out_until_it_goes_on(pair):
    (stopped, _) = pair.children()

    async def main():
        async with Stub(pair.grpc) as stub:
            await until_states(stub, ["ready", "ready"], 20)
            streams = [asyncio.create_task(stream(stub, request("x", max_tokens=150))) for _ in range(4)]
            whole = [asyncio.create_task(stub.generate(request("x", max_tokens=150), timeout=50)) for _ in range(4)]
            await asyncio.sleep(0.3)
            os.kill(stopped, signal.SIGSTOP)
            try:
                await until_states(stub, ["lost", "ready"], 15)
                assert [r.responses[0].text for r in await asyncio.gather(*whole)] == ["x" * 150] * 4
                assert (await stub.generate(request("x", max_tokens=3))).responses[0].text == "xxx"
            finally:
                os.kill(stopped, signal.SIGCONT)
            await until_states(stub, ["ready", "ready"], 15)
            return await asyncio.gather(*streams)

    for events, error in run(main()):
        assert error is None
        assert text_of(events) == "x" * 150


def check_told(events, error) -> bool:
    """Whether a client got all of its answer; what it got is right in any case."""
    num_tokens = sum(len(event.delta.token_ids) for event in events)
    assert text_of(events) == "x" * num_tokens
    if error is None:
        assert events[-1].response.text == "x" * 100
        return True
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert f"lost after {num_tokens} tokens" in error.details()
    assert dict(error.trailing_metadata())["fastgen-code"] == "replica_lost"
    assert num_tokens > 0, "it had told nothing"
    return False


@pytest.mark.parametrize("round_", [1, 2])
def test_a_replica_is_killed_under_32_streams(pair, round_):
    async def main():
        async with Stub(pair.grpc) as stub:
            await until_states(stub, ["ready", "ready"], READY_S)
            asked = [request([7 + number] * 5, max_tokens=100) for number in range(32)]
            streams = [asyncio.create_task(stream(stub, one)) for one in asked]
            await asyncio.sleep(0.4)
            os.kill(pair.children()[round_ % 2], signal.SIGKILL)
            await until_states(stub, ["lost", "ready"], 2)
            told = await asyncio.gather(*streams)
            await until_states(stub, ["ready", "ready"], READY_S)
            assert (await stub.generate(request("x", max_tokens=3))).responses[0].text == "xxx"
            return told

    finished = [check_told(events, error) for events, error in run(main())]
    assert 16 <= sum(finished) < 32, "those of the other replica, and those that had not begun"


@pytest.mark.parametrize(
    ("prompt", "flags"), [("break it", []), ("hang it", ["--step-timeout", "1.5"])], ids=["breaks", "hangs"]
)
def test_an_engine_that_breaks_or_hangs_ends_its_process_and_the_next_one_is_taken_back(tmp_path, prompt, flags):
    async def main(server):
        async with Stub(server.grpc) as stub:
            (first,) = server.children()
            streaming = asyncio.create_task(stream(stub, request("x", max_tokens=200)))
            await asyncio.sleep(0.3)
            error = await refused(stub.generate(request(prompt), timeout=50))
            events, lost = await streaming
            await until(lambda: server.children() not in ([], [first]))
            end = time.monotonic() + READY_S
            while "ready" not in await states(stub):
                assert time.monotonic() < end
                await asyncio.sleep(0.1)
            text = (await stub.generate(request("x", max_tokens=3))).responses[0].text
            return error, events, lost, text

    with serving(tmp_path, "scripted", "--name", "breaks", *flags) as server:
        error, events, lost, text = run(main(server))
        server.wait_for(r"ended \(1\); it is started again in 0.5 s", 10)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert dict(lost.trailing_metadata())["fastgen-code"] == "replica_lost"
    assert len(events) > 1
    assert text == "xxx"


# Ends


def test_sigterm_finishes_what_runs_and_refuses_what_comes(tmp_path):
    async def main(server):
        async with Stub(server.grpc) as stub:
            running = asyncio.create_task(stream(stub, request("x", max_tokens=200)))
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: server.said("what runs is finished"))
            error = await refused(stub.generate(request("x")))
            return await running, error

    with serving(tmp_path, "scripted", "--replicas", "2", "--name", "drains") as server:
        replicas = server.children()
        assert len(replicas) == 2
        (events, error), refusal = run(main(server))
        assert server.ends() == 0
        assert not any(map(is_there, replicas))
    assert error is None and events[-1].response.text == "x" * 200
    assert (refusal.code(), refusal.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
    assert deployments.find("drains") is None


@pytest.mark.parametrize("how", ["signals", "terminate now"])
def test_a_second_signal_stops_at_once(tmp_path, how):
    async def main(server):
        async with Stub(server.grpc) as stub:
            running = asyncio.create_task(stream(stub, request("slow", **ENDLESS)))
            await asyncio.sleep(0.5)
            if how == "signals":
                server.process.send_signal(signal.SIGTERM)
                await until(lambda: server.said("what runs is finished"))
                await asyncio.sleep(0.5)
                assert not running.done()
                server.process.send_signal(signal.SIGINT)
            else:
                await stub.raw.Terminate(pb.TerminateRequest(now=True))
            return await running

    with serving(tmp_path, "scripted", "--name", "stops") as server:
        replicas = server.children()
        events, error = run(main(server))
        assert server.ends(15) == 0
        wait_until_gone(replicas, 5)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
    assert 1 <= len(text_of(events)) < 50


def test_sigterm_ends_a_server_whose_replicas_are_still_loading(tmp_path):
    server = Process(tmp_path, "serve", "scripted", "--name", "early", "--port", "0", "--grpc-port", "0")
    server.wait_for("loading scripted")
    replicas = server.children()
    server.process.terminate()
    assert server.ends(20) == 0
    assert replicas and not any(map(is_there, replicas))
    assert "Fatal" not in server.log and "Traceback" not in server.log


def test_a_server_that_is_killed_leaves_no_replica_behind(tmp_path):
    arguments = ["--replicas", "2", "--name", "killed", "--port", "0", "--grpc-port", "0"]
    server = Process(tmp_path, "serve", "scripted", *arguments).when_ready()
    replicas = server.children()
    assert len(replicas) == 2
    server.process.kill()
    server.process.wait()
    wait_until_gone(replicas)
    assert deployments.find("killed") is None


@pytest.mark.parametrize(
    ("model", "command", "status", "error"),
    [
        ("./no-such-model", REAL, 2, "no-such-model"),
        ("cannot-load", SCRIPTED, 1, "the device does not answer"),
    ],
)
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path, model, command, status, error):
    server = Process(tmp_path, "serve", model, "--name", "fails", "--port", "0", "--grpc-port", "0", command=command)
    assert server.ends(READY_S) == status
    errors = [json.loads(line) for line in server.log.splitlines() if '"level": "error"' in line]
    assert len(errors) == 1 and error in errors[0]["message"]
    assert "\n" not in errors[0]["message"]
    assert ("traceback" in errors[0]) is (status == 1)


# Replicas elsewhere


def test_a_replica_by_itself_and_a_router_that_knows_where_it_is_and_its_key(tmp_path):
    port = "0"
    only = Process(
        tmp_path,
        "serve",
        "scripted",
        "--only-replica",
        "--grpc-port",
        port,
        "--api-key",
        "inner",
        "--replica-class",
        "batch",
    )
    address = only.wait_for(r"ready: scripted on ([\d.:]+)")[1]

    async def main(server):
        async with Stub(server.grpc, "outer") as stub, Stub(server.grpc) as nobody:
            reply = await stub.generate(request("x", max_tokens=3, replica_class="batch"))
            wrong = await refused(stub.generate(request("x")))
            closed = await refused(nobody.generate(request("x")))
            return reply.responses[0].text, wrong, closed

    arguments = ["--replica", address, "--replica-api-key", "inner", "--api-key", "outer", "--name", "front"]
    with serving(tmp_path, *arguments) as server:
        assert server.children() == []
        text, wrong, closed = run(main(server))
        assert "inner" not in server.log + only.log and "outer" not in server.log
        server.process.terminate()
        assert server.ends() == 0
        assert only.process.poll() is None, "what somebody else started goes on"
    only.process.terminate()
    assert only.ends() == 0
    assert text == "xxx"
    assert wrong.details() == "replica_class='interactive' is not served; the classes are batch"
    assert closed.code() == grpc.StatusCode.UNAUTHENTICATED


# From Python, over a real (tiny) model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint of a tiny random Llama that `from_pretrained` loads."""
    import hf  # brings torch, which no other test here needs

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    hf.save_random_model(HF_CONFIG | {"vocab_size": len(TOKENIZER)}, folder)
    TOKENIZER.save_pretrained(folder)
    return folder


ENGINE = {"block_size": 16, "num_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8, "dtype": "float32"}
CASES = [
    {"max_new_tokens": 12, "ignore_eos": True},
    {"max_length": 20, "do_sample": False},
    {"max_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5, "n": 2, "logprobs": 2},
    {"max_tokens": 12, "seed": 1, "temperature": 1.0, "stop": ["e"], "return_full_text": True},
    {"max_tokens": 8, "logit_bias": {70: 5.0}, "allowed_token_ids": [70, 71, 72], "prompt_logprobs": 1},
]


def assert_same(got: Response, expected: Response) -> None:
    for name in ("text", "token_ids", "prompt_token_ids", "finish_reason", "index"):
        assert getattr(got, name) == getattr(expected, name), name
    for name in ("logprobs", "prompt_logprobs"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine is None) is (theirs is None)
        pairs = [pair for pair in zip(mine or (), theirs or (), strict=True) if pair != (None, None)]
        assert [a.token_id for a, _ in pairs] == [b.token_id for _, b in pairs]
        assert [a.logprob for a, _ in pairs] == pytest.approx([b.logprob for _, b in pairs], abs=1e-4)
        assert [len(a.top) for a, _ in pairs] == [len(b.top) for _, b in pairs]


def test_serve_outlives_the_script_and_answers_as_a_pipeline_does(model, tmp_path):
    script = f"""if True:
        import fastgen_jax
        client = fastgen_jax.serve({str(model)!r}, name="outlives", port=0, grpc_port=0, warm_up=False, **{ENGINE!r})
        print(repr(client("hello", max_new_tokens=4)[0].text))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=READY_S)
    assert done.returncode == 0, done.stderr
    try:
        pipe = fastgen_jax.pipeline(str(model), warm_up=False, show_progress=False, **ENGINE)
        prompts = ["hello", "né", [70, 80, 90]]
        with fastgen_jax.client("outlives") as client:
            assert done.stdout.strip() == repr(client("hello", max_new_tokens=4)[0].text)
            for fields in CASES:
                got, expected = client(prompts, **fields), pipe(prompts, **fields)
                assert len(got) == len(expected) == 3 * fields.get("n", 1)
                for mine, theirs in zip(got, expected, strict=True):
                    assert_same(mine, theirs)
            with pytest.raises(ValueError, match="deployment 'outlives' runs already; attach with client"):
                fastgen_jax.serve(str(model), name="outlives")
            (stats,) = client.stats()
            assert (stats.state, stats.max_num_seqs) == ("ready", 8)
            found = deployments.find("outlives")
            client.terminate_server()
    finally:
        if (left := deployments.find("outlives")) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGTERM)
    wait_until_gone([found.pid])
    assert deployments.find("outlives") is None
    with pytest.raises(ValueError, match="there is no deployment 'outlives'; give host:port, or one of those that run"):
        fastgen_jax.client("outlives")


def test_serve_says_why_it_could_not():
    with pytest.raises(ValueError, match=r"the server ended before it was ready: .*no-such-model"):
        fastgen_jax.serve("./no-such-model", name="fails", port=0, grpc_port=0)
    assert deployments.find("fails") is None


def test_serve_waits_so_long_and_no_longer(model):
    with pytest.raises(TimeoutError, match=r"the server was not ready after 0\.5 s, and has been ended"):
        fastgen_jax.serve(str(model), name="late", port=0, grpc_port=0, timeout=0.5)
    end = time.monotonic() + 20
    while deployments.find("late") is not None:
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tp": 0}, "tensor_parallel=0"),
        ({"policy": "best"}, "policy='best' is not known"),
        ({"block_sice": 16}, "has no field 'block_sice'"),
        ({"replicas": -1}, "replicas=-1"),
        ({"name": "a/b"}, "'a/b' is no name for a deployment"),
        ({"api_key": ""}, "an API key is empty"),
    ],
)
def test_what_serve_cannot_do_is_refused_before_anything_is_started(fields, error):
    with pytest.raises((ValueError, TypeError), match=error):
        fastgen_jax.serve("smollm2-135m", **{"name": "never", **fields})


def test_a_client_of_a_server_that_has_gone_says_so(tmp_path):
    with serving(tmp_path, "scripted", "--name", "goes") as server:
        client = fastgen_jax.client("goes")
        server.process.kill()
        server.process.wait()
        with pytest.raises(ServerError) as caught:
            client("x", timeout=20)
        assert caught.value.status == "UNAVAILABLE"
