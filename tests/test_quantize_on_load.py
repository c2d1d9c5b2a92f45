"""`quantization=`: weights quantised while they are loaded, by hand arithmetic, in every kind of family."""

import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hf import SIZES, assert_close, save_random_model
from quantized_writers import gptq
from test_models import VARIANTS
from test_quantized_checkpoints import CASES, CONFIG, is_projection, matrices, ours, quantized, theirs

from fastgen_jax import checkpoint, kernels, models, pretrained
from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.checkpoint.host_matrix import HostMatrix, quantize, to_e4m3
from fastgen_jax.engine import Engine
from fastgen_jax.gpus import GPUS
from fastgen_jax.quantization import QuantizedMatrix, dequantize
from fastgen_jax.schemes import on_load
from fastgen_jax.sharding import WHOLE, Shards
from fastgen_jax.sizing import Sizing, num_bytes
from fastgen_jax.types import QUANTIZATIONS, EngineConfig, SamplingParams

# Of matrices


def rounded(kind: str, w: np.ndarray, group: int) -> np.ndarray:
    """A weight [out, in] after quantising it in groups of inputs: to nearest, in float64."""
    w = w.astype(float).reshape(len(w), -1, group)
    if kind == "int4":
        low = np.minimum(w.min(2, keepdims=True), 0)
        scale = ((np.maximum(w.max(2, keepdims=True), 0) - low) / 15).astype(np.float32).astype(float)
        zero = np.round(-low / scale)
        w = (np.clip(np.round(w / scale) + zero, 0, 15) - zero) * scale
    else:
        scale = np.abs(w).max(2, keepdims=True) / (127 if kind == "int8" else 448)
        w = (
            np.round(w / scale) if kind == "int8" else (w / scale).astype(ml_dtypes.float8_e4m3fn).astype(float)
        ) * scale
    return w.reshape(len(w), -1).astype(np.float32)


def quantize_one(kind: str, w: np.ndarray) -> QuantizedMatrix:
    out = HostMatrix.empty(on_load(kind, w.shape[1], "float32"), w.shape)
    quantize(w.copy(), out)
    return out.packed()


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 64), (96, 32), (80, 16), (50, 50)])
def test_a_matrix_is_rounded_to_the_nearest(kind, inputs, group):
    w = np.random.default_rng(0).normal(size=(24, inputs)).astype(np.float32)
    w[3] = 0
    w[4] = np.abs(w[4])
    matrix = quantize_one(kind, w)
    expected = rounded(kind, w + (w == 0) * 1e-9, group if kind == "int4" else inputs)
    assert matrix.scales.shape == (24, inputs // group if kind == "int4" else 1)
    np.testing.assert_allclose(dequantize(jax.tree.map(jnp.asarray, matrix), "float32"), expected, atol=1e-5)


def test_fp8_is_ml_dtypes_own_rounding():
    rng = np.random.default_rng(0)
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    between = (every[1:] + every[:-1]) / 2
    x = np.concatenate((every, between, rng.normal(size=9999) * 99, rng.normal(size=9999) / 99)).astype(np.float32)
    x = np.clip(x, -448, 448)
    np.testing.assert_array_equal(to_e4m3(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_int4_wants_an_even_number_of_inputs():
    with pytest.raises(ValueError, match="quantization='int4' stores two inputs in a byte, and a matrix has 33"):
        on_load("int4", 33, "bfloat16")


# Of models


FAMILIES = ("gpt2", "gpt_neox", "phi3", "opt, narrow embeddings", "gemma2", "falcon")


@cache
def saved(name: str) -> tuple[Path, Any]:
    folder = Path(tempfile.mkdtemp(prefix="to-quantise-"))
    return folder, save_random_model(CONFIG if name == "llama" else VARIANTS[name], folder)


@pytest.fixture(scope="module", autouse=True)
def drop() -> Iterator[None]:
    yield
    saved.cache_clear()


def load(folder: Path, kind: str | None, shards: Shards = WHOLE, dtype: str = "float32") -> Engine:
    found = checkpoint.resolve(folder)
    config = models.family(found.hf_config["model_type"]).from_hf(found.hf_config)
    model, params = pretrained.load_model(
        found, config, kernels.get_backend("xla"), dtype, shards, False, quantize=kind
    )
    return Engine(model, params, **SIZES)


def meant(model: Any, kind: str, size: int = 1) -> Any:
    """transformers' model with the weights of its projections rounded; of `size` devices, each its own inputs."""
    state = model.state_dict()
    for name in filter(is_projection, state):
        w = state[name].numpy()
        local = w.shape[1] // (size if name.split(".")[-2] in ("o_proj", "down_proj") else 1)
        group = next(size for size in (128, 64) if local % size == 0)
        state[name] = torch.tensor(rounded(kind, w, group if kind == "int4" else local))
    copy = type(model)(model.config).eval()
    copy.load_state_dict(state)
    return copy


@pytest.mark.parametrize(("kind", "size"), [("int8", 1), ("fp8", 1), ("int4", 1), ("int8", 2), ("fp8", 2), ("int4", 2)])
def test_logits_are_those_of_the_rounded_weights(kind, size):
    folder, model = saved("llama")
    engine = load(folder, kind, Shards.over(jax.devices()[:size]))
    assert {matrix.kind for matrix in matrices(engine).values()} == {kind}
    logits, expected = ours(engine), theirs(meant(model, kind, size))
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_a_checkpoint_is_quantised(family, kind):
    """The logits are those of the same engine with the matrices dequantised: every projection, and nothing else."""
    engine = load(saved(family)[0], kind)
    plain = load(saved(family)[0], None)
    is_matrix = lambda leaf: isinstance(leaf, QuantizedMatrix)  # noqa: E731
    params = jax.tree.map(
        lambda leaf: dequantize(leaf, "float32") if is_matrix(leaf) else leaf, engine.params, is_leaf=is_matrix
    )
    expected = re.compile(r"(qkv|o|out|up|gate_up|down)_proj'\]|fc[12]'\]")
    names = set(matrices(engine))
    assert names and all(expected.search(path) for path in names)
    leaves = jax.tree_util.tree_leaves_with_path(plain.params)
    assert names == {
        name for path, leaf in leaves if leaf.ndim == 2 and expected.search(name := jax.tree_util.keystr(path))
    }
    for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(plain.params), strict=True):
        assert np.abs(new - old).max() <= 0.3 * np.abs(old).max()
    plain.update_params(params)
    assert_close(ours(engine), ours(plain))


def test_tokens_are_those_of_a_step_however_it_is_cut():
    engine = load(saved("llama")[0], "int8")
    prompts = [[5, 6, 7], list(range(20)), [9] * 40]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    together = [r.token_ids for r in engine.generate(prompts, params)]
    assert together == [engine.generate([prompt], params)[0].token_ids for prompt in prompts]


def test_a_scale_of_each_output_has_32_bits_where_the_rest_has_16():
    engine = load(saved("llama")[0], "int8", dtype="bfloat16")
    assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].finish_reason == "length"
    assert {leaf.scales.dtype for leaf in matrices(engine).values()} == {jnp.dtype("float32")}


def test_weights_are_swapped_for_weights_that_are_quantised_alike():
    engine = load(saved("llama")[0], "int8")
    before = ours(engine)
    engine.update_params(jax.tree.map(lambda x: x, engine.params))
    np.testing.assert_array_equal(ours(engine), before)
    with pytest.raises(ValueError, match=r"the new params .*\['weight'\]"):
        engine.update_params(load(saved("llama")[0], None).params)
    with pytest.raises(ValueError, match=r"weight'\].values is float8_e4m3fn\[256, 384\]; it must be int8"):
        engine.update_params(load(saved("llama")[0], "fp8").params)


# Bad input


def test_an_unknown_kind_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="quantization='int3' is not known; choose int8, int4, fp8"):
        EngineConfig(quantization="int3")


def test_a_checkpoint_is_not_quantised_twice():
    with pytest.raises(
        ValueError, match=r"quantization='int8' is for a checkpoint that is not quantised, and this one is \(gptq\)"
    ):
        load(quantized("gptq, g128")[0], "int8")


def test_params_that_are_there_are_not_quantised():
    folder, _ = saved("llama")
    engine = load(folder, "int8")
    model = engine._runner.model
    assert Engine(model, engine.params, **SIZES, quantization="int8").config.quantization == "int8"
    with pytest.raises(ValueError, match="quantization='fp8' does not fit params of int8; load them so"):
        Engine(model, engine.params, **SIZES, quantization="fp8")
    with pytest.raises(ValueError, match="quantization='int8' does not fit params of float32; load them so"):
        Engine(model, load(folder, None).params, **SIZES, quantization="int8")


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ValueError, match=r"a mixture of experts cannot be quantised \(int8\); its experts are held in"):
        load(saved("mixtral")[0], "int8")


# Plans


def planned(hf_config: dict[str, Any], size: int = 1, **config: Any) -> Sizing:
    return Sizing(hf_config, GPUS["h200"], EngineConfig(**config), tp=size, mem_fraction=0.75)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_knows_a_quantised_checkpoint_by_its_config(name):
    folder, *_ = quantized(name)
    found = planned(checkpoint.resolve(folder).hf_config, dtype="float32", backend="xla")
    assert found.weights_bytes == num_bytes(load(folder, None).params)
    assert found.quantization == CASES[name][1]


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_plan_knows_what_is_quantised_on_load(kind):
    folder, _ = saved("llama")
    found = planned(checkpoint.resolve(folder).hf_config, dtype="float32", backend="xla", quantization=kind)
    assert found.weights_bytes == num_bytes(load(folder, kind).params)


def test_the_bytes_of_70b_in_int4_by_hand():
    """Llama-2-70B: 80 layers, embed 8192, MLP 28672, 64 heads and 8 KV heads of 128; table and head of 32,000 rows."""
    found = planned(read_config("llama2-70b"), quantization="int4")
    projections = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672)
    rest = 2 * 32000 * 8192 + (2 * 80 + 1) * 8192
    # Half a byte, and for 128 inputs a scale in 16 bits and a zero in 8.
    assert found.weights_bytes == projections // 2 + 3 * projections // 128 + 2 * rest
    assert found.work.layer_params == projections
    assert found.work.weights_bytes == found.weights_bytes - 2 * 32000 * 8192
    shared = planned(read_config("llama2-70b"), 2, quantization="int4")
    assert shared.weights_bytes == pytest.approx(found.weights_bytes / 2, rel=0.01)


def test_a_plan_refuses_what_loading_would():
    config = read_config("llama2-7b")
    gptq_config = config | {"quantization_config": gptq(128).config}
    with pytest.raises(ValueError, match=r"quantization='int8' is for a checkpoint that is not quantised"):
        planned(gptq_config, quantization="int8")
    with pytest.raises(ValueError, match=r"a mixture of experts cannot be quantised \(int4\)"):
        planned(read_config("mixtral-8x7b"), quantization="int4")
    with pytest.raises(ValueError, match=r"tensor_parallel=4 cuts the 11008 inputs of .* groups of 128; .* 1, 2$"):
        planned(gptq_config, 4)
    assert planned(gptq_config, 2).quantization == "int4"
    with pytest.raises(ValueError, match="quant_method='bitsandbytes' of this checkpoint is not supported"):
        planned(config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
