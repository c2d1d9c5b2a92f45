"""An engine whose KV pool has 8 bits a number: the same promises, over K and V that are rounded once."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf import LLAMA, save_random_model
from safetensors.numpy import load_file, save_file
from tiny import HF_CONFIG, VOCAB_SIZE, tiny_engine, tiny_model, tiny_params

from fastgen_jax import SamplingParams, checkpoint, kernels, kv_pool, pretrained
from fastgen_jax.compile_guard import forbid_compile
from fastgen_jax.engine import Engine
from fastgen_jax.kernels.fp8 import FP8
from fastgen_jax.models import family
from fastgen_jax.sharding import Shards
from fastgen_jax.types import EngineConfig

NUM_TOKENS = 12
SIZES = {
    "block_size": 16,
    "num_blocks": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "warm_up": False,
    "show_progress": False,
}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


PROMPTS = prompts(10)


def tokens(engine: Engine, given: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(response.token_ids) for response in engine.generate(given, GREEDY)]


def with_scales(params: dict) -> dict:
    """Params with other scales for each layer's K and V."""
    scales = {
        (layer, name): 0.5 + 0.3 * layer + 0.1 * len(name) for layer in range(2) for name in ("k_scale", "v_scale")
    }
    return checkpoint.with_kv_scales(params, scales, jnp.float32)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One prompt at a time, whole, by the reference backend."""
    engine = tiny_engine(backend="reference", max_num_batched_tokens=64, kv_cache_dtype="fp8", prefix_caching=False)
    return [tokens(engine, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 64, "overlap": False},
        {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 64, "num_blocks": 20},
        {"num_blocks": 11, "block_size": 8},
        {"prefix_caching": False},
    ],
)
def test_tokens_are_the_same_for_every_batch_chunk_loop_and_memory(expected, config):
    engine = tiny_engine(kv_cache_dtype="fp8", **config)
    assert tokens(engine) == expected
    assert engine.stats().preemptions >= 3 or engine.stats().blocks > 10
    assert tokens(engine, PROMPTS[::-1]) == expected[::-1]


def test_the_pool_holds_twice_what_16_bits_do_and_is_what_attention_reads(expected):
    engine, exact = tiny_engine(kv_cache_dtype="fp8"), tiny_engine()
    pool, wide = (jax.tree.leaves(vars(e)["_runner"].kv_pool) for e in (engine, exact))
    assert {x.dtype.name for x in pool} == {"float8_e4m3fn"}
    assert sum(x.nbytes for x in wide) == 4 * sum(x.nbytes for x in pool)
    model = tiny_model()
    assert kv_pool.block_bytes(model, 16, jnp.bfloat16) == 2 * kv_pool.block_bytes(model, 16, FP8)
    assert tokens(exact) != expected  # rounding is seen in a model of random weights


def test_a_cached_prefix_gives_the_tokens_of_one_that_is_computed(expected):
    engine = tiny_engine(kv_cache_dtype="fp8")
    long = [[5 + i % 90 for i in range(50)] + [tail] for tail in range(3, 9)]
    fresh = tokens(tiny_engine(kv_cache_dtype="fp8", prefix_caching=False), long)
    assert tokens(engine, long) == fresh
    assert tokens(engine, long) == fresh
    assert engine.stats().cached_tokens


def test_scales_change_what_is_rounded_and_update_params_swaps_them():
    engine = Engine(tiny_model(), with_scales(tiny_params()), None, kv_cache_dtype="fp8", eos_token_ids=(2,), **SIZES)
    first = engine.put([0], [PROMPTS[1]])
    engine.flush([0])
    plain = tiny_engine(kv_cache_dtype="fp8", max_num_batched_tokens=64)
    assert np.abs(first - plain.put([0], [PROMPTS[1]])).max() > 1e-4
    again = jax.tree.map(lambda x: x if x.ndim else jnp.ones_like(x), with_scales(tiny_params()))
    with forbid_compile():
        engine.update_params(again)
        ones = engine.put([0], [PROMPTS[1]])
    plain.flush([0])
    np.testing.assert_array_equal(ones, plain.put([0], [PROMPTS[1]]))


def test_scales_mean_nothing_to_a_pool_of_the_models_dtype():
    engine = Engine(tiny_model(), with_scales(tiny_params()), None, eos_token_ids=(2,), **SIZES)
    np.testing.assert_array_equal(engine.put([0], [PROMPTS[0]]), tiny_engine(**SIZES).put([0], [PROMPTS[0]]))


def test_layers_with_scales_are_lowered_once():
    engine = Engine(tiny_model(), with_scales(tiny_params()), None, kv_cache_dtype="fp8", eos_token_ids=(2,), **SIZES)
    lowered = vars(engine)["_runner"].programs.lower("backbone", 16).as_text()
    assert lowered.count("func.func private @_apply") == 1


def test_no_pool_is_widened_to_be_written_or_read():
    """XLA:CPU would do both in float16, and take ten times as long."""
    engine = tiny_engine(kv_cache_dtype="fp8", num_blocks=777)
    program = vars(engine)["_runner"].programs.get("backbone", 1).as_text()
    assert "f8e4m3fn[777," in program
    assert "16[777," not in program and "f32[777," not in program


def test_nothing_compiles_after_the_warm_up():
    engine = tiny_engine(kv_cache_dtype="fp8", warm_up=True, num_blocks=24)
    with forbid_compile():
        tokens(engine, prompts(20, seed=3))
    assert engine.stats().compiled_after_warm_up == 0


@pytest.mark.parametrize("value", ["int8", "", None, "bfloat16"])
def test_another_dtype_is_refused_with_the_ones_there_are(value):
    with pytest.raises(ValueError) as error:
        EngineConfig(kv_cache_dtype=value)
    assert str(error.value) == f"kv_cache_dtype={value!r} is not supported; choose auto, fp8"


NAMES = {
    "projection": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "attention": "model.layers.{0}.self_attn.{1}_scale",
    "attn": "model.layers.{0}.self_attn.attn.{1}_scale",
}
SHAPES = {"projection": (1,), "attention": (), "attn": (1,)}


def save_with_scales(folder, form: str, change: dict | None = None) -> dict[str, np.ndarray]:
    """A random Llama whose checkpoint has scales, `change`d; returned are these."""
    save_random_model(LLAMA, folder)
    path = folder / "model.safetensors"
    scales = {
        NAMES[form].format(layer, kind): np.full(SHAPES[form], 0.25 + layer + (kind == "v") / 8, np.float32)
        for layer in range(LLAMA["num_hidden_layers"])
        for kind in "kv"
    } | (change or {})
    save_file(load_file(path) | scales, path, {"format": "pt"})
    return scales


def load(folder, kv_cache_dtype: str, size: int = 1):
    found = checkpoint.resolve(folder)
    config = family("llama").from_hf(found.hf_config)
    shards = Shards.over(jax.devices()[:size])
    backend = kernels.get_backend("xla")
    return pretrained.load_model(found, config, backend, "float32", shards, False, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("form", NAMES)
def test_scales_come_from_the_checkpoint_under_each_of_their_names(tmp_path, form):
    save_with_scales(tmp_path, form)
    _, params = load(tmp_path, "fp8")
    for layer in range(LLAMA["num_hidden_layers"]):
        attention = params["model"][f"layers_{layer}"]["self_attn"]
        assert (float(attention["k_scale"]), float(attention["v_scale"])) == (0.25 + layer, 0.375 + layer)
        assert attention["k_scale"].shape == ()
    _, ignored = load(tmp_path, "auto")
    assert "k_scale" not in ignored["model"]["layers_0"]["self_attn"]


def test_two_devices_give_the_logits_of_one_with_the_checkpoints_scales(tmp_path):
    save_with_scales(tmp_path, "projection")

    def logits(size: int) -> np.ndarray:
        model, params = load(tmp_path, "fp8", size)
        engine = Engine(model, params, None, kv_cache_dtype="fp8", eos_token_ids=(), **SIZES | {"max_model_len": 64})
        pool = jax.tree.leaves(vars(engine)["_runner"].kv_pool)[0]
        assert pool.dtype == FP8 and len(pool.sharding.device_set) == size
        found = engine.put([0, 1], [list(range(3, 30)), [7]])
        return np.concatenate([found, engine.put([0, 1], [[5], [9]])])

    one, two = logits(1), logits(2)
    # A sum in another order may round one K or V to its neighbour, and with it all that follows a little.
    assert np.abs(one - two).max() < 2e-2 * np.abs(one).max()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.ones(8, np.float32), "has shape (8,); a layer's scale of its KV cache is one number"),
        (np.float32([0]), "is 0.0; a scale is more than 0"),
        (np.float32([np.nan]), "is nan; a scale is more than 0"),
    ],
)
def test_a_scale_that_is_none_is_refused_by_its_name(tmp_path, value, sentence):
    name = "model.layers.1.self_attn.v_proj.v_scale"
    save_with_scales(tmp_path, "projection", {name: value})
    with pytest.raises(ValueError) as error:
        load(tmp_path, "fp8")
    assert str(error.value) == f"tensor {name!r} {sentence}"
    load(tmp_path, "auto")


def test_an_engine_of_a_checkpoint_has_its_scales(tmp_path):
    assert HF_CONFIG["model_type"] == LLAMA["model_type"]
    save_with_scales(tmp_path, "attn")
    model, params = load(tmp_path, "fp8")
    engine = Engine(model, params, None, kv_cache_dtype="fp8", eos_token_ids=(), **SIZES | {"max_model_len": 64})
    bare, weights = load(tmp_path, "auto")
    other = Engine(bare, weights, None, kv_cache_dtype="fp8", eos_token_ids=(), **SIZES | {"max_model_len": 64})
    assert np.abs(engine.put([0], [[5, 6, 7]]) - other.put([0], [[5, 6, 7]])).max() > 0
