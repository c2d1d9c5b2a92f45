"""A step of a real model of every family, compiled for two GPUs that are not here.

Head dims from 64 to 256 and 1 to 71 query heads a KV head: attention runs on the GPU's own kernels everywhere, the
pool is updated in place and no weight is copied. Two layers, or one of each kind, stand for the rest;
`scripts/family_table.py` compiles larger steps and some models whole.
"""

from math import prod

import jax
import pytest
from real_configs import shortened

from fastgen_jax import deviceless, models
from fastgen_jax.compiler_output import count_launches, entry, results
from fastgen_jax.gpus import GPUS
from fastgen_jax.kernels import mosaic_gpu
from fastgen_jax.sizing import Sizing, leaves
from fastgen_jax.types import EngineConfig

pytestmark = pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))

TOKENS, NUM_BLOCKS = 61, 199
"""Neither divides a weight's size, so no activation or pool is taken for a weight."""

ATTENTION_CALLS = 3
"""Of a launch of attention: prompt tiles, splits of the decode rows, and their combination."""

CASES = [(gpu, family) for gpu in ("h200", "a100-80") for family in models.families()]


@pytest.mark.parametrize(("gpu", "family"), CASES)
def test_a_step_runs_on_the_gpus_own_attention_and_copies_nothing(gpu: str, family: str) -> None:
    (device,) = deviceless.compile_only_devices(GPUS[gpu], 1)
    config = EngineConfig(max_num_batched_tokens=TOKENS)
    sizing = Sizing(shortened(family), GPUS[gpu], config, tp=1, mem_fraction=0.75, devices=[device])
    programs = sizing.programs(NUM_BLOCKS, sizing.wanted_len)
    with jax.default_device(device):
        step = programs.get("backbone", TOKENS)
    c, memory, hlo = sizing.model_config, step.memory_analysis(), step.as_text()

    group = c.num_heads // c.num_kv_heads
    launches = -(-group // mosaic_gpu.MAX_GROUP) * c.num_layers
    assert sizing.backend.NAME == "mosaic_gpu", sizing.backend_reason
    assert hlo.count('custom_call_target="mosaic_gpu_v2"') == ATTENTION_CALLS * launches
    assert count_launches(hlo)["custom_calls"] >= ATTENTION_CALLS * launches

    pool_bytes = NUM_BLOCKS * sizing.block_bytes
    assert memory.alias_size_in_bytes == programs.reused_bytes() == pool_bytes + 4 * TOKENS * sizing.wanted_len

    weights = {prod(x.shape) for x in leaves(sizing.params, "weight", "embedding")}
    assert not [line for shape, line in results(entry(hlo), "bf16") if prod(shape) in weights]
    assert memory.temp_size_in_bytes < 2 * max(weights)
