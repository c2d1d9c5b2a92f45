"""Quantised weights and a KV pool of 8 bits in one engine, and checkpoints that bring scales for both."""

import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hf import SIZES, assert_close, save_random_model
from quantized_writers import float_quantized, fp8, gptq, quantize_folder
from safetensors.numpy import load_file, save_file
from test_models import VARIANTS
from test_quantized_checkpoints import CONFIG, TOKENS, is_projection

from fastgen_jax import checkpoint, kernels, models, pretrained
from fastgen_jax.engine import Engine
from fastgen_jax.gpus import GPUS
from fastgen_jax.kernels.fp8 import FP8
from fastgen_jax.kernels.mixed import Chip
from fastgen_jax.params import is_quantized, quantization
from fastgen_jax.quantization import dequantize
from fastgen_jax.sharding import WHOLE, Shards
from fastgen_jax.sizing import Sizing
from fastgen_jax.types import EngineConfig, SamplingParams

KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NAMES = {
    "projection": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "output": "model.layers.{0}.self_attn.{1}_proj.output_scale",
    "attention": "model.layers.{0}.self_attn.{1}_scale",
}
CASES = {"compressed-tensors": float_quantized("tensor"), "fp8": fp8((128, 128)), "gptq": gptq(64)}


@cache
def saved(method: str | None, form: str) -> Path:
    """A checkpoint with scales for its KV cache, its projections quantised by a method or not at all."""
    folder = Path(tempfile.mkdtemp(prefix="quantised-kv-"))
    save_random_model(CONFIG, folder)
    if method is None:
        tensors = load_file(folder / "model.safetensors")
    else:
        tensors, _ = quantize_folder(folder, CASES[method], is_projection)
        config = json.loads((folder / "config.json").read_text())
        if method == "compressed-tensors":
            config["quantization_config"]["kv_cache_scheme"] = KV_SCHEME
        (folder / "config.json").write_text(json.dumps(config))
    for layer in range(CONFIG["num_hidden_layers"]):
        tensors |= {NAMES[form].format(layer, kind): np.float32([scale_of(layer, kind)]) for kind in "kv"}
    save_file(tensors, folder / "model.safetensors")
    return folder


def scale_of(layer: int, kind: str) -> float:
    return 0.01 * (1 + layer) + 0.005 * (kind == "v")


def engine_of(folder: Path, size: int = 1, quantize: str | None = None, **config: Any) -> Engine:
    found = checkpoint.resolve(folder)
    model_config = models.family(found.hf_config["model_type"]).from_hf(found.hf_config)
    shards = Shards.over(jax.devices()[:size]) if size > 1 else WHOLE
    kv_cache_dtype = config.get("kv_cache_dtype", "auto")
    model, params = pretrained.load_model(
        found,
        model_config,
        kernels.get_backend("xla"),
        "float32",
        shards,
        False,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
    )
    return Engine(model, params, **SIZES | config)


def plain(engine: Engine, **config: Any) -> Engine:
    """The same with its matrices dequantised."""
    params = jax.tree.map(
        lambda leaf: dequantize(leaf, "float32") if is_quantized(leaf) else leaf, engine.params, is_leaf=is_quantized
    )
    return Engine(vars(engine)["_runner"].model, params, **SIZES | config)


def logits(engine: Engine) -> np.ndarray:
    """After two prompts, and after another token of each, which reads what is cached."""
    first = engine.put([0, 1], TOKENS.tolist())
    second = engine.put([0, 1], [[5], [9]])
    engine.flush([0, 1])
    return np.concatenate([first, second])


def assert_near(ours: np.ndarray, theirs: np.ndarray) -> None:
    """As near as it can be where a sum in another order rounds a K or V to its neighbour."""
    assert np.abs(ours - theirs).max() < 2e-2 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("method", "form"), [*(("compressed-tensors", form) for form in NAMES), ("fp8", "output"), ("gptq", "attention")]
)
def test_a_checkpoint_brings_both(method, form):
    folder = saved(method, form)
    engine = engine_of(folder, kv_cache_dtype="fp8")
    assert {x.dtype for x in jax.tree.leaves(vars(engine)["_runner"].kv_pool)} == {FP8}
    assert sum(map(is_quantized, jax.tree.leaves(engine.params, is_leaf=is_quantized))) == 2 * 4
    for layer in range(2):
        attention = engine.params["model"][f"layers_{layer}"]["self_attn"]
        assert [float(attention[f"{kind}_scale"]) for kind in "kv"] == pytest.approx(
            [scale_of(layer, kind) for kind in "kv"]
        )
    assert_near(logits(engine), logits(plain(engine, kv_cache_dtype="fp8")))


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_scales_are_left_out_of_a_pool_of_the_models_dtype(method):
    engine = engine_of(saved(method, "output"))
    assert "k_scale" not in engine.params["model"]["layers_0"]["self_attn"]
    assert_close(logits(engine), logits(plain(engine)))


def kv_alone(hf_config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as llm-compressor writes it where it has quantised nothing but the KV cache."""
    scheme = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "format": "dense",
        "quantization_status": "frozen",
        "kv_cache_scheme": KV_SCHEME,
        "ignore": [],
    }
    return hf_config | {"quantization_config": scheme}


def test_a_checkpoint_that_has_its_kv_cache_quantised_alone(tmp_path):
    shutil.copytree(saved(None, "attention"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(kv_alone(CONFIG)))
    expected = engine_of(saved(None, "attention"), kv_cache_dtype="fp8")
    np.testing.assert_array_equal(logits(engine_of(tmp_path, kv_cache_dtype="fp8")), logits(expected))
    engine = engine_of(tmp_path, quantize="int8")  # its weights are as any others
    assert quantization(engine.params) == "int8"
    h200, config = GPUS["h200"], EngineConfig(kv_cache_dtype="fp8", backend="xla")
    assert Sizing(kv_alone(CONFIG), h200, config, tp=1, mem_fraction=0.75).quantization is None


def test_devices_share_both():
    folder = saved("compressed-tensors", "projection")
    assert_near(logits(engine_of(folder, 2, kv_cache_dtype="fp8")), logits(engine_of(folder, kv_cache_dtype="fp8")))


def test_both_are_made_here_of_a_checkpoint_of_16_bits():
    engine = engine_of(saved(None, "projection"), 2, quantize="int4", kv_cache_dtype="fp8")
    one = engine_of(saved(None, "projection"), quantize="int4", kv_cache_dtype="fp8")
    params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    (found,) = one.generate([TOKENS[0].tolist()], params)
    assert len(found.token_ids) == 6 and len(found.prompt_logprobs) == 16
    one.update_params(jax.tree.map(lambda x: x, one.params))
    assert one.generate([TOKENS[0].tolist()], params)[0].token_ids == found.token_ids
    assert np.abs(logits(engine) - logits(one)).max() < 0.3 * np.abs(logits(one)).max()  # groups of other inputs


def test_a_model_that_reads_images_has_the_scales_of_its_language_model(tmp_path):
    save_random_model(VARIANTS["gemma3"], tmp_path)
    tensors, _ = quantize_folder(
        tmp_path, float_quantized("channel"), lambda name: is_projection(name) and "language_model" in name
    )
    prefix = next(name for name in tensors if name.endswith("layers.0.self_attn.k_proj.weight") and "language" in name)
    tensors[prefix.replace("k_proj.weight", "k_scale")] = np.array(0.25, np.float32)
    tensors["vision_tower.vision_model.encoder.layers.0.self_attn.k_scale"] = np.array(7, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    engine = engine_of(tmp_path, kv_cache_dtype="fp8")
    layer = engine.params["model"]["layers_0"]
    assert float(layer["self_attn"]["k_scale"]) == 0.25
    assert is_quantized(layer["mlp"]["down_proj"]["weight"])
    assert_near(logits(engine), logits(plain(engine, kv_cache_dtype="fp8")))


def test_every_matrix_of_an_engine_is_told_the_gpu_wherever_it_comes_from(monkeypatch):
    chip = Chip((8, 0), 108)
    monkeypatch.setattr(Chip, "here", lambda: chip)
    engine = engine_of(saved(None, "projection"), quantize="int8")
    given = jax.tree.map(
        lambda leaf: replace(leaf, chip=None) if is_quantized(leaf) else leaf, engine.params, is_leaf=is_quantized
    )
    other = Engine(vars(engine)["_runner"].model, given, **SIZES)
    other.update_params(given)
    for params in (engine.params, other.params):
        assert {leaf.chip for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)} == {chip}
