"""The config.json of one real model of each family."""

from typing import Any

from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.models.hf_config import first_layers

ALIASES_OF = {
    "arcee": None,
    "cohere": "command-r",
    "cohere2": "command-r7b",
    "ernie4_5": "ernie4.5-0.3b",
    "exaone": "exaone3.5-7.8b-instruct",
    "exaone4": "exaone4-32b",
    "exaone4_5": None,
    "falcon": "falcon-7b",
    "gemma": "gemma-7b",
    "gemma2": "gemma2-9b",
    "gemma3": "gemma3-4b",
    "gemma3_text": "gemma3-1b",
    "glm": "glm4-9b",
    "glm4": "glm4-9b-0414",
    "gpt2": "gpt2",
    "gpt_neox": "pythia-6.9b",
    "granite": "granite3.1-2b",
    "granitemoe": "granite3.1-1b-a400m",
    "helium": "helium1-preview-2b",
    "internlm3": "internlm3-8b-instruct",
    "ministral": None,
    "mistral3": "mistral-small3.1-24b-instruct",
    "nemotron": "minitron-4b",
    "olmo": "olmo-7b",
    "olmo2": "olmo2-7b",
    "olmo3": "olmo3-7b",
    "olmoe": "olmoe-1b-7b",
    "phi": "phi-2",
    "phi3": "phi3-mini",
    "seed_oss": "seed-oss-36b-instruct",
    "smollm3": "smollm3-3b",
    "stablelm": "stablelm2-12b",
    "starcoder2": "starcoder2-3b",
}
SHAPES = {
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 32768,
    "num_attention_heads": 20,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 128004,
}

# What is in every config.json, and no model reads.
TRAILER = {"transformers_version": "4.50.0", "bos_token_id": 1, "attention_dropout": 0.0, "torch_dtype": "bfloat16"}

REAL = {name: read_config(alias) for name, alias in ALIASES_OF.items() if alias}
REAL["phi3"] |= {
    "max_position_embeddings": 131072,
    "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144,
}
REAL["exaone4_5"] = {"model_type": "exaone4_5", "text_config": REAL["exaone4"]}
REAL |= {name: SHAPES | {"model_type": name} for name in ("arcee", "ministral")}
REAL = {name: TRAILER | config for name, config in REAL.items()}
"""As the package has it; Phi-3-mini-128k's with other factors, and of families that have no alias some config."""

SHIPPED = {
    "llama": "llama3-8b",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "opt": "opt-13b",
    "qwen2": "qwen2.5-7b",
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "qwen3-30b-a3b",
}
"""Of the families whose configs have tests of their own, an alias."""

PERIODS = dict.fromkeys(("gemma3", "gemma3_text"), 6) | dict.fromkeys(("cohere2", "exaone4", "exaone4_5", "olmo3"), 4)
"""Layers after which a family's windows come round again; of the others it is one or two."""


def real_config(family: str) -> dict[str, Any]:
    return REAL[family] if family in REAL else read_config(SHIPPED[family])


def shortened(family: str) -> dict[str, Any]:
    """Its first layers only: two of a kind, or one of each."""
    return first_layers(real_config(family), PERIODS.get(family, 2))
