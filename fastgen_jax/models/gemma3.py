"""Gemma 3 of 4B to 27B: of a model that reads images too the language model, a `gemma3_text`."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import gemma3_text, llama
from fastgen_jax.models.hf_config import text_config
from fastgen_jax.models.layout import Layout

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    return gemma3_text.from_hf(text_config(hf, "gemma3_text"))


def layout(config: llama.Config) -> Layout:
    """Newer checkpoints begin with `model`, older ones with `language_model`."""
    return Layout(
        names={r"^language_model\.lm_head\.": "lm_head.", r"^(model\.)?language_model\.(model\.)?": "model."},
        unread=r"^(model\.)?(vision_tower|multi_modal_projector)\.",
    )
