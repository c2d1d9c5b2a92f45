"""A whole engine over the GPU kernels, which run in the interpreter: the same tokens as over the CPU's attention."""

import jax
import jax.numpy as jnp
import pytest
from mosaic_interpreter import extended_interpreter
from test_attention import GPUS, backend_called
from tiny import EOS, HF_CONFIG, SMALL, tiny_params

from fastgen_jax import Engine, SamplingParams
from fastgen_jax.models import llama

PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 20]


def generate(backend: str) -> list[tuple[int, ...]]:
    """Greedy tokens; steps of prompt chunks, of decodes and of both, bfloat16."""
    model = llama.Model(llama.from_hf(HF_CONFIG), backend_called(backend))
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), tiny_params())
    # Not overlapped: the interpreter replaces parts of JAX while it runs, which nothing may be traced beside.
    config = SMALL | {"max_num_batched_tokens": 32, "num_blocks": 20, "overlap": False}
    engine = Engine(model, params, None, eos_token_ids=(EOS,), **config)
    responses = engine.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    jax.block_until_ready(engine.params)
    return [response.token_ids for response in responses]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hopper", "ampere"])
def test_an_engine_generates_the_same_tokens_over_the_gpu_kernels(backend: str):
    assert backend in GPUS
    with extended_interpreter():
        assert generate(backend) == generate("xla")
