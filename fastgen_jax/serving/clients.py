"""Clients of a server, in the shape of DeepSpeed-MII's `mii.client`: `Client`, and `AsyncClient` for asyncio."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import grpc

from fastgen_jax import mii
from fastgen_jax.serving import deployments, fastgen_pb2_grpc, wire
from fastgen_jax.serving import fastgen_pb2 as pb
from fastgen_jax.serving.service import CHANNEL_OPTIONS, seconds_of
from fastgen_jax.types import Response

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, str]]


IN_FLIGHT = 128
"""How many of a list of prompts are under way at once: below any sensible --max-queue."""


class ServerError(RuntimeError):
    """What a server refused, or could not finish.

    status: gRPC's name for it, such as "RESOURCE_EXHAUSTED". What was wrong with a request is a ValueError instead.
    """

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class _Common:
    """What both clients know: where the server is, and how to ask it."""

    def __init__(self, where: str, api_key: str | None, model: str | None) -> None:
        self.address = _address(where)
        self._model = model or ""
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)

    def _request(self, prompt: Prompt | Messages, fields: Mapping[str, Any], priority: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=self._model, prompt=wire.to_prompt(prompt), params=wire.to_params(fields), priority=priority
        )

    def _temperature_in(self, replicas: Seq[pb.ReplicaStats]) -> float:
        """The model's own, by what replicas say."""
        ours = [stats for stats in replicas if self._model in ("", stats.model) and stats.HasField("default_params")]
        return ours[0].default_params.temperature if ours else 0.0


class Client(_Common):
    """Talks to a server by gRPC, from any thread.

    client = fastgen_jax.client("llama2-7b")
    print(client(["DeepSpeed is", "Seattle is"], max_new_tokens=64)[0].text)
    for piece in client.stream("Once upon a time"):
        print(piece, end="", flush=True)
    client.terminate_server()
    """

    def __init__(self, where: str, *, api_key: str | None = None, model: str | None = None) -> None:
        """where: a deployment's name, or its gRPC address, host:port. model: which, where there are several.

        ValueError if there is no such deployment.
        """
        super().__init__(where, api_key, model)
        self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stub = fastgen_pb2_grpc.FastGenStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, prompts: Prompt | Seq[Prompt], **fields: Any) -> list[Response]:
        """The same as `generate`."""
        return self.generate(prompts, **fields)

    def generate(
        self, prompts: Prompt | Seq[Prompt], *, timeout: float | None = None, priority: int = 0, **fields: Any
    ) -> list[Response]:
        """Responses to one prompt or several, in order; n of them for a prompt with n > 1.

        Fields are those of `SamplingParams` and MII's, as for `fastgen_jax.pipeline`. timeout: seconds for all.
        """
        requests = [self._request(prompt, self._fields(prompt, fields), priority) for prompt in _every(prompts)]
        end = None if timeout is None else time.monotonic() + timeout
        calls: deque[Any] = deque()
        responses: list[Response] = []
        try:
            for request in requests:
                if len(calls) == IN_FLIGHT:
                    responses += _take(calls)
                left = None if end is None else end - time.monotonic()
                calls.append(self._stub.Generate.future(request, timeout=seconds_of(left), metadata=self._metadata))
            while calls:
                responses += _take(calls)
        finally:
            for call in calls:
                call.cancel()
        return responses

    def chat(self, messages: Messages, *, timeout: float | None = None, **fields: Any) -> list[Response]:
        """The answer to a conversation, through the model's chat template."""
        request = self._request(messages, self._fields(messages, fields), 0)
        reply = self._ask(self._stub.Generate, request, timeout)
        return [wire.from_response(response) for response in reply.responses]

    def stream(
        self, prompt: Prompt | Messages, *, timeout: float | None = None, priority: int = 0, **fields: Any
    ) -> Generator[str]:
        """Pieces of the text as they come. Leaving the loop early aborts the request."""
        _check_one_sample(fields)
        request = self._request(prompt, self._fields(prompt, fields), priority)
        call = self._stub.GenerateStream(request, timeout=seconds_of(timeout), metadata=self._metadata)
        try:
            for event in call:
                if event.accepted.echo:
                    yield event.accepted.echo
                if event.delta.text:
                    yield event.delta.text
        except grpc.RpcError as error:
            raise _error(error) from None
        finally:
            call.cancel()

    def tokenize(self, prompt: Prompt | Messages) -> list[int]:
        """The token ids of a text or a conversation."""
        request = pb.TokenizeRequest(model=self._model, prompt=wire.to_prompt(prompt))
        return list(self._ask(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Seq[int]) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=self._model, token_ids=wire.token_ids(token_ids))
        return self._ask(self._stub.Detokenize, request).text

    def stats(self) -> list[pb.ReplicaStats]:
        """What each replica holds and has done; `fastgen.proto` has the fields."""
        return list(self._ask(self._stub.Stats, pb.StatsRequest()).replicas)

    def terminate_server(self, *, now: bool = False) -> None:
        """Have the server finish what runs and end; `now` does not wait for that."""
        self._ask(self._stub.Terminate, pb.TerminateRequest(now=now))

    def close(self) -> None:
        """Close the connection; the server goes on."""
        self._channel.close()

    def _fields(self, prompt: Prompt | Messages, fields: Mapping[str, Any]) -> dict[str, Any]:
        return mii.to_fields(fields, lambda: len(self.tokenize(prompt)), lambda: self._temperature_in(self.stats()))

    def _ask(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return method(request, timeout=seconds_of(timeout), metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error) from None


class AsyncClient(_Common):
    """`Client` for coroutines of one event loop."""

    def __init__(self, where: str, *, api_key: str | None = None, model: str | None = None) -> None:
        super().__init__(where, api_key, model)
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stub = fastgen_pb2_grpc.FastGenStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt | Messages, *, timeout: float | None = None, priority: int = 0, **fields: Any
    ) -> list[Response]:
        """The response to one prompt or conversation, or its n."""
        request = self._request(prompt, await self._fields(prompt, fields), priority)
        reply = await self._ask(self._stub.Generate, request, timeout)
        return [wire.from_response(response) for response in reply.responses]

    async def stream(
        self, prompt: Prompt | Messages, *, timeout: float | None = None, priority: int = 0, **fields: Any
    ) -> AsyncGenerator[str]:
        """Pieces of the text as they come. Leaving the loop early aborts the request."""
        _check_one_sample(fields)
        request = self._request(prompt, await self._fields(prompt, fields), priority)
        call = self._stub.GenerateStream(request, timeout=seconds_of(timeout), metadata=self._metadata)
        try:
            async for event in call:
                if event.accepted.echo:
                    yield event.accepted.echo
                if event.delta.text:
                    yield event.delta.text
        except grpc.RpcError as error:
            raise _error(error) from None
        finally:
            call.cancel()

    async def tokenize(self, prompt: Prompt | Messages) -> list[int]:
        """The token ids of a text or a conversation."""
        request = pb.TokenizeRequest(model=self._model, prompt=wire.to_prompt(prompt))
        return list((await self._ask(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Seq[int]) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=self._model, token_ids=wire.token_ids(token_ids))
        return (await self._ask(self._stub.Detokenize, request)).text

    async def stats(self) -> list[pb.ReplicaStats]:
        """What each replica holds and has done."""
        return list((await self._ask(self._stub.Stats, pb.StatsRequest())).replicas)

    async def terminate_server(self, *, now: bool = False) -> None:
        """Have the server finish what runs and end; `now` does not wait for that."""
        await self._ask(self._stub.Terminate, pb.TerminateRequest(now=now))

    async def close(self) -> None:
        """Close the connection; the server goes on."""
        await self._channel.close()

    async def _fields(self, prompt: Prompt | Messages, fields: Mapping[str, Any]) -> dict[str, Any]:
        num_prompt = len(await self.tokenize(prompt)) if "max_length" in fields else 0
        temperature = 0.0
        if fields.get("do_sample") and fields.get("temperature") is None:
            temperature = self._temperature_in(await self.stats())
        return mii.to_fields(fields, lambda: num_prompt, lambda: temperature)

    async def _ask(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return await method(request, timeout=seconds_of(timeout), metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error) from None


def client(where: str, *, api_key: str | None = None, model: str | None = None) -> Client:
    """Attach to a server that runs: the name of a deployment of this machine, or a gRPC address, host:port."""
    return Client(where, api_key=api_key, model=model)


def _address(where: str) -> str:
    """The gRPC address of a deployment, or the one that is given."""
    host, _, port = where.rpartition(":")
    if host and port.isdigit():
        return where
    if (found := deployments.find(where)) is not None:
        return found.grpc
    names = ", ".join(deployments.names()) or "none"
    raise ValueError(f"there is no deployment {where!r:.80}; give host:port, or one of those that run here: {names}")


def _check_one_sample(fields: Mapping[str, Any]) -> None:
    if (n := fields.get("n")) not in (None, 1):
        raise ValueError(f"n={n!r:.80} samples cannot be streamed as one text; stream them one by one")


def _every(prompts: Any) -> list[Any]:
    """One prompt or several, as a list."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    every = list(prompts)
    return [every] if every and all(isinstance(i, int) for i in every) else every


def _take(calls: deque[Any]) -> list[Response]:
    """Wait for the first of the calls, and remove it; its responses."""
    try:
        reply = calls[0].result()
    except grpc.RpcError as error:
        raise _error(error) from None
    calls.popleft()
    return [wire.from_response(response) for response in reply.responses]


def _error(error: Any) -> Exception:
    """The exception for a failed call."""
    code, message = error.code(), error.details() or error.code().name
    wrong = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    return ValueError(message) if code in wrong else ServerError(message, code.name)
