"""Whole steps of real models, compiled for GPUs that are not here: what XLA makes of them.

The pool and the token pool are updated in place, no weight is copied, temporaries are activations, and the logits
exist for the sampled rows only. Layers are all alike, so two stand for the rest; one model is compiled whole.
"""

from functools import cache
from math import prod

import jax
import pytest

from fastgen_jax import deviceless
from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.compiler_output import count_launches, entry, exchanged, results
from fastgen_jax.gpus import GPUS
from fastgen_jax.sizing import Sizing, leaves
from fastgen_jax.types import EngineConfig

pytestmark = pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))

NUM_BLOCKS = 200
SAMPLED_ROWS = 16
LAYERS = 2
MODELS = ("llama2-7b", "mistral-7b", "opt-13b", "qwen2.5-0.5b")
STEPS = [
    ("llama2-7b", "h200", 512, 32),
    ("llama2-7b", "h200", 16, LAYERS),
    *[(model, "h200", tokens, LAYERS) for model in MODELS[1:] for tokens in (16, 512)],
    *[(model, "a100-80", 512, LAYERS) for model in MODELS],
]
ATTENTION_CALLS = 3
"""A layer's custom calls: prompt tiles, splits of the decode rows, and their combination."""

ONCE, A_LAYER = 30, 16
"""Kernels that a step may launch. A layer has five matmuls or six (XLA cuts some into two kernels), two pool writes,
three attention kernels and the one that lays out their queries, norms, activation and residuals; once a step come the
embedding, the unpacking of the batch, RoPE's angles, the work lists of the attention kernels and the last rows."""


SHARED_STEPS = [("llama2-13b", "h100", 2, 16), ("llama2-13b", "h100", 2, 512), ("llama2-13b", "a100-80", 2, 512)]


@cache
def programs(model: str, gpu: str, num_layers: int, tp: int = 1, kv_cache_dtype: str = "auto"):
    devices = deviceless.compile_only_devices(GPUS[gpu], tp)
    config = read_config(model) | {"num_hidden_layers": num_layers}
    sizing = Sizing(
        config, GPUS[gpu], EngineConfig(kv_cache_dtype=kv_cache_dtype), tp=tp, mem_fraction=0.75, devices=devices
    )
    return sizing, sizing.programs(NUM_BLOCKS, sizing.wanted_len), devices[0]


@pytest.fixture(autouse=True, scope="module")
def _no_cache_on_disk():
    """JAX writes such programs to its cache and cannot read them back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


def compiled(model: str, gpu: str, num_layers: int, name: str, bucket: int, tp: int = 1, kv_cache_dtype: str = "auto"):
    sizing, steps, device = programs(model, gpu, num_layers, tp, kv_cache_dtype)
    with jax.default_device(device):
        return sizing, steps, steps.get(name, bucket)


def reused_bytes(sizing: Sizing) -> int:
    """By hand, what a step reuses on one device: its part of the pool, and the token pool."""
    return NUM_BLOCKS * sizing.block_bytes + 4 * sizing.max_num_seqs * sizing.wanted_len


def test_a_copy_would_be_seen():
    hlo = """
ENTRY %main (w: bf16[4,8], x: bf16[2,4]) -> bf16[8,4] {
  %w = bf16[4,8]{1,0} parameter(0)
  %view = bf16[32]{0} bitcast(%w)
  %both = (bf16[2,8]{1,0}, /*index=1*/bf16[8,4]{1,0}) fusion(%w, %x), kind=kLoop, calls=%fused
  ROOT %turned = bf16[8,4]{1,0} transpose(%w), dimensions={1,0}
}"""
    assert [shape for shape, _ in results(entry(hlo))] == [(2, 8), (8, 4), (8, 4)]


@pytest.mark.parametrize(("model", "gpu", "tokens", "num_layers"), STEPS)
def test_a_step_copies_neither_pool_nor_weights_and_makes_no_logits(model, gpu, tokens, num_layers):
    sizing, steps, step = compiled(model, gpu, num_layers, "backbone", tokens)
    c, memory, hlo = sizing.model_config, step.memory_analysis(), step.as_text()

    assert memory.alias_size_in_bytes == steps.reused_bytes() == reused_bytes(sizing)

    # 8 MiB, and one array of the widest activation in float32.
    widest = max(2 * c.intermediate_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
    assert memory.temp_size_in_bytes <= (8 << 20) + 4 * tokens * widest
    assert memory.temp_size_in_bytes < 200e6

    weights = {prod(x.shape) for x in leaves(sizing.params, "weight", "embedding")}
    copies = [line for shape, line in results(entry(hlo)) if prod(shape) in weights]
    assert not copies
    assert not [line for shape, line in results(hlo) if c.vocab_size in shape]

    counts = count_launches(hlo)
    assert counts["custom_calls"] == hlo.count('custom_call_target="mosaic_gpu_v2"') == ATTENTION_CALLS * num_layers
    assert counts["kernels"] <= ONCE + A_LAYER * num_layers
    assert counts["copies"] < LAYERS
    assert counts["collectives"] == counts["loops"] == 0


@pytest.mark.parametrize(
    ("gpu", "tokens", "tp"), [("h200", 16, 1), ("h200", 512, 1), ("a100-80", 512, 1), ("h200", 512, 2)]
)
def test_a_pool_of_8_bits_is_written_and_read_in_place_and_never_made_wider(gpu, tokens, tp):
    sizing, steps, step = compiled("llama2-7b", gpu, LAYERS, "backbone", tokens, tp, "fp8")
    c, memory, hlo = sizing.model_config, step.memory_analysis(), step.as_text()
    assert sizing.backend.NAME == "mosaic_gpu"
    wide, *_ = programs("llama2-7b", gpu, LAYERS, tp)
    assert 2 * sizing.block_bytes == wide.block_bytes
    assert memory.alias_size_in_bytes == steps.reused_bytes() == reused_bytes(sizing)
    widest = 2 * c.intermediate_size
    assert memory.temp_size_in_bytes <= (8 << 20) + 4 * tokens * widest
    pool = NUM_BLOCKS * sizing.block_size * (c.num_kv_heads // tp) * c.head_dim
    made = [line for shape, line in results(hlo, "f8e4m3fn") if prod(shape) == pool]
    assert made and not [line for shape, line in results(hlo, r"(?!f8)\w+") if prod(shape) == pool]
    assert count_launches(hlo)["custom_calls"] >= ATTENTION_CALLS * LAYERS


@pytest.mark.parametrize("model", ["llama2-7b", "qwen2.5-0.5b"])  # with a matrix of its own for them, and tied
def test_logits_exist_for_the_sampled_rows_only(model):
    sizing, _, head = compiled(model, "h200", LAYERS, "sample_logprobs", SAMPLED_ROWS)
    vocab_size, hlo = sizing.model_config.vocab_size, head.as_text()
    sizes = {prod(shape) for shape, _ in results(hlo, "f32") if vocab_size in shape}
    assert max(sizes) == SAMPLED_ROWS * vocab_size  # found, and no more than the rows'
    (table,) = {prod(x.shape) for x in leaves(sizing.model.head_params(sizing.params), "weight", "embedding")}
    assert not [line for shape, line in results(entry(hlo)) if prod(shape) >= table]
    # Five times the logits, for sampling, and the splits of the matmul's sum.
    assert head.memory_analysis().temp_size_in_bytes < (16 << 20) + 8 * 4 * SAMPLED_ROWS * vocab_size


@pytest.mark.parametrize(("model", "gpu", "tp", "tokens"), SHARED_STEPS)
def test_a_shared_step_adds_up_twice_a_layer_and_copies_nothing(model, gpu, tp, tokens):
    sizing, steps, step = compiled(model, gpu, LAYERS, "backbone", tokens, tp)
    c, memory, hlo = sizing.model_config, step.memory_analysis(), step.as_text()
    sums = 2 * LAYERS + 1
    assert exchanged(hlo) == {"all-reduce": (sums, sums * tokens * c.hidden_size * 2)}
    assert memory.alias_size_in_bytes == steps.reused_bytes() == reused_bytes(sizing)
    widest = max(2 * c.intermediate_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim) // tp
    # Of a matmul with few columns XLA cuts the sum in four, on an A100.
    assert memory.temp_size_in_bytes <= (8 << 20) + 4 * tokens * max(widest, 4 * c.hidden_size)
    weights = {prod(x.shape) for x in leaves(sizing.params, "weight", "embedding")}
    assert not [line for shape, line in results(entry(hlo)) if prod(shape) in weights]
    assert count_launches(hlo)["custom_calls"] >= ATTENTION_CALLS * LAYERS


def test_logits_of_a_shared_model_are_nowhere_together():
    tp = 2
    sizing, _, head = compiled("llama2-13b", "h100", LAYERS, "sample_logprobs", SAMPLED_ROWS, tp)
    vocab_size, hlo = sizing.model_config.vocab_size, head.as_text()
    found = exchanged(hlo)
    assert found.pop("all-to-all") == (1, SAMPLED_ROWS * vocab_size // tp * 4)
    assert set(found) == {"all-gather"} and found["all-gather"][1] < 16_000  # tokens and their log-probabilities
    assert max(prod(s) for s, _ in results(hlo, "f32") if vocab_size in s) == SAMPLED_ROWS * vocab_size // tp
