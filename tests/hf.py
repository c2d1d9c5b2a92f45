"""Pairs of one tiny random model: Hugging Face's PyTorch one, and our engine reading the checkpoint it saved."""

import itertools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from fastgen_jax import checkpoint, kernels, models, pretrained
from fastgen_jax.engine import Engine
from fastgen_jax.sharding import WHOLE, Shards

TOLERANCE = 2e-4
"""Largest difference between logits, as a share of the largest logit."""

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,  # by no number of devices to be divided
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than the devices, of four and eight
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
"""The config.json that the families' variants begin with."""

SIZES = {
    "block_size": 8,
    "num_blocks": 48,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "warm_up": False,
    "show_progress": False,
}


@dataclass(frozen=True)
class Pair:
    """The two models."""

    hf: PreTrainedModel
    engine: Engine

    def hf_logits(self, token_ids: np.ndarray) -> np.ndarray:
        """token_ids [sequences, tokens], each run whole -> float32 logits [sequences, tokens, V]."""
        self._forget_lengths()
        with torch.no_grad():
            return self.hf(torch.tensor(token_ids)).logits.numpy()

    def hf_logits_decoded(self, token_ids: list[int], num_prompt_tokens: int) -> np.ndarray:
        """A prompt run whole, then each token by itself over the cache -> float32 logits [tokens, V]."""
        self._forget_lengths()
        cuts = [0, *range(num_prompt_tokens, len(token_ids) + 1)]
        cache, logits = None, []
        with torch.no_grad():
            for start, stop in itertools.pairwise(cuts):
                out = self.hf(torch.tensor([token_ids[start:stop]]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits[0].numpy())
        return np.concatenate(logits)

    def _forget_lengths(self) -> None:
        """A "dynamic" rope keeps the frequencies of the longest input so far until it meets a short one."""
        with torch.no_grad():
            self.hf(torch.tensor([[0]]))


def make_pair(hf_config: Mapping[str, Any], **engine_config: Any) -> Pair:
    """Both models of a config.json, with the same random weights. `engine_config` overrides SIZES."""
    with tempfile.TemporaryDirectory() as folder:
        hf = save_random_model(hf_config, Path(folder))
        return Pair(hf, load_engine(Path(folder), **engine_config))


def save_random_model(hf_config: Mapping[str, Any], folder: Path) -> PreTrainedModel:
    """Write a checkpoint to `folder`: random weights, and `hf_config` to the letter as its config.json."""
    (folder / "config.json").write_text(json.dumps(hf_config))
    config = AutoConfig.from_pretrained(folder)
    model = auto_class(hf_config).from_config(config, dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder)
    (folder / "config.transformers.json").write_text((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf_config))
    return model


def auto_class(hf_config: Mapping[str, Any]) -> Any:
    """What makes Hugging Face's model of a config.json, one that reads images too or only text."""
    return AutoModelForImageTextToText if "text_config" in hf_config else AutoModelForCausalLM


def randomise(model: PreTrainedModel) -> None:
    """Weights, norm scales and biases so large that no part of the model goes unnoticed in its logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.2, generator=generator)
            if "norm" in name and name.endswith("weight"):
                weight += 1


def load_model(folder: Path, shards: Shards = WHOLE) -> tuple[Any, dict[str, Any]]:
    """Our model of a checkpoint, and its float32 parameters."""
    found = checkpoint.resolve(folder)
    model_config = models.family(found.hf_config["model_type"]).from_hf(found.hf_config)
    return pretrained.load_model(found, model_config, kernels.get_backend("xla"), "float32", shards, False)


def load_engine(folder: Path, shards: Shards = WHOLE, **engine_config: Any) -> Engine:
    model, params = load_model(folder, shards)
    return Engine(model, params, **(SIZES | engine_config))


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    """max |difference| <= TOLERANCE * max |theirs|."""
    assert ours.shape == theirs.shape
    difference, scale = np.abs(ours - theirs).max(), np.abs(theirs).max()
    assert difference <= TOLERANCE * scale, f"logits differ by {difference / scale:.1e} of their scale"
