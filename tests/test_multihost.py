"""Processes that share a model: the tokens of one, and an end in one sentence when another has died."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf import LLAMA, save_random_model
from scripted import TOKENIZER

from fastgen_jax import cli, multihost, peers
from fastgen_jax.engine import Engine
from fastgen_jax.orders import Order
from fastgen_jax.runner import ModelRunner
from fastgen_jax.serving.supervisor import free_port
from fastgen_jax.types import DEFAULT_MODEL, SamplingParams

TWO = ["--nnodes", "2"]
NODE = Path(__file__).parent / "node.py"
ENGINE = {"tensor_parallel": 2, "block_size": 8, "num_blocks": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4}
ENDS_WITHIN_S = 30


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        save_random_model(LLAMA, Path(name))
        TOKENIZER.save_pretrained(name)
        yield Path(name)


class Node:
    """A process with what it said."""

    def __init__(self, folder: Path, rank: int, count: int, port: int, **engine: Any) -> None:
        command = [sys.executable, str(NODE), str(folder), str(rank), str(count), str(port), json.dumps(engine)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> str:
        """The next that it writes; not Gloo's."""
        assert self.process.stdout is not None
        return next((line for line in self.process.stdout if not line.startswith("[Gloo]")), "").strip()

    def end(self, timeout: float = 120) -> tuple[int, str]:
        """Its exit status, and our own line among what it said on stderr."""
        _, err = self.process.communicate(timeout=timeout)
        ours = [line for line in err.splitlines() if line.startswith("fastgen: error: ")]
        return self.process.returncode, "\n".join(ours) or err[-2000:]


@pytest.fixture
def nodes(folder: Path) -> Iterator[Any]:
    started: list[Node] = []

    def start(count: int = 2, *each: dict[str, Any], **engine: Any) -> list[Node]:
        port = free_port("127.0.0.1")
        for rank, own in enumerate(each or ({},) * count):
            options = {"path": folder, "rank": rank, **ENGINE, **engine, **own}
            started.append(Node(options.pop("path"), options.pop("rank"), count, port, **options))
        return started

    yield start
    for node in started:
        node.process.kill()
        node.process.communicate()


@pytest.mark.parametrize(("count", "tensor_parallel"), [(2, 4)])
def test_two_processes_give_the_tokens_of_one(nodes, folder, count, tensor_parallel):
    leader, follower = nodes(count, tensor_parallel=tensor_parallel)
    found, compiled, preemptions = json.loads(leader.line())
    assert leader.end()[0] == 0 == follower.end()[0]
    alone = Engine.from_pretrained(str(folder), show_progress=False, warm_up=False, **ENGINE | {"tensor_parallel": 1})
    prompts = [list(range(5, 5 + n)) for n in (3, 20, 40, 9)]
    every = (
        SamplingParams(max_tokens=16, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.9, top_p=0.8, seed=1, ignore_eos=True),
    )
    assert found == [[list(r.token_ids) for r in alone.generate(prompts, params)] for params in every]
    assert compiled == 0
    assert preemptions > 0


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_ends_the_other_with_a_sentence(nodes, victim):
    started = nodes(2, wait=True, warm_up=False)
    started[0].line()  # in the middle of generating
    started[victim].process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    status, sentence = started[1 - victim].end(ENDS_WITHIN_S)
    assert time.monotonic() - start < ENDS_WITHIN_S
    assert status == peers.LOST
    assert sentence.startswith(f"fastgen: error: process {victim}")
    assert sentence.endswith("this process cannot go on without it") and sentence.count("\n") == 0


@pytest.mark.parametrize(
    ("rank", "fault"),
    [(0, "leave"), (1, "load"), *(pytest.param(i, "step", marks=pytest.mark.slow) for i in (0, 1))],
)
def test_one_that_fails_or_leaves_ends_the_other(nodes, rank, fault):
    """At once: JAX's own end of a process would wait for the other, five minutes."""
    each: list[dict[str, Any]] = [{}, {}]
    each[rank] = {"fault": fault}
    started = nodes(2, *each, warm_up=False)
    expected = {
        rank: "this process has ended without closing the engine, so those that share it end, too",
        1 - rank: f"process {rank}",
    }
    for i, node in enumerate(started):
        status, sentence = node.end(2 * ENDS_WITHIN_S)
        assert (status, expected[i] in sentence) == (peers.LOST, True), sentence


def test_a_follower_that_dies_as_it_is_let_go_is_not_waited_for(monkeypatch):
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(multihost, "end", sys.exit)
    leader = multihost.Leader([ours])
    theirs.send_bytes(b"n14")  # what nobody asked for is passed over
    closing = ThreadPoolExecutor(1).submit(leader.close)
    while theirs.recv_bytes() != b"q":
        pass
    theirs.close()
    with pytest.raises(SystemExit, match=r"^process 1 is gone and has not parted$"):
        closing.result(ENDS_WITHIN_S)


def test_no_order_follows_one_that_was_broken_off():
    """The processes may be out of step: the next one's sums would be of different layers."""
    ours, theirs = multiprocessing.Pipe()
    leader = multihost.Leader([ours])
    runner = object.__new__(ModelRunner)
    runner._group = leader
    with pytest.raises(AttributeError):
        runner._order("nothing_of_that_kind")
    with pytest.raises(RuntimeError, match=r"^a step was broken off, .* out of step"):
        runner._order("reset")
    leader.close()  # waits for nobody
    assert not leader.has_parted
    leader._peers[0].expect_end()
    theirs.close()


def test_strangers_at_the_port_are_not_processes():
    """Probes of a port that is open, and what is no JSON, or not ours."""
    port = free_port("127.0.0.1")
    with peers.listening("127.0.0.1", port) as listener, ThreadPoolExecutor(2) as threads:
        accepted = threads.submit(peers.accept, listener, 2, 10)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\0\0\0\1[", b"\0\0\0\4[[]]"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(data)
        ours = threads.submit(peers.connect, "127.0.0.1", port, 1, 2, 10)
        (connection,) = accepted.result(10)
        connection.send_bytes(b"come")
        assert peers.reply_of(ours.result(10)) == "come"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_hangs_is_given_up(nodes, victim):
    started = nodes(2, wait=True, warm_up=False)
    started[0].line()
    started[victim].process.send_signal(signal.SIGSTOP)
    status, sentence = started[1 - victim].end(ENDS_WITHIN_S)
    assert (status, f"process {victim}" in sentence) == (peers.LOST, True)
    assert f"has said nothing for {peers.SILENCE_S:g} s" in sentence
    started[victim].process.send_signal(signal.SIGCONT)
    assert started[victim].end(ENDS_WITHIN_S)[0] != 0


def test_processes_with_different_models_say_so_at_once(nodes, tmp_path):
    save_random_model(LLAMA | {"rms_norm_eps": 1e-3}, tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    started = nodes(2, {}, {"path": tmp_path})
    for node in started:
        status, sentence = node.end()
        assert status == 2
        assert sentence.startswith("fastgen: error: the checkpoint's fingerprint differs: process 0 has ")


def test_processes_with_different_settings_say_so_at_once(nodes):
    for node in nodes(2, {}, {"block_size": 16}):
        status, sentence = node.end()
        assert (status, "the engine's configuration differs" in sentence) == (2, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_does_not_come_is_not_waited_for_for_ever(nodes, rank):
    leader, *_ = nodes(2, {"timeout": 5, "rank": rank})
    start = time.monotonic()
    status, sentence = leader.end(ENDS_WITHIN_S)
    assert status != 0
    assert time.monotonic() - start < ENDS_WITHIN_S
    assert "127.0.0.1:" in sentence and "within 5 s" in sentence


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank_do_not_hang(nodes, rank):
    """Neither goes on, whoever else is there."""
    ranks = (0, 0, 1) if rank == 0 else (0, 1, 1)
    ended = [node.end(ENDS_WITHIN_S) for node in nodes(3, *({"rank": each, "timeout": 8} for each in ranks))]
    assert all(status != 0 for status, _ in ended)
    assert all(sentence.startswith("fastgen: error: ") and sentence.count("\n") == 0 for _, sentence in ended)
    expected = "process 0 cannot listen on 127.0.0.1" if rank == 0 else "process_id=1 has come twice"
    assert any(expected in sentence for _, sentence in ended)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("host", 2, 0), "coordinator='host' is not HOST:PORT, as 10.0.0.1:9000"),
        (("host:x", 2, 0), "coordinator='host:x' is not HOST:PORT, as 10.0.0.1:9000"),
        (("host:99999", 2, 0), "coordinator='host:99999' is not HOST:PORT, as 10.0.0.1:9000"),
        (("host:9000", 1, 0), "num_processes=1 is nobody to join; it must be 2 or more"),
        (("host:9000", 2, 2), "process_id=2 of 2 processes; it must be 0 to 1"),
        (("host:9000", None, 0), "coordinator, num_processes and process_id go together; give all of them, or none"),
        (("host:9000", 2, -1), "process_id=-1 of 2 processes; it must be 0 to 1"),
    ],
)
def test_numbers_that_cannot_be_are_one_sentence(given, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        multihost.join(*given)


@pytest.mark.parametrize(
    ("name", "rank"), [("SLURM_PROCID", 3), ("OMPI_COMM_WORLD_RANK", 0), ("JOB_COMPLETION_INDEX", 1)]
)
def test_the_rank_is_found_out(monkeypatch, name, rank):
    for other in multihost.RANKS:
        monkeypatch.delenv(other, raising=False)
    with pytest.raises(ValueError, match=r"^this process's number .* is not known: none of SLURM_PROCID,"):
        multihost.detected_rank()
    monkeypatch.setenv(name, str(rank))
    assert multihost.detected_rank() == rank


def test_an_order_survives_the_wire():
    order = Order("step", (16, 8, 1), (np.arange(7, dtype=np.int32), np.ones((2, 3), np.float32), np.uint32([[5]])))
    found = Order.from_bytes(order.to_bytes())
    assert (found.kind, found.numbers) == (order.kind, order.numbers)
    for ours, theirs in zip(found.arrays, order.arrays, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert Order.from_bytes(Order("reset").to_bytes()) == Order("reset")


# The server


class Served:
    """`fastgen serve` on two nodes of one device each, which are processes of this machine."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._log, port = log, free_port("127.0.0.1")
        shared = ["serve", str(folder), "--tp", "2", "--nnodes", "2", "--coordinator", f"127.0.0.1:{port}"]
        engine = ["--block-size", "8", "--num-blocks", "32", "--max-num-batched-tokens", "16", "--no-warm-up"]
        ports = ["--port", "0", "--grpc-port", "0", "--name", f"two-nodes-{port}"]
        self.processes = []
        for rank in range(2):
            with open(f"{log}-{rank}", "wb") as out:
                command = [sys.executable, "-m", "fastgen_jax.cli", *shared, "--node-rank", str(rank), *engine]
                environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
                process = subprocess.Popen(command + ports * (rank == 0), stdout=out, stderr=out, env=environment)
            self.processes.append(process)
        self.url = self._when_ready()

    def said(self, rank: int) -> str:
        return Path(f"{self._log}-{rank}").read_text(errors="replace")

    def _when_ready(self) -> str:
        end = time.monotonic() + 120
        while time.monotonic() < end and all(process.poll() is None for process in self.processes):
            if match := re.search(r"HTTP on (http://\S+?),", self.said(0)):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{match[1]}/health") as health:
                    if set(json.load(health)["replicas"].values()) == {"ready"}:
                        return match[1]
            time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.said(0)[-2000:]}\n{self.said(1)[-2000:]}")

    def ask(self) -> str:
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["choices"][0]["text"]


@pytest.fixture
def served(folder, tmp_path) -> Iterator[Served]:
    server = Served(folder, tmp_path / "log")
    yield server
    for process in server.processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_server_on_two_nodes_answers_and_both_end_with_it(served, folder):
    alone = Engine.from_pretrained(str(folder), show_progress=False, warm_up=False, block_size=8, num_blocks=32)
    assert served.ask() == alone.generate([[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True))[0].text
    served.processes[0].terminate()
    assert [process.wait(120) for process in served.processes] == [0, 0], served.said(1)[-2000:]


@pytest.mark.slow
def test_a_server_ends_when_another_node_has_died(served):
    served.ask()
    served.processes[1].kill()
    assert served.processes[0].wait(ENDS_WITHIN_S) == 1
    assert "process 1 is gone: this process cannot go on without it" in served.said(0)


def test_a_node_has_the_model_of_the_first_and_waits_for_it_once_they_have_met(monkeypatch):
    """SIGTERM ends a process that still looks for the others."""
    done = []

    class Group(multihost.Follower):
        def __init__(self) -> None:
            done.append("join")

        def follow(self, name: str, **_: Any) -> None:
            done.append(name)

    monkeypatch.setattr(multihost, "join", lambda **_: Group())
    monkeypatch.setattr(multihost, "wait_for_leader", lambda: done.append("wait"))
    assert cli.main(["serve", *TWO, "--node-rank", "1", "--coordinator", "h:1"]) == 0
    assert done == ["join", "wait", DEFAULT_MODEL]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--node-rank", "0"], "--node-rank and --coordinator are for several hosts; give --nnodes, too"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--coordinator", "h:1"],
            "process_id=2 of 2 processes; it must be 0 to 1",
        ),
        (["--nnodes", "2", "--node-rank", "0", "--coordinator", "h"], "coordinator='h' is not HOST:PORT"),
        (
            ["--nnodes", "2", "--node-rank", "0", "--coordinator", "h:1", "--replicas", "2"],
            "replicas=2 on several nodes",
        ),
    ],
)
def test_what_nodes_cannot_be_is_one_sentence(flags, sentence, capsys):
    assert cli.main(["serve", "smollm2-135m", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fastgen: error: {sentence}") and error.count("\n") == 1
