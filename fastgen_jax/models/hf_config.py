"""Strict reading of Hugging Face's `config.json`: a field is used, known not to matter, or refused."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# What says nothing about the forward pass: provenance, training, generation defaults, output switches.
NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path
    activation_dropout add_cross_attention architectures attention_dropout attn_implementation attn_pdrop
    auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    attention_probs_dropout_prob classifier_dropout hidden_dropout_prob
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dropout dtype
    early_stopping embd_pdrop embed_dropout embedding_dropout encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout id2label init_std initializer_range
    is_decoder is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id layerdrop
    length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads quantization_config
    remove_invalid_values repetition_penalty resid_pdrop residual_dropout return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p use_parallel_embedding
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 (a list of strings would take a line for each)
)

_OF_IMAGES = re.compile("(image|video|vision|mm|multimodal|projector|spatial|boi|eoi)_")


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; ValueError naming the file if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


class HFConfig:
    """The fields of one `config.json`, each taken once; `finish` refuses what nobody took."""

    def __init__(self, fields: Mapping[str, Any]):
        self.family = fields.get("model_type", "?")
        self._left = dict(fields)

    def take(self, name: str, default: Any = None, *, null: Any = ...) -> Any:
        """The field's value; `default` where it is absent, `null` (else `default` too) where it is null."""
        value = self._left.pop(name, default)
        return (default if null is ... else null) if value is None else value

    def need(self, name: str) -> Any:
        if (value := self._left.pop(name, None)) is None:
            raise ValueError(f"config.json of this {self.family} model lacks the field {name!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number from 1; without a `default` the field must be there."""
        return self._whole(name, self.need(name) if default is None else self.take(name, default))

    def count_or_none(self, name: str, default: int | None = None) -> int | None:
        """A whole number from 1, or None where it is null; `default` where it is absent."""
        value = self.take(name, default, null=None)
        return None if value is None else self._whole(name, value)

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} of this {self.family} model must be a whole number from 1")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings, which may be absent."""
        value = self.take(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ValueError(f"{name}={value!r:.80} of this {self.family} model must be a list of strings")
        return tuple(value)

    def only(self, name: str, *allowed: Any) -> None:
        """Take a field that may be absent or have one of the `allowed` values."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            valid = " or ".join(map(repr, allowed))
            raise ValueError(f"{name}={value!r} of this {self.family} model is not supported, only {valid}")

    def windowed(self, num_layers: int, default: Callable[[int], bool]) -> list[bool]:
        """Whether each layer has a window, by `layer_types`; where they are not said, by the layer's number."""
        kinds = self.take("layer_types")
        if not kinds:
            return [default(layer) for layer in range(num_layers)]
        if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
            raise ValueError(f"layer_types has {unknown[0]!r}; it can have sliding_attention and full_attention")
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types has {len(kinds)} entries; it must have num_hidden_layers={num_layers}")
        return [kind == "sliding_attention" for kind in kinds]

    def finish(self) -> None:
        """Refuse the fields that are left over and not known to be neutral."""
        unknown = sorted(name for name in set(self._left) - NEUTRAL if self._left[name] is not None)
        if unknown:
            shown = ", ".join(f"{name}={self._left[name]!r:.60}" for name in unknown)
            raise ValueError(f"config.json of this {self.family} model has unsupported fields: {shown}")


def text_config(hf: Mapping[str, Any], *families: str) -> dict[str, Any]:
    """The `text_config` of a config.json whose model reads images too; its `model_type` is one of `families`."""
    fields = HFConfig({name: value for name, value in hf.items() if not _OF_IMAGES.match(name)})
    text, tied = dict(fields.take("text_config", {})), fields.take("tie_word_embeddings")
    if (found := text.get("model_type")) not in families:
        valid = " or ".join(map(repr, families))
        raise ValueError(f"text_config of this {fields.family} model has model_type={found!r}, not {valid}")
    fields.finish()
    return text | ({} if tied is None else {"tie_word_embeddings": tied})


def first_layers(hf: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config.json of a model's first layers alone: what it says layer by layer is cut, too."""
    if text := hf.get("text_config"):
        return {**hf, "text_config": first_layers(text, num_layers)}
    name = next((name for name in ("n_layer", "num_layers") if name in hf), "num_hidden_layers")
    by_layer = {key for key, value in hf.items() if isinstance(value, list) and len(value) == hf.get(name)}
    return {key: value[:num_layers] if key in by_layer else value for key, value in hf.items()} | {name: num_layers}
