"""`serve`: start a deployment that outlives the script, in the shape of DeepSpeed-MII's `mii.serve`."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from fastgen_jax import progress
from fastgen_jax.serving import deployments
from fastgen_jax.serving.clients import Client
from fastgen_jax.serving.server import ServerSettings
from fastgen_jax.types import DEFAULT_MODEL, EngineConfig

LOOK_EVERY_S = 0.2


def serve(
    model: str = DEFAULT_MODEL,
    *,
    name: str | None = None,
    replicas: int = 1,
    tp: int = 1,
    host: str = "127.0.0.1",
    port: int = 8000,
    grpc_port: int = 50050,
    api_key: str | Sequence[str] | None = None,
    revision: str | None = None,
    timeout: float | None = None,
    show_progress: bool | None = None,
    **engine: Any,
) -> Client:
    """Start a server for `model` and return a client of it, when it is ready.

        client = serve("llama2-7b", replicas=2)
        print(client("DeepSpeed is", max_new_tokens=64)[0].text)
        client.terminate_server()

    It runs until `terminate_server` or `fastgen client --terminate`; another process attaches with `client(name)`.

    tp: GPUs that share the model, for each replica. name: of the deployment; the model's unless given.
    port, grpc_port: 0 is any free one.
    timeout: seconds to wait for it; None is as long as it takes. engine: fields of `EngineConfig`.
    ValueError if the name is taken or the server ends before it is ready; its log says more.
    """
    engine = {"tensor_parallel": tp, **engine}
    EngineConfig(**engine)
    name = deployments.check_name(name) if name else deployments.default_name(model)
    if deployments.find(name) is not None:
        raise ValueError(f"deployment {name!r} runs already; attach with client({name!r}), or choose another name")
    keys = (api_key,) if isinstance(api_key, str) else tuple(api_key or ())
    settings = ServerSettings(
        model,
        name="",
        revision=revision,
        replicas=replicas,
        engine=engine,
        host=host,
        port=port,
        grpc_port=grpc_port,
        api_keys=keys,
        deployment=name,
    )
    log = deployments.folder() / f"{name}.log"
    process = _start(settings, log)
    try:
        with progress.spinner(f"starting {model}", show_progress):
            return _when_ready(process, name, keys, log, timeout)
    except BaseException:  # Ctrl-C too
        process.terminate()
        raise


def _start(settings: ServerSettings, log: Path) -> subprocess.Popen[bytes]:
    """A server in a session of its own, which a signal to the script does not reach."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "fastgen_jax.serving.server"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as pipe:  # not an argument: the settings have API keys
        pipe.write(settings.dumps().encode())
    return process


def _when_ready(
    process: subprocess.Popen[bytes], name: str, keys: Sequence[str], log: Path, timeout: float | None
) -> Client:
    start = time.monotonic()
    client: Client | None = None
    while True:
        if process.poll() is not None:
            raise ValueError(f"the server ended before it was ready: {_last_line(log)} ({log})")
        if timeout is not None and time.monotonic() - start > timeout:
            raise TimeoutError(f"the server was not ready after {timeout} s, and has been ended ({log})")
        found = deployments.find(name)
        if client is None and found is not None and found.pid == process.pid:
            client = Client(name, api_key=keys[0] if keys else None)
        if client is not None and _is_ready(client):
            return client
        time.sleep(LOOK_EVERY_S)


def _is_ready(client: Client) -> bool:
    try:
        return any(stats.state == "ready" for stats in client.stats())
    except (RuntimeError, grpc.RpcError):
        return False


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if '"level": "error"' in line]
    return (errors or lines or ["it said nothing"])[-1][:500]
