"""Quantised checkpoints: the logits are those of the weights that they mean, in transformers' float32 model."""

import json
import tempfile
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hf import LLAMA, assert_close, load_engine, save_random_model
from quantized_writers import (
    Case,
    awq,
    compressed,
    float_quantized,
    fp8,
    gptq,
    int_quantized,
    pack_quantized,
    quantize_folder,
)
from safetensors.numpy import save_file

from fastgen_jax.engine import Engine
from fastgen_jax.params import leaves_with_path
from fastgen_jax.quantization import QuantizedMatrix
from fastgen_jax.sharding import WHOLE, Shards
from fastgen_jax.types import SamplingParams

CONFIG = LLAMA | {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
BLOCKS = compressed(
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 160]},
    fp8((48, 160), "weight_scale").write,
    format="float-quantized",
)
CASES: dict[str, tuple[Case, str]] = {
    "gptq, g128": (gptq(128), "int4"),
    "gptq, g64, symmetric": (gptq(64, symmetric=True), "int4"),
    "gptq, g32, v2": (gptq(32, version="gptq_v2"), "int4"),
    "gptq, one group": (gptq(-1), "int4"),
    "gptq, 8 bits": (gptq(128, bits=8, symmetric=True), "int8"),
    "awq, g128": (awq(128), "int4"),
    "awq, g64": (awq(64), "int4"),
    "awq, g32": (awq(32), "int4"),
    "awq, one group": (awq(-1), "int4"),
    "int-quantized, channel": (int_quantized("channel"), "int8"),
    "int-quantized, tensor": (int_quantized("tensor"), "int8"),
    "int-quantized, asymmetric": (int_quantized("channel", symmetric=False), "int8"),
    "pack-quantized, g128": (pack_quantized(4, 128), "int4"),
    "pack-quantized, g32, asymmetric": (pack_quantized(4, 32, symmetric=False), "int4"),
    "pack-quantized, 8 bits": (pack_quantized(8, -1), "int8"),
    "float-quantized, channel": (float_quantized("channel"), "fp8"),
    "float-quantized, tensor": (float_quantized("tensor"), "fp8"),
    "float-quantized, blocks": (BLOCKS, "fp8"),
    "fp8, blocks": (fp8((128, 128)), "fp8"),
    "fp8, blocks that do not divide": (fp8((48, 160)), "fp8"),
    "fp8, tensor": (fp8(None), "fp8"),
    "fp8, tensor, by its other name": (fp8(None, "weight_scale"), "fp8"),
}
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 16))
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


@cache
def quantized(name: str, family: str = "llama") -> tuple[Path, Any, dict[str, np.ndarray]]:
    """A checkpoint, transformers' model with the float32 weights that it means, and its tensors."""
    return write(CASES[name][0], FAMILIES[family])


def write(case: Case, config: dict[str, Any]) -> tuple[Path, Any, dict[str, np.ndarray]]:
    folder = Path(tempfile.mkdtemp(prefix="quantised-"))
    model = save_random_model(config, folder)
    stored, means = quantize_folder(folder, case, is_projection)
    model.load_state_dict({name: torch.tensor(tensor) for name, tensor in means.items()}, strict=False)
    return folder, model, stored


FAMILIES = {
    "llama": CONFIG,
    "qwen2, tied": CONFIG | {"model_type": "qwen2", "tie_word_embeddings": True},
    "phi3": CONFIG | {"model_type": "phi3", "pad_token_id": 0},
}


@lru_cache(maxsize=4)
def engine_of(name: str, family: str = "llama", size: int = 1) -> Engine:
    folder, *_ = quantized(name, family)
    return load_engine(folder, Shards.over(jax.devices()[:size]) if size > 1 else WHOLE)


@pytest.fixture(scope="module", autouse=True)
def drop() -> Iterator[None]:
    yield
    engine_of.cache_clear()
    quantized.cache_clear()


def ours(engine: Engine) -> np.ndarray:
    """Logits after each of two sequences."""
    logits = engine.put([0, 1], TOKENS.tolist())
    engine.flush([0, 1])
    return logits


def theirs(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits[:, -1].numpy()


def matrices(engine: Engine) -> dict[str, QuantizedMatrix]:
    found = leaves_with_path(engine.params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found if isinstance(leaf, QuantizedMatrix)}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_weights_that_a_checkpoint_means(name):
    engine = engine_of(name)
    found = matrices(engine)
    assert len(found) == 2 * 4  # qkv, o, gate_up and down of two layers
    assert {matrix.kind for matrix in found.values()} == {CASES[name][1]}
    assert_close(ours(engine), theirs(quantized(name)[1]))


@pytest.mark.parametrize("family", ["qwen2, tied", "phi3"])
@pytest.mark.parametrize("name", ["gptq, g64, symmetric", "awq, g64", "int-quantized, channel", "fp8, blocks"])
def test_biases_ties_and_fused_checkpoints(name, family):
    assert_close(ours(engine_of(name, family)), theirs(quantized(name, family)[1]))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        *("gptq, g32, v2", "gptq, one group", "awq, g32", "int-quantized, asymmetric"),
        *("pack-quantized, g32, asymmetric", "float-quantized, tensor", "fp8, blocks that do not divide"),
    ],
)
def test_devices_that_share_a_quantised_model(name, size):
    shared = engine_of(name, size=size)
    assert_close(ours(shared), ours(engine_of(name)))
    whole, local = matrices(engine_of(name)), matrices(shared)
    for path, matrix in local.items():
        held = {shard.data.nbytes for shard in matrix.values.addressable_shards}
        assert held == {whole[path].values.nbytes // size}


def test_a_shard_that_would_cut_a_group_is_refused_with_the_sizes_that_would_do():
    sentence = r"tensor_parallel=4 cuts the 384 inputs of 'model.layers.0.mlp.down_proj.weight' within groups of 64; "
    with pytest.raises(ValueError, match=sentence + r"for whole groups it can be 1, 2$"):
        engine_of("awq, g64", size=4)


def test_old_files_beside_config_json_say_how_it_is_quantised():
    for name, file in (("gptq, g64, symmetric", "quantize_config.json"), ("awq, g64", "quant_config.json")):
        folder, model, _ = write(CASES[name][0], CONFIG)
        config = json.loads((folder / "config.json").read_text())
        old = config.pop("quantization_config")
        del old["quant_method"]
        if file == "quant_config.json":
            old = {"zero_point": True, "q_group_size": old["group_size"], "w_bit": 4, "version": "GEMM"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / file).write_text(json.dumps(old))
        assert_close(ours(load_engine(folder)), theirs(model))


def test_a_quantised_head_and_modules_that_are_not_converted():
    """The checkpoint says what is quantised; here the head is, and one layer is not."""
    folder = Path(tempfile.mkdtemp(prefix="quantised-"))
    config = CONFIG | {"vocab_size": 104}
    model = save_random_model(config, folder)
    case = int_quantized("channel")
    case.config["ignore"] = ["re:.*layers\\.0\\..*"]
    _, means = quantize_folder(
        folder, case, lambda name: name == "lm_head.weight" or (is_projection(name) and ".1." in name)
    )
    model.load_state_dict({name: torch.tensor(tensor) for name, tensor in means.items()})
    engine = load_engine(folder)
    assert {path.split("']['")[1] for path in matrices(engine)} == {"weight']", "layers_1"}
    assert_close(ours(engine), theirs(model))
    assert_close(ours(load_engine(folder, Shards.over(jax.devices()[:2]))), theirs(model))


# Bad input


def test_a_quantised_head_of_a_model_that_is_tied_is_refused():
    folder = Path(tempfile.mkdtemp(prefix="quantised-"))
    save_random_model(CONFIG | {"vocab_size": 104}, folder)
    quantize_folder(folder, gptq(64), lambda name: name == "lm_head.weight")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"ties the output weights to the embedding, but tensor 'lm_head.weight' is"):
        load_engine(folder)


def change(name: str, **edits: Any) -> Path:
    """The checkpoint of a case with fields of its quantization_config changed, and tensors: None takes one away."""
    folder, _, stored = quantized(name)
    other = Path(tempfile.mkdtemp(prefix="damaged-"))
    config = json.loads((folder / "config.json").read_text())
    fields = {key: value for key, value in edits.items() if "." not in key}
    config["quantization_config"] = {**config["quantization_config"], **fields}
    (other / "config.json").write_text(json.dumps(config))
    tensors = dict(stored)
    for key, value in edits.items():
        if "." in key:
            tensors.pop(PREFIX + key)
            tensors |= {} if value is None else {PREFIX + key: value}
    save_file(tensors, other / "model.safetensors")
    return other


PREFIX = "model.layers.1.mlp."


def group(**fields: Any) -> dict[str, Any]:
    """A group of int8 weights in compressed-tensors' config, with other fields."""
    return {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}} | fields}


@pytest.mark.parametrize(
    ("name", "edits", "sentence"),
    [
        (
            "gptq, g128",
            {"group_size": 64},
            r"scales' has shape \(3, 256\); with group_size=64 and 384 inputs it must have \(6",
        ),
        ("gptq, g128", {"group_size": 80}, "group_size=80 does not divide the 384 inputs of 'model.layers.0.mlp"),
        ("gptq, g128", {"group_size": "all"}, "group_size='all' of this gptq-quantised model must be a multiple of 8"),
        ("gptq, g128", {"bits": 3}, "bits=3 of this gptq-quantised model is not supported, only 4 or 8"),
        ("gptq, g128", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' .* must be 'gptq' or 'gptq_v2'"),
        (
            "gptq, g128",
            {"new_field": 1},
            "config.json of this gptq-quantised model has unsupported fields: new_field",
        ),
        (
            "gptq, g128",
            {"down_proj.scales": None},
            "lacks tensor 'model.layers.1.mlp.down_proj.scales', which the quant",
        ),
        (
            "gptq, g128",
            {"down_proj.qzeros": None},
            "lacks tensor 'model.layers.1.mlp.down_proj.qzeros', which",
        ),
        (
            "gptq, g128",
            {"down_proj.g_idx": np.random.default_rng(0).permutation(np.arange(384, dtype=np.int32) // 128)},
            r"'model.layers.1.mlp.down_proj.g_idx' deals the inputs out .* \(desc_act, actorder\), which is not",
        ),
        ("gptq, g128", {"sym": True}, r"qzeros' has zeros that are not 8, as they are where sym is true"),
        (
            "gptq, g128",
            {"down_proj.qweight": np.zeros((48, 256), np.float32)},
            "qweight' is stored as F32; this format has it as I32",
        ),
        (
            "gptq, g128",
            {"down_proj.qweight": np.zeros((48, 128), np.int32)},
            r"down_proj.scales' has shape \(3, 256\); .* it must have \(3, 128\)",
        ),
        ("awq, g128", {"version": "gemv"}, "version='gemv' of this awq-quantised model is not supported, only 'gemm'"),
        ("awq, g128", {"down_proj.scales": None}, "lacks tensor 'model.layers.1.mlp.down_proj.scales'"),
        (
            "float-quantized, channel",
            {"down_proj.weight_scale": None},
            "lacks tensor 'model.layers.1.mlp.down_proj.weight_scale', which the quantised",
        ),
        ("fp8, blocks", {"down_proj.weight_scale_inv": None}, "lacks tensor '.*down_proj.weight_scale_inv', which the"),
        (
            "fp8, blocks",
            {"weight_block_size": [64, 64]},
            r"weight_scale_inv' has shape \(2, 3\); in blocks of 64 by 64 it must have \(4, 6\)",
        ),
        ("fp8, blocks", {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' of this fp8-quantised model is not supported"),
        ("int-quantized, channel", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config=.* not supp"),
        (
            "int-quantized, channel",
            {"format": "marlin-24"},
            "format='marlin-24' .* is not supported, only",
        ),
        (
            "int-quantized, channel",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 2, "type": "int"}}}},
            "config_groups.g of this .* has weights .*'num_bits': 2.* it can have int of 4 or 8 bits, or",
        ),
        ("int-quantized, channel", {"config_groups": {}}, "is quantised, and no group of quantization_config has it"),
        (
            "gptq, g128",
            {"quant_method": "bitsandbytes"},
            "quant_method='bitsandbytes' of this checkpoint is not supported; the methods are awq, compressed-tensors",
        ),
        ("gptq, g128", {"quant_method": None, "load_in_4bit": True}, "quant_method='bitsandbytes' of this checkpoint"),
        ("gptq, g128", {"quant_method": ["gptq"]}, r"quant_method=.* of this checkpoint is not supported; the methods"),
        ("gptq, g128", {"bits": 4.0}, "bits=4.0 of this gptq-quantised model must be a whole number from 1"),
        (
            "awq, g128",
            {"q_group_size": "128"},
            "q_group_size='128' of this awq-quantised model must be a multiple of 8",
        ),
        ("awq, g128", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' .* a list of strings"),
        (
            "fp8, blocks",
            {"weight_block_size": 128},
            "weight_block_size=128 of this fp8-quantised model must be two num",
        ),
        (
            "int-quantized, channel",
            {"config_groups": [1]},
            r"config_groups=\[1\] of this .* must be an object of objects",
        ),
        (
            "int-quantized, channel",
            {"config_groups": group(targets=None)},
            "no group of quantization_config has it among",
        ),
        ("int-quantized, channel", {"config_groups": group(targets="Linear")}, "targets='Linear' .* a list of strings"),
        (
            "int-quantized, channel",
            {"config_groups": group(weights="int8")},
            "has weights 'int8'; it can have int of 4",
        ),
        (
            "int-quantized, channel",
            {"config_groups": group(weights={"strategy": "group", "group_size": "128"})},
            "config_groups.g of this .* has group_size='128'; by group, it must be a whole number from 1",
        ),
        (
            "int-quantized, channel",
            {"config_groups": group(weights={"strategy": "block"})},
            "config_groups.g of this .* has weights by block and lacks block_structure",
        ),
        (
            "gptq, g128",
            {"down_proj.qweight": np.zeros(48, np.int32)},
            r"down_proj.qweight' has shape \(48,\); it must be a matrix",
        ),
        (
            "pack-quantized, g128",
            {"down_proj.weight_shape": np.array([256])},
            r"down_proj.weight_shape' has shape \(1,\); for outputs and inputs it must have \(2,\)",
        ),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(name, edits, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_engine(change(name, **edits))


@pytest.mark.parametrize("value", ["gptq", ["gptq"], 4])
def test_what_a_quantization_config_is_if_it_is_no_object(value):
    folder = change("gptq, g128")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": value}))
    with pytest.raises(ValueError, match=r"quantization_config is .*; it must be an object"):
        load_engine(folder)


def test_a_file_beside_config_json_that_is_damaged_is_named():
    folder = change("gptq, g128")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    for text, sentence in (("{", "is not valid JSON"), ("[]", "holds a JSON list, not an object")):
        (folder / "quantize_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"quantize_config.json {sentence}"):
            load_engine(folder)


def test_a_checkpoint_that_does_not_say_how_it_is_quantised():
    folder = change("int-quantized, channel")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"stored as I8; only .* unless config.json has a quantization_config that"):
        load_engine(folder)


def test_parts_of_one_matrix_are_quantised_alike():
    folder, _, tensors = write(int_quantized("channel"), CONFIG)
    scale = tensors.pop("model.layers.0.self_attn.k_proj.weight_scale").astype(np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"] * scale
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj.weight' and .*k_proj.weight' make up one matrix and are not"):
        load_engine(folder)


def test_families_whose_weights_lie_the_other_way_are_refused():
    gpt2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 64}
    folder = Path(tempfile.mkdtemp(prefix="quantised-"))
    save_random_model(gpt2, folder)
    quantize_folder(folder, gptq(32), lambda name: name.endswith("c_fc.weight"))
    with pytest.raises(ValueError, match=r"c_fc.weight' is quantised, which a family whose weights lie \[in, out\]"):
        load_engine(folder)


def test_a_mixture_of_experts_is_refused():
    mixtral = CONFIG | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    folder = Path(tempfile.mkdtemp(prefix="quantised-"))
    save_random_model(mixtral, folder)
    quantize_folder(folder, gptq(64), is_projection)
    with pytest.raises(ValueError, match=r"a mixture of experts cannot be quantised \(gptq\); its experts"):
        load_engine(folder)
