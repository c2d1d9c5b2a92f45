"""Checkpoints in the formats that quantise, written as their own documentation has them, a few lines each.

A writer makes of a weight [out, in] the tensors that a module has in its place, and the float32 weight that they mean.
The values are random where the format allows it, so that no symmetry hides a mistake.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Written = tuple[dict[str, np.ndarray], np.ndarray]
F8 = ml_dtypes.float8_e4m3fn


class Case(NamedTuple):
    """A case: its quantization_config, and the writer of a module."""

    config: dict[str, Any]
    write: Callable[[np.ndarray], Written]


def grouped(w: np.ndarray, group: int, bits: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round to nearest: unsigned values [out, in], float16 scales [out, groups] and zeros [out, groups]."""
    top = 2**bits - 1
    w = w.reshape(len(w), -1, w.shape[1] if group == -1 else group)
    if symmetric:
        scale = 2 * np.abs(w).max(2) / top
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        low = np.minimum(w.min(2), 0)
        scale = (np.maximum(w.max(2), 0) - low) / top
        zero = np.clip(np.round(-low / scale), 0, top).astype(int)
    scale = scale.astype(np.float16)
    q = np.clip(np.round(w / scale[:, :, None].astype(float)) + zero[:, :, None], 0, top).astype(int)
    return q.reshape(len(w), -1), scale, zero


def meant(q: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """(value - zero) * scale, group by group."""
    q = q.reshape(*scale.shape, -1)
    return ((q - zero[:, :, None]) * scale[:, :, None].astype(float)).reshape(len(q), -1).astype(np.float32)


def words(q: np.ndarray, bits: int) -> np.ndarray:
    """[n, m] -> int32 [n, m * bits / 32], the first value in the lowest bits."""
    per_word = 32 // bits
    total = np.zeros((len(q), q.shape[1] // per_word), np.uint64)
    for i in range(per_word):
        total += q[:, i::per_word].astype(np.uint64) << np.uint64(bits * i)
    return total.astype(np.uint32).view(np.int32)


def gptq(group: int, *, bits: int = 4, symmetric: bool = False, version: str = "gptq") -> Case:
    """AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `pack`; "gptq_v2" has the zeros as they are."""

    def write(w: np.ndarray) -> Written:
        q, scale, zero = grouped(w, group, bits, symmetric)
        stored = zero if version == "gptq_v2" else (zero - 1) & (2**bits - 1)
        tensors = {
            "qweight": np.ascontiguousarray(words(q, bits).T),
            "qzeros": words(stored.T, bits),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": np.arange(w.shape[1], dtype=np.int32) // (w.shape[1] if group == -1 else group),
        }
        return tensors, meant(q, scale, zero)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": symmetric}
    return Case(config | {"checkpoint_format": version, "damp_percent": 0.01, "true_sequential": True}, write)


def awq(group: int) -> Case:
    """AutoAWQ, awq/modules/linear/gemm.py, `from_linear`."""

    def pack(q: np.ndarray) -> np.ndarray:
        return words(q.reshape(len(q), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(q), -1), 4)

    def write(w: np.ndarray) -> Written:
        q, scale, zero = grouped(w, group, 4, False)
        tensors = {"qweight": pack(q.T), "qzeros": pack(zero.T), "scales": np.ascontiguousarray(scale.T)}
        return tensors, meant(q, scale, zero)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Case(config | {"modules_to_not_convert": None}, write)


def compressed(weights: dict[str, Any], write: Callable[[np.ndarray], Written], **more: Any) -> Case:
    """The config of https://github.com/vllm-project/compressed-tensors, as llm-compressor writes it."""
    weights = {
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "actorder": None,
        "observer": "minmax",
    } | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return Case(
        config | {"quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": 1.5} | more,
        write,
    )


def int_quantized(strategy: str, *, symmetric: bool = True) -> Case:
    """int8 values beside weight_scale [1] or [out, 1], and weight_zero_point like it."""

    def write(w: np.ndarray) -> Written:
        over = None if strategy == "tensor" else 1
        low, high = w.min(over, keepdims=True), w.max(over, keepdims=True)
        scale = (np.maximum(-low, high) / 127 if symmetric else (high - low) / 255).astype(ml_dtypes.bfloat16)
        zero = np.zeros(scale.shape) if symmetric else np.clip(np.round(-128 - low / scale.astype(float)), -128, 127)
        q = np.clip(np.round(w / scale.astype(float)) + zero, -128, 127)
        tensors = {"weight": q.astype(np.int8), "weight_scale": scale.reshape(-1 if strategy == "tensor" else (-1, 1))}
        if not symmetric:
            tensors["weight_zero_point"] = zero.astype(np.int8).reshape(tensors["weight_scale"].shape)
        return tensors, ((q - zero) * scale.astype(float)).astype(np.float32)

    return compressed(
        {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": symmetric}, write, format="int-quantized"
    )


def pack_quantized(bits: int, group: int, *, symmetric: bool = True) -> Case:
    """compressors/quantized_compressors/pack_quantized.py, `pack_to_int32`; zeros are packed along the outputs."""

    def write(w: np.ndarray) -> Written:
        q, scale, zero = grouped(w, group, bits, symmetric)
        tensors = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": np.array(w.shape)}
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        return tensors, meant(q, scale, zero)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    return compressed(
        weights | {"strategy": "channel" if group == -1 else "group"},
        write,
        format="pack-quantized",
    )


def float_quantized(strategy: str) -> Case:
    """float8_e4m3fn beside weight_scale [1] or [out, 1]; W8A8's scale of the inputs is there and says nothing here."""

    def write(w: np.ndarray) -> Written:
        scale = (np.abs(w).max(None if strategy == "tensor" else 1, keepdims=True) / 448).astype(np.float32)
        q = (w / scale).astype(F8)
        tensors = {"weight": q, "weight_scale": scale.reshape(-1 if strategy == "tensor" else (-1, 1))}
        return tensors | {"input_scale": np.ones(1, np.float32)}, q.astype(np.float32) * scale

    return compressed({"num_bits": 8, "type": "float", "strategy": strategy}, write, format="float-quantized")


def fp8(block: tuple[int, int] | None, name: str = "weight_scale_inv") -> Case:
    """transformers, integrations/finegrained_fp8.py, `FP8Linear`: a scale for each block, the last ones cut off."""

    def write(w: np.ndarray) -> Written:
        rows, columns = block or w.shape
        scale = np.empty((-(-w.shape[0] // rows), -(-w.shape[1] // columns)), np.float32)
        q, meant = np.empty(w.shape, F8), np.empty(w.shape, np.float32)
        for i, j in np.ndindex(scale.shape):
            here = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = np.abs(w[here]).max() / 448
            q[here] = (w[here] / scale[i, j]).astype(F8)
            meant[here] = q[here].astype(np.float32) * scale[i, j]
        return {"weight": q, name: scale if block else scale.reshape(())}, meant

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    return Case(config | {"weight_block_size": block and list(block)}, write)


def quantize_folder(folder: Path, case: Case, is_quantized: Callable[[str], bool]) -> tuple[dict, dict]:
    """Quantise a saved checkpoint in its place; its tensors now, and the float32 weights that they mean, by old names.

    is_quantized: of a tensor's name.
    """
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))
    stored, means = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not is_quantized(name):
            stored[name] = means[name] = tensor
            continue
        tensors, means[name] = case.write(tensor.astype(np.float64))
        stored |= {name.removesuffix("weight") + part: np.ascontiguousarray(value) for part, value in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return stored, means
