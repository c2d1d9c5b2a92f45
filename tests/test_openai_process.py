"""OpenAI's API of the real thing: `fastgen serve` in a process of its own, and SmolLM2."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx2
import openai
import pytest
from openai_client import MESSAGES, connect, engines, split
from serving import TIMEOUT

from fastgen_jax import Engine, SamplingParams
from fastgen_jax.serving import deployments
from fastgen_jax.types import DEFAULT_MODEL

FLAGS = {"dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 512}


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[openai.OpenAI]:
    """`fastgen serve`, reached by what it writes down of itself."""
    name = f"test-openai-{os.getpid()}"
    flags = [f"--{flag.replace('_', '-')}={value}" for flag, value in FLAGS.items()]
    command = [
        sys.executable,
        "-m",
        "fastgen_jax.cli",
        "serve",
        DEFAULT_MODEL,
        "--name",
        name,
        "--port=0",
        "--grpc-port=0",
    ]
    log = tmp_path_factory.mktemp("serve") / "log"
    with open(log, "w") as out:
        serve = subprocess.Popen([*command, *flags], stderr=out)
    try:
        with connect(f"http://{when_ready(serve, name)}") as client:
            yield client
    finally:
        serve.terminate()
        assert serve.wait(TIMEOUT) == 0, log.read_text()
    assert deployments.find(name) is None


def when_ready(serve: subprocess.Popen[bytes], name: str) -> str:
    """The address, when it takes requests."""
    end = time.monotonic() + 600
    while time.monotonic() < end and serve.poll() is None:
        if (found := deployments.find(name)) is not None:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"http://{found.http}/health").status_code == 200:
                    return found.http
        time.sleep(0.2)
    raise TimeoutError("it is not ready")


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_in_a_process_says_what_the_engine_says(process):
    own = Engine.from_pretrained(DEFAULT_MODEL, show_progress=False, **FLAGS)
    prompts = ["The capital of France is", "Ça coûte combien ? 👍", [504, 3575, 282]]
    greedy = {"max_tokens": 24, "temperature": 0}
    drawn = greedy | {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 5, "n": 2}
    penalised = greedy | {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    }
    for fields in (greedy, drawn, penalised):
        for prompt in prompts:
            asked = {"prompt": prompt} | split(fields) | {"model": DEFAULT_MODEL}
            expected = engines(own, prompt, **fields)
            assert [c.text for c in process.completions.create(**asked).choices] == [c.text for c in expected]
            pieces = [chunk.choices[0] for chunk in process.completions.create(stream=True, **asked)]
            for index, choice in enumerate(expected):
                assert "".join(piece.text for piece in pieces if piece.index == index) == choice.text
        chat_asked = split(fields) | {"model": DEFAULT_MODEL, "messages": MESSAGES}
        answer = process.chat.completions.create(**chat_asked)
        assert [c.message.content for c in answer.choices] == [c.text for c in engines(own, MESSAGES, **fields)]

    [response] = own.generate(prompts[:1], SamplingParams(**greedy, logprobs=5))
    chat_fields = {"model": DEFAULT_MODEL, "prompt": prompts[0], "logprobs": 5}
    logprobs = process.completions.create(**chat_fields, **greedy).choices[0].logprobs
    assert "".join(logprobs.tokens) == response.text
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in response.logprobs], abs=1e-3)
    stop = response.text[5:12]
    stopped = process.completions.create(model=DEFAULT_MODEL, prompt=prompts[0], stop=stop, **greedy).choices[0]
    assert (stopped.text, stopped.finish_reason) == (response.text[: response.text.index(stop)], "stop")
