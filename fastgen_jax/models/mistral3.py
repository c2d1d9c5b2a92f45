"""Mistral Small 3.1 and 3.2: of a model that reads images too the language model, a `mistral`."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import gemma3, llama, mistral
from fastgen_jax.models.hf_config import text_config

Model = llama.Model

layout = gemma3.layout


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    return mistral.from_hf(text_config(hf, "mistral"))
