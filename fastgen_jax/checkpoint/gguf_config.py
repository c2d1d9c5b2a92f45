"""A GGUF file's metadata as the config.json and generation_config.json it was made from.

transformers can do this too, but only where torch is installed, which running a model here does not need.
"""

import math
from typing import Any

import numpy as np
from gguf.quants import dequantize

from fastgen_jax.checkpoint.gguf_file import GGUFHeader
from fastgen_jax.checkpoint.source import read_exactly

# Llama 3.1's rotary scaling, which llama.cpp stores only as its result; `factor` differs between models.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """The model's config.json, as far as the file determines it.

    A llama with a sliding window is a mistral. Raises ValueError for metadata that changes the maths and
    has no counterpart (mixture of experts, rotary scaling of unknown form).
    """
    if header.get("expert_count", 0):
        raise ValueError(
            f"{header.path} is a mixture of experts ({header.get('expert_count')}), which is not supported"
        )
    window = header.get("attention.sliding_window")
    num_heads = header.get("attention.head_count")
    config = {
        "model_type": "mistral" if window and header.architecture == "llama" else header.architecture,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": header.get("embedding_length"),
        "intermediate_size": header.get("feed_forward_length"),
        "num_hidden_layers": header.get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.get("attention.head_count_kv", num_heads),
        "max_position_embeddings": header.get("context_length"),
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": header.ties_embeddings(),
    }
    if missing := [key for key, value in config.items() if value is None]:
        raise ValueError(f"{header.path} is damaged: its metadata gives no {', '.join(missing)}")
    config["head_dim"] = _head_dim(header, config)
    if window:
        if header.architecture != "llama":
            raise ValueError(f"{header.path} has a sliding window, which is supported for Mistral only")
        config["sliding_window"] = window
    elif header.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in header.tensors
    if scaling := _rope_scaling(header, config):
        config["rope_scaling"] = scaling
    return config | _special_token_ids(header)


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """Every token that ends a text: end of sequence and, in a chat model, end of turn."""
    keys = ("eos_token_id", "eot_token_id")
    ids = dict.fromkeys(
        token_id for key in keys if (token_id := header.metadata.get(f"tokenizer.ggml.{key}")) is not None
    )
    return {"eos_token_id": list(ids)} if ids else {}


def _special_token_ids(header: GGUFHeader) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    return {
        f"{ours}_token_id": header.metadata[key]
        for theirs, ours in names.items()
        if (key := f"tokenizer.ggml.{theirs}_token_id") in header.metadata
    }


def _head_dim(header: GGUFHeader, config: dict[str, Any]) -> int:
    head_dim = header.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.get(key, head_dim) != head_dim:
            raise ValueError(f"{header.path} has {key} {header.get(key)}, not the {head_dim} of its keys; unsupported")
    return head_dim


def _rope_scaling(header: GGUFHeader, config: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` from the metadata (linear, yarn) or from Llama 3.1's per-frequency divisors."""
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, config)
    kind = header.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{header.path} scales its rotary embedding by {kind!r}; linear, yarn and llama3 are supported"
        )
    scaling = {"rope_type": kind, "factor": header.get("rope.scaling.factor", 1.0)}
    if original := header.get("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(header: GGUFHeader, config: dict[str, Any]) -> dict[str, Any]:
    """The llama3 scaling whose frequency divisors the file holds; raises unless it gives exactly them."""
    tensor = header.tensors["rope_freqs.weight"]
    raw = read_exactly(header.path, tensor.start, tensor.nbytes)
    stored = dequantize(raw.reshape(1, -1), tensor.type).ravel()
    scaling = {"rope_type": "llama3", "factor": round(float(stored.max()), 4), **_LLAMA3_SCALING}
    expected = _llama3_divisors(config["rope_theta"], config["head_dim"], scaling)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ValueError(f"{header.path} has a rope_freqs.weight that is not Llama 3.1's rotary scaling; unsupported")
    return scaling


def _llama3_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """[head_dim / 2]: what Llama 3.1 divides each rotary frequency by.

    Wavelengths much longer than the original context are stretched by `factor`, short ones stay, and between
    the two the frequencies are interpolated (`_compute_llama3_parameters` of transformers).
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / scaling["factor"] + kept)
