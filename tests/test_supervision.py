"""What keeps serving processes running, finds them, ends them, and what they log."""

import asyncio
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
from doubles import until
from serving import run

import fastgen_jax
from fastgen_jax.serving import deployments, supervisor
from fastgen_jax.serving.process import Ending, start_logging
from fastgen_jax.serving.replica_process import CANNOT_LOAD, FAILED, USAGE_ERROR, ReplicaSettings, load_engine
from fastgen_jax.serving.server import ServerSettings
from fastgen_jax.serving.supervisor import LocalReplica, free_port, gpus, share_gpus

SETTINGS = ReplicaSettings("a-model", api_keys=("secret",), engine={"seed": 3})

# Started, and started again


class Supervised:
    """A `LocalReplica` whose processes run `code`, with what they were started with in `starts`."""

    PRELUDE = (
        "import json, os, sys, time; path = sys.argv[1]\n"
        "settings = json.loads(sys.stdin.readline())\n"
        "gpu = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
        "with open(path, 'a') as file: print(json.dumps([os.getpid(), settings, gpu]), file=file)\n"
        "number = len(open(path).readlines())\n"
    )

    def __init__(self, path, code: str, **options):
        self.hopeless: list[int] = []
        self._path = path / "starts"
        command = [sys.executable, "-S", "-c", self.PRELUDE + code, str(self._path)]
        self.replica = LocalReplica(SETTINGS, on_hopeless=self.hopeless.append, command=command, **options)

    @property
    def starts(self) -> list[tuple[int, dict, str | None]]:
        return [tuple(json.loads(line)) for line in self._path.read_text().splitlines()] if self._path.exists() else []


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)


@pytest.mark.parametrize(("status", "servers"), [(USAGE_ERROR, USAGE_ERROR), (CANNOT_LOAD, FAILED)])
def test_a_replica_that_cannot_load_its_engine_the_first_time_is_hopeless(tmp_path, status, servers):
    it = Supervised(tmp_path, f"sys.exit({status})")
    run(it.replica.run())
    assert it.hopeless == [servers]
    assert len(it.starts) == 1


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(1)", "os.kill(os.getpid(), 9)", "sys.exit(2 * (number > 1))"])
def test_one_that_ends_is_started_again_at_the_same_address(tmp_path, quick, end):
    it = Supervised(tmp_path, end)

    async def main():
        task = asyncio.create_task(it.replica.run())
        await until(lambda: len(it.starts) == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await it.replica.stop(seconds=5)

    run(main())
    assert it.hopeless == []
    assert len({pid for pid, _, _ in it.starts}) == 3
    assert {f"{settings['host']}:{settings['port']}" for _, settings, _ in it.starts} == {it.replica.address}


def test_pauses_grow_with_each_death_in_a_row_and_no_further_than_that(tmp_path, monkeypatch):
    for name, value in {"FIRST_PAUSE_S": 0.5, "LONGEST_PAUSE_S": 3.0}.items():
        monkeypatch.setattr(supervisor, name, value)
    pauses, lived = [], iter([0, 0, 0, 0, 0, 100, 0, 0])
    it = Supervised(tmp_path, "")
    clock = 0.0

    async def run_once():
        nonlocal clock
        clock += next(lived)
        return 1

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr(it.replica, "_run_once", run_once)
    monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock)
    coroutine = it.replica.run()
    with pytest.raises(asyncio.CancelledError):
        coroutine.send(None)
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0, 0.5, 1.0, 2.0]


def test_a_process_gets_its_settings_on_stdin_for_they_have_keys(tmp_path):
    it = Supervised(tmp_path, "print(open('/proc/self/cmdline').read(), file=open(path + '.cmd', 'w')); time.sleep(60)")

    async def main():
        task = asyncio.create_task(it.replica.run())
        await until(lambda: (tmp_path / "starts.cmd").exists())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await it.replica.stop(seconds=5)

    run(main())
    ((_, settings, gpu),) = it.starts
    assert ReplicaSettings.from_json(json.dumps(settings)) == ReplicaSettings(
        **{**vars(SETTINGS), "port": int(it.replica.address.rpartition(":")[2]), "owned": True}
    )
    assert gpu == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert "secret" not in (tmp_path / "starts.cmd").read_text()


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_ends_a_process_by_force_if_it_must(tmp_path, stubborn):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    it = Supervised(tmp_path, f"{ignore}open(path + '.up', 'w'); time.sleep(60)", devices="1")

    async def main():
        task = asyncio.create_task(it.replica.run())
        await until(lambda: (tmp_path / "starts.up").exists())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await it.replica.stop(seconds=0.5 if stubborn else 20)
        await it.replica.stop(seconds=1)  # there is nothing left to do

    run(main())
    ((pid, _, gpu),) = it.starts
    assert gpu == "1"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_free_port_is_free():
    ports = {free_port("127.0.0.1") for _ in range(3)}
    assert all(0 < port < 1 << 16 for port in ports)


@pytest.mark.parametrize(
    ("environment", "replicas", "shares"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, 2, ["3", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, 1, ["3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "3,5", "JAX_PLATFORMS": "cpu"}, 3, [None, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, 3, "replicas=3 want a GPU each, and there are 2: 3, 5"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (2, 4), ["0,1,2,3", "4,5,6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, (2, 2), "replicas=2 want 2 GPUs each, and there are 3: 0, 1, 2"),
        ({"PATH": "smi"}, 2, ["0", "1"]),
        ({"PATH": "/nowhere"}, 2, [None, None]),
    ],
)
def test_replicas_get_a_gpu_each(tmp_path, monkeypatch, environment, replicas, shares):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path) if value == "smi" else value)
    asked = replicas if isinstance(replicas, tuple) else (replicas,)
    if isinstance(shares, str):
        with pytest.raises(ValueError, match=shares):
            share_gpus(*asked)
    else:
        assert share_gpus(*asked) == shares


def test_a_tool_that_fails_finds_no_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no driver\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []


# Ended


def test_asked_once_it_finishes_and_asked_twice_it_stops():
    async def main():
        ending, found = Ending(), []
        assert not ending.is_begun
        ending.ask()
        await ending.wait()
        await ending.wait_for(asyncio.sleep(0.01))
        found.append("finished")

        forever = asyncio.create_task(ending.wait_for(asyncio.Event().wait()))
        await asyncio.sleep(0.01)
        assert not forever.done()
        ending.ask()
        await forever
        return found, ending.status

    assert run(main()) == (["finished"], 0)


@pytest.mark.parametrize("end", [lambda ending: ending.ask(now=True), lambda ending: ending.fail(2)])
def test_it_can_end_at_once(end):
    async def main():
        ending = Ending()
        end(ending)
        await ending.wait()
        await ending.wait_for(asyncio.Event().wait())
        return ending.status

    assert run(main()) in (0, 2)


def test_the_first_failure_is_the_status():
    ending = Ending()
    ending.fail(2)
    ending.fail(1)
    assert ending.status == 2


def test_signals_ask():
    async def main():
        ending = Ending()
        ending.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        await ending.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await ending.wait_for(asyncio.Event().wait())

    run(main())


# Found


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastgen_jax" / "deployments"


def test_a_deployment_is_found_by_its_name_while_it_runs():
    assert deployments.names() == []
    with deployments.recorded("mine", "127.0.0.1:8000", "127.0.0.1:50050"):
        found = deployments.find("mine")
        assert found == deployments.Deployment("mine", os.getpid(), "127.0.0.1:8000", "127.0.0.1:50050")
        with deployments.recorded("another", "h", "g"):
            assert deployments.names() == ["another", "mine"]
    assert deployments.find("mine") is None
    assert deployments.names() == []


def test_a_name_is_one_servers():
    with (
        deployments.recorded("mine", "h", "g"),
        pytest.raises(ValueError, match="deployment 'mine' runs already; choose another name"),
        deployments.recorded("mine", "h2", "g2"),
    ):
        raise AssertionError
    with deployments.recorded("mine", "h3", "g3"):
        assert deployments.find("mine").http == "h3"


def test_a_server_that_was_killed_is_not_found_and_its_name_is_free(cache):
    code = """if True:
        import sys, time
        from fastgen_jax.serving import deployments
        with deployments.recorded("mine", "h", "g"):
            print("up", flush=True)
            time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert deployments.find("mine").pid == process.pid
        process.kill()
        process.wait()
    assert (cache / "mine.json").read_text()
    assert deployments.find("mine") is None
    with deployments.recorded("mine", "h", "g"):
        assert deployments.find("mine").pid == os.getpid()


def test_a_look_of_another_does_not_keep_a_server_from_starting(cache):
    with deployments.recorded("mine", "h", "g"):
        pass
    with open(cache / "mine.json") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        timer = threading.Timer(0.05, fcntl.flock, (look, fcntl.LOCK_UN))
        timer.start()
        with deployments.recorded("mine", "h", "g"):
            assert deployments.find("mine") is not None
        timer.join()


def test_nothing_is_recorded_without_a_name(cache):
    with deployments.recorded("", "h", "g"):
        assert not cache.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "mine"}'])
def test_a_file_that_says_nothing_is_no_deployment(cache, text):
    cache.mkdir(parents=True)
    (cache / "mine.json").write_text(text)
    assert deployments.find("mine") is None


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "a b", "-x", "x" * 101])
def test_a_name_is_a_plain_word(name):
    with pytest.raises(ValueError, match="is no name for a deployment"):
        deployments.check_name(name)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7b-hf"),
        ("/models/my model (2).gguf", "my-model-2-.gguf"),
        ("..", "fastgen"),
        ("m" * 200, "m" * 100),
    ],
)
def test_a_deployment_is_named_after_its_model(model, name):
    assert deployments.default_name(model) == name


# Settings


def test_settings_survive_the_way_to_another_process():
    settings = ServerSettings(
        "m",
        name="n",
        replicas=2,
        replica_classes=("interactive", "batch"),
        remote=("host:1",),
        engine={"seed": 1, "dtype": None},
        api_keys=("a", "b"),
        cors_origins=("*",),
        request_timeout=1.5,
        step_timeout=float("inf"),
    )
    assert ServerSettings.loads(settings.dumps()) == settings
    assert [replica.replica_class for replica in settings.replica_settings()] == ["interactive", "batch"]
    assert {replica.step_timeout for replica in settings.replica_settings()} == {float("inf")}
    assert ReplicaSettings.from_json(SETTINGS.to_json()) == SETTINGS


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": None}, "replicas=1 of model=None"),
        ({"replicas": -1}, "replicas=-1"),
        ({"replicas": 0}, "there are no replicas"),
        ({"replica_classes": ("batch", "interactive")}, "2 replica classes for 1 replicas"),
        ({"port": 1 << 16}, "port=65536 is no port"),
        ({"grpc_port": -1}, "grpc_port=-1 is no port"),
        ({"max_queue": 0}, "max_queue=0 must be above 0"),
        ({"request_timeout": 0.0}, r"request_timeout=0\.0 must be above 0"),
        ({"request_timeout": float("nan")}, "request_timeout=nan must be above 0"),
        ({"step_timeout": 0.0}, r"step_timeout=0\.0 must be above 0"),
        ({"max_request_bytes": -5}, "max_request_bytes=-5 must be above 0"),
        ({"remote": ("gpu1",)}, "replica 'gpu1' is no address; give host:port"),
        ({"remote": (":5",)}, "replica ':5' is no address"),
        ({"remote": ("h:1", "i:1", "h:1")}, "a replica is named twice: h:1, i:1, h:1"),
        ({"api_keys": ("a", "")}, "an API key is empty"),
        ({"api_keys": ("a\n",)}, "an API key has a character that is not ASCII, or a space or newline at an end"),
        ({"api_keys": ("ключ",)}, "an API key has a character"),
        ({"replica_api_key": " a"}, "an API key has a character"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        ServerSettings(**{"model": "m", **fields})


@pytest.mark.parametrize("key", ["", "a\n", "ключ"])
def test_a_replica_refuses_a_key_that_cannot_be_brought(key):
    with pytest.raises(ValueError, match="an API key "):
        ReplicaSettings("m", api_keys=(key,))


def test_every_replica_draws_its_own_random_numbers_unless_they_are_given_a_seed(monkeypatch):
    engine = SimpleNamespace(from_pretrained=lambda name, **fields: fields["seed"])
    monkeypatch.setitem(vars(fastgen_jax), "Engine", engine)
    drawn = [load_engine(settings) for settings in ServerSettings("m", replicas=4).replica_settings()]
    assert len(set(drawn)) == 4
    assert load_engine(ReplicaSettings("m", engine={"seed": 3})) == 3


# Logs


@pytest.fixture
def restored_logging():
    root, ours = logging.getLogger(), logging.getLogger("fastgen_jax.serving")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


def test_logs_are_json_lines_of_ours_and_of_what_goes_wrong_elsewhere(capsys, restored_logging):
    start_logging("info", "server")
    log = logging.getLogger("fastgen_jax.serving.requests")
    log.info("request", extra={"request_id": "né-1", "seconds": 0.5})
    log.debug("too much")
    logging.getLogger("asyncio").info("chatter")
    logging.getLogger("asyncio").warning("slow\ncallback")
    warnings.warn("an old name", UserWarning, stacklevel=1)
    try:
        raise OSError("gone")
    except OSError as error:
        log.error("failed: %s", "x", exc_info=error)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"].split(":")[0] for line in lines][:2] == ["request", "slow\ncallback"]
    first, *_, last = lines
    assert len(lines) == 4
    assert {**first, "time": ""} == {
        "time": "",
        "level": "info",
        "process": "server",
        "message": "request",
        "request_id": "né-1",
        "seconds": 0.5,
    }
    assert time.strptime(first["time"][:19], "%Y-%m-%dT%H:%M:%S")
    assert "an old name" in lines[2]["message"]
    assert (last["level"], last["message"]) == ("error", "failed: x")
    assert last["traceback"].endswith("OSError: gone")
