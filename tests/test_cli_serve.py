"""`fastgen serve` and `fastgen client`: what flags mean, what goes to stdout, and the exit status."""

import dataclasses
import io
import json
import sys

import pytest
from doubles import Gate, wait_until
from scripted import scripted_engine, tokens
from test_cli import ENGINE
from threaded import serving

from fastgen_jax import cli
from fastgen_jax.serving import deployments, replica_process, server
from fastgen_jax.serving.replica_process import CANNOT_LOAD, ReplicaSettings
from fastgen_jax.serving.server import ServerSettings
from fastgen_jax.types import EngineConfig


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.fixture
def run(capsys):
    """Runs `fastgen ARGS`: exit status, stdout, stderr."""

    def run(*args):
        status = cli.main(list(args))
        return status, *capsys.readouterr()

    return run


# fastgen serve


@pytest.fixture
def asked(monkeypatch):
    """The settings that a server or a replica would have run with."""
    found = []
    monkeypatch.setattr(server, "run", lambda settings: found.append(settings) or 0)
    monkeypatch.setattr(replica_process, "run", lambda settings: found.append(settings) or 0)
    return found


DEFAULTS = ServerSettings("smollm2-135m", deployment="smollm2-135m")
FLAGS = {
    "model": (["opt-125m"], {"model": "opt-125m", "deployment": "opt-125m"}),
    "name": (["--served-model-name", "mine"], {"name": "mine"}),
    "revision": (["--revision", "main"], {"revision": "main"}),
    "replicas": (["--replicas", "3"], {"replicas": 3}),
    "replica_classes": (
        ["--replicas", "2", "--replica-class", "a", "--replica-class", "b"],
        {"replicas": 2, "replica_classes": ("a", "b")},
    ),
    "remote": (
        ["--replica", "h:1", "--replica", "h:2"],
        {"model": None, "replicas": 0, "remote": ("h:1", "h:2"), "deployment": "router"},
    ),
    "nodes": (
        ["--nnodes", "2", "--node-rank", "0", "--coordinator", "h:9000"],
        {"nodes": {"coordinator": "h:9000", "num_processes": 2, "process_id": 0}},
    ),
    "host": (["--host", "0.0.0.0"], {"host": "0.0.0.0"}),
    "port": (["--port", "0"], {"port": 0}),
    "grpc_port": (["--grpc-port", "7"], {"grpc_port": 7}),
    "api_keys": (["--api-key", "a", "--api-key", "b"], {"api_keys": ("a", "b")}),
    "replica_api_key": (
        ["--api-key", "a", "--replica-api-key", "r"],
        {"api_keys": ("a",), "replica_api_key": "r"},
    ),
    "cors_origins": (["--cors-origin", "*"], {"cors_origins": ("*",)}),
    "max_queue": (["--max-queue", "9"], {"max_queue": 9}),
    "request_timeout": (["--request-timeout", "1.5"], {"request_timeout": 1.5}),
    "step_timeout": (["--step-timeout", "9"], {"step_timeout": 9.0}),
    "max_request_bytes": (["--max-request-bytes", "99"], {"max_request_bytes": 99}),
    "log_level": (["--log-level", "debug"], {"log_level": "debug"}),
    "log_prompts": (["--log-prompts"], {"log_prompts": True}),
    "deployment": (["--name", "mine"], {"deployment": "mine"}),
}


def test_every_setting_has_a_flag():
    assert set(FLAGS) | {"engine"} == {field.name for field in dataclasses.fields(ServerSettings)}


@pytest.mark.parametrize("flags", [[], *(flags for flags, _ in FLAGS.values())], ids=["none", *FLAGS])
def test_a_flag_sets_what_it_names_and_nothing_else(run, asked, flags):
    expected = next((fields for theirs, fields in FLAGS.values() if theirs == flags), {})
    assert run("serve", *flags) == (0, "", "")
    (settings,) = asked
    assert settings == dataclasses.replace(DEFAULTS, **expected)


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_flag_reaches_the_engines(run, asked, name):
    flags, value = ENGINE[name]
    assert run("serve", *flags)[0] == 0
    assert asked[0].engine == {name: value}
    assert EngineConfig(**asked[0].engine)


def test_local_and_remote_replicas_together(run, asked):
    assert run("serve", "opt-125m", "--replicas", "2", "--replica", "h:1")[0] == 0
    assert (asked[0].model, asked[0].replicas, asked[0].remote) == ("opt-125m", 2, ("h:1",))


def test_replicas_elsewhere_have_the_same_key_and_local_ones_one_that_nobody_else_knows(run, asked):
    assert run("serve", "--api-key", "a", "--replica", "h:1")[0] == run("serve", "--api-key", "a")[0] == 0
    assert [settings.replica_api_key for settings in asked] == ["a", None]


def test_a_replica_by_itself(run, asked):
    flags = "--only-replica --host 0.0.0.0 --grpc-port 5 --replica-class batch --api-key k --log-level error"
    assert run("serve", "opt-125m", "--served-model-name", "mine", "--dtype", "float16", *flags.split())[0] == 0
    (settings,) = asked
    assert settings == ReplicaSettings(
        "opt-125m",
        name="mine",
        engine={"dtype": "float16"},
        host="0.0.0.0",
        port=5,
        replica_class="batch",
        api_keys=("k",),
        log_level="error",
    )


def test_a_replica_that_cannot_load_is_a_failure(run, monkeypatch):
    monkeypatch.setattr(replica_process, "run", lambda settings: CANNOT_LOAD)
    assert run("serve", "opt-125m", "--only-replica")[0] == 1


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--replicas", "-1"], "replicas=-1"),
        (["--replicas", "two"], "'two'"),
        (["--replicas", "0"], "there are no replicas"),
        (["--replica", "gpu1"], "replica 'gpu1' is no address; give host:port"),
        (
            ["--replica-class", "a", "--replica-class", "b"],
            "2 replica classes for 1 replicas; give one for each, or none",
        ),
        (["--port", "70000"], "port=70000 is no port"),
        (["--max-queue", "0"], "max_queue=0 must be above 0"),
        (["--api-key", ""], "an API key is empty"),
        (["--name", "a/b"], "'a/b' is no name for a deployment"),
        (["--block-size", "0"], "block_size=0 is out of range"),
        (["--only-replica", "--replicas", "2"], "--only-replica is one replica"),
        (["--only-replica", "--replica", "h:1"], "--only-replica is one replica"),
        (["--only-replica", "--replica-class", "a", "--replica-class", "b"], "one --replica-class at most"),
        (
            ["--only-replica", "--port", "80"],
            "--only-replica is one replica, behind a router elsewhere; leave out --port",
        ),
        (["--only-replica", "--log-prompts"], "leave out --log-prompts"),
        (["--only-replica", "--api-key", ""], "an API key is empty"),
        (["opt-125m", "--replica", "h:1"], "--replica alone starts no model here"),
        (["--replica", "h:1", "--max-num-seqs", "8"], "leave out MODEL and its settings, or add --replicas"),
        (["--log-level", "loud"], "'loud'"),
        (["--temperature", "1"], "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run, asked, flags, error):
    status, out, err = run("serve", *flags)
    assert (status, out, asked) == (2, "", [])
    assert err.startswith("fastgen: error: ") and err.count("\n") == 1
    assert error in err


def test_a_name_that_is_taken_is_refused(run, asked):
    with deployments.recorded("smollm2-135m", "h", "g"):
        assert run("serve")[2] == "fastgen: error: deployment 'smollm2-135m' runs already; choose another --name\n"
        assert run("serve", "--name", "mine")[0] == 0


# fastgen client

ANSWERS = {
    "hello": tokens("one ", "né", "👍", " two"),
    "two\nlines": tokens("second"),
    "<|user|>hi<|assistant|>": tokens("hey"),
    "<|system|>be brief<|user|>hi<|assistant|>": tokens("h"),
}


@pytest.fixture(scope="module")
def served():
    with serving([scripted_engine(ANSWERS)]) as s:
        yield s


@pytest.fixture
def ask(run, served):
    def ask(*args):
        return run("client", "--server", served.grpc, *args)

    return ask


def test_stdout_gets_the_text_and_nothing_else(ask):
    assert ask("hello") == (0, "one né👍 two\n", "")
    assert ask("hello", "--max-tokens", "3") == (0, "one\n", "")
    assert ask("hello", "--echo", "--stop", "two") == (0, "helloone né👍 \n", "")


def test_the_prompt_comes_from_stdin_if_it_is_no_argument(ask, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert ask() == (0, "second\n", "")


def test_a_chat_goes_through_the_template(ask):
    assert ask("--chat", "hi") == (0, "hey\n", "")
    assert ask("--system", "be brief", "hi") == (0, "h\n", "")
    assert json.loads(ask("--chat", "hi", "--json")[1])["text"] == "hey"


def test_json_is_an_object_for_each_sample(ask):
    status, out, err = ask("hello", "--json", "--n", "2")
    assert (status, err) == (0, "")
    first, second = map(json.loads, out.splitlines())
    assert (first["text"], first["sample_index"], second["sample_index"]) == ("one né👍 two", 0, 1)
    assert first["finish_reason"] == "stop"
    assert len(first["token_ids"]) == len(ANSWERS["hello"]) + 1


def test_samples_are_lines(ask):
    assert ask("hello", "--n", "2") == (0, "one né👍 two\none né👍 two\n", "")


def test_stats_are_a_line_for_each_replica(ask, served):
    status, out, err = ask("--stats")
    assert (status, err) == (0, "")
    assert out.startswith(f"{served.servers[0].address}  tiny  ready  running 0  waiting 0  KV 0%  steps ")


def test_terminate_asks_the_server_to_end(run):
    told = []
    with serving([scripted_engine(ANSWERS)], on_terminate=told.append) as s:
        assert run("client", "--server", s.grpc, "--terminate") == (0, "", "")
    assert told == [False]


def test_the_key_opens_it(run):
    with serving([scripted_engine(ANSWERS)], app={"api_keys": ("key",)}) as s:
        assert run("client", "--server", s.grpc, "--api-key", "key", "hello")[:2] == (0, "one né👍 two\n")
        status, out, err = run("client", "--server", s.grpc, "hello")
        assert (status, out) == (1, "")
        assert err == f"fastgen: error: {s.grpc}: the API key is missing or wrong\n"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["hello", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["hello", "--max-tokens", "0"], "max_tokens=0 is out of range"),
        (["hello", "--model", "other"], "model='other' is not served here; the models are tiny"),
        (["--stats", "--terminate"], "not allowed with"),
        (["hello", "--timeout", "soon"], "'soon'"),
        (["hello", "--tools", "x"], "unrecognized arguments"),
        (["x" * 300], "the prompt"),
    ],
)
def test_a_mistake_of_the_users_is_one_line_and_status_2(ask, args, error):
    status, out, err = ask(*args)
    assert (status, out) == (2, "")
    assert err.startswith("fastgen: error: ") and err.count("\n") == 1
    assert error in err


def test_no_prompt_on_a_terminal_is_a_mistake(ask, monkeypatch):
    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    assert ask() == (2, "", "fastgen: error: there is no prompt; give one as an argument or on stdin\n")


def test_a_server_that_is_not_there_is_status_1(run):
    for args in (["hello"], ["hello", "--json"], ["--stats"], ["--terminate"]):
        status, out, err = run("client", "--server", "127.0.0.1:9", *args)
        assert (status, out) == (1, "")
        assert err.startswith("fastgen: error: 127.0.0.1:9: ") and err.count("\n") == 1


def test_time_that_is_up_is_status_1(run):
    gate = Gate()
    with serving([scripted_engine(gate)]) as s:
        for args in ([], ["--json"]):
            status, out, err = run("client", "--server", s.grpc, "hello", "--timeout", "0.2", *args)
            assert (status, out) == (1, "")
            assert "Deadline Exceeded" in err
        gate.open()
        wait_until(lambda: not vars(s.router)["_live"])


def test_the_server_is_the_one_that_runs_here(run, served):
    status, out, err = run("client", "hello")
    assert (status, out) == (2, "")
    assert err == "fastgen: error: no server runs here; name one with --server, or its gRPC address\n"
    with deployments.recorded("mine", "", served.grpc):
        assert run("client", "hello")[:2] == (0, "one né👍 two\n")
        assert run("client", "--server", "mine", "hello")[:2] == (0, "one né👍 two\n")
        assert "there is no deployment 'yours'" in run("client", "--server", "yours", "hello")[2]
        with deployments.recorded("other", "", "h:1"):
            err = run("client", "hello")[2]
    assert err == (
        "fastgen: error: several servers run here: mine, other; name one with --server, or its gRPC address\n"
    )
