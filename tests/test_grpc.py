"""gRPC from outside: the stubs are what the proto says, and it alone is enough to write a client."""

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from scripted import assert_idle, scripted_engine, tokens
from serving import TIMEOUT
from threaded import serving

from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving import fastgen_pb2_grpc, service

ROOT = Path(__file__).parents[1]
PROTO = "fastgen_jax/serving/fastgen.proto"
SERVICE = "fastgen.v1.FastGen"

CLIENT = """
import sys
import grpc
import fastgen_pb2 as pb
import fastgen_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = fastgen_pb2_grpc.FastGenStub(channel)
    params = pb.SamplingParams(max_tokens=20, temperature=0, stop=["four"])
    request = pb.GenerateRequest(prompt=pb.Prompt(text="count"), params=params)
    for event in stub.GenerateStream(request):
        print(event.WhichOneof("kind"), repr(event.delta.text or event.response.text))
    print(stub.Generate(request).responses[0].finish_reason)
    print(list(stub.Tokenize(pb.TokenizeRequest(prompt=request.prompt)).token_ids))
    try:
        stub.Generate(pb.GenerateRequest(params=params))
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


def protoc(proto: str, *flags: str, include: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{include}", *flags, proto]
    subprocess.run(command, check=True, cwd=include)


def test_the_stubs_are_what_the_proto_says(tmp_path):
    """`python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. PROTO` changes nothing."""
    protoc(PROTO, *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")), include=ROOT)
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert [path.name for path in made] == ["fastgen_pb2.py", "fastgen_pb2.pyi", "fastgen_pb2_grpc.py"]
    for path in made:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path.name


def test_a_client_made_of_the_proto_alone_streams(tmp_path):
    (tmp_path / "fastgen.proto").write_bytes((ROOT / PROTO).read_bytes())
    (tmp_path / "client.py").write_text(CLIENT)
    protoc("fastgen.proto", "--python_out=.", "--grpc_python_out=.", include=tmp_path)
    engine = scripted_engine(tokens("STOP", " the", "né", " four five"))
    with serving([engine]) as server:
        command = [sys.executable, "client.py", server.grpc]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    first, *deltas, last, reason, ids, refusal = done.stdout.splitlines()
    assert (first, last, reason) == ("accepted ''", "response 'STOP thené '", "stop")
    assert all(line.startswith("delta ") for line in deltas)
    assert "".join(line.partition(" ")[2].strip("'") for line in deltas) == "STOP thené "
    assert ids == str(tokens("count"))
    assert refusal == (
        "INVALID_ARGUMENT the request has no prompt; set text, or token_ids or a conversation that are not empty"
    )
    assert_idle(engine)


@pytest.fixture
def channel():
    with serving([scripted_engine([])]) as server, grpc.insecure_channel(server.grpc) as channel:
        yield channel


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health_check(channel, name):
    stub = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_what_is_not_there(channel):
    with pytest.raises(grpc.RpcError) as error:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="other"), timeout=TIMEOUT)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_reflection(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    def ask(**question):
        request = reflection_pb2.ServerReflectionRequest(**question)
        return next(stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT))

    names = {service.name for service in ask(list_services="").list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    [described] = ask(file_containing_symbol=SERVICE).file_descriptor_response.file_descriptor_proto
    assert b"GenerateStream" in described


class Endless:
    """A backend that tells without end."""

    def __init__(self):
        self.closed = asyncio.Event()

    async def generate(self, request, *, stream, timeout):
        try:
            while True:
                yield pb.GenerateEvent(delta=pb.Delta(text="x" * 10_000))
        finally:
            self.closed.set()


def test_a_client_that_does_not_read_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(service, "STALLED_S", 0.5)

    async def main():
        backend = Endless()
        server = service.Server(backend, "127.0.0.1", 0)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = fastgen_pb2_grpc.FastGenStub(channel).GenerateStream(pb.GenerateRequest())
            await call.read()
            await asyncio.wait_for(backend.closed.wait(), TIMEOUT)
        await server.stop()

    asyncio.run(main())
