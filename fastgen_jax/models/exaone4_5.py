"""EXAONE 4.5: its language model, which is an `exaone4`; prompts are text."""

from collections.abc import Mapping
from typing import Any

from fastgen_jax.models import exaone4, llama
from fastgen_jax.models.hf_config import text_config
from fastgen_jax.models.layout import Layout

Model = llama.Model


def from_hf(hf: Mapping[str, Any]) -> llama.Config:
    return exaone4.from_hf(text_config(hf, "exaone4", "exaone4_5_text"))


def layout(config: llama.Config) -> Layout:
    return Layout(names={r"^model\.language_model\.": "model."}, unread=r"^model\.visual\.|^mtp\b")
