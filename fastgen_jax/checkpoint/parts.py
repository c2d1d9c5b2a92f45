"""Which tensors of a checkpoint fill which leaves of a tree of parameters, and whether they are all there and fit."""

import re
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fastgen_jax.checkpoint.host_matrix import scheme_of
from fastgen_jax.checkpoint.source import TensorSource
from fastgen_jax.schemes import Path

# The last key of a leaf's path -> the last part of its tensor's name.
_TENSOR_KINDS = {"weight": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # computed from the config, stored by old checkpoints
_MIXTRAL, _OTHERS = ".block_sparse_moe.", ".mlp."  # what Mixtral calls on disk what its kin call otherwise


class Part(NamedTuple):
    """A checkpoint's tensor and the region of a leaf that it fills, as an index of it; () is the whole leaf."""

    tensor: str
    region: tuple[int | slice, ...]

    def shape(self, leaf: tuple[int, ...]) -> tuple[int, ...]:
        """Of the region, in a leaf of such a shape."""
        return np.broadcast_to(np.uint8(0), leaf)[self.region].shape


def parts_of(
    path: Path, shape: tuple[int, ...], fused: Mapping[str, Mapping[str, int]], stored: Container[str] = ()
) -> list[Part]:
    """The tensors that fill a leaf, in Hugging Face's names. stored: those that the checkpoint has."""
    *scopes, module, leaf = path
    if leaf not in _TENSOR_KINDS:
        raise ValueError(f"parameter {'/'.join(path)} must be named one of {', '.join(_TENSOR_KINDS)}")
    modules = [re.sub(r"^layers_(\d+)$", r"layers.\1", scope) for scope in scopes]
    whole, kind = ".".join((*modules, module)), _TENSOR_KINDS[leaf]
    if (nested := ".".join((*modules[-1:], module))) in fused:
        if whole in stored:  # the stack that transformers 5 makes of the experts, saved as it is
            return [Part(whole, ())]
        module, modules = nested, modules[:-1]
    if module not in fused:
        return [Part(f"{whole}.{kind}", ())]
    sizes = fused[module]
    is_stack = any("{}" in part for part in sizes)
    indexes: list[tuple[int, ...]] = [(i,) for i in range(shape[0])] if is_stack else [()]
    if sum(sizes.values()) != shape[len(indexes[0])]:
        raise ValueError(f"parameter {'/'.join(path)} has {shape[len(indexes[0])]} outputs, its parts {dict(sizes)}")
    stops = np.cumsum(list(sizes.values())).tolist()
    return [
        Part(".".join((*modules, part.format(*index), kind)), (*index, slice(stop - outputs, stop)))
        for index in indexes
        for (part, outputs), stop in zip(sizes.items(), stops, strict=True)
    ]


def stored_names(names: Sequence[str]) -> dict[str, str]:
    """Tensor names as a causal language model has them -> as the checkpoint has them.

    They differ where the checkpoint was saved from the base model, without its "model." prefix, and in Mixtral's.
    """
    prefix = "" if any(name.startswith("model.") for name in names) else "model."
    return {(name if name.startswith("lm_head.") else prefix + name.replace(_MIXTRAL, _OTHERS)): name for name in names}


def check_names(plan: Mapping[Path, list[Part]], stored: Mapping[str, str], tied: bool) -> None:
    wanted = {part.tensor: None for parts in plan.values() for part in parts}
    if missing := [name for name in wanted if name not in stored]:
        raise ValueError(f"the checkpoint lacks tensor {_first(missing)}, which the model needs")
    unused = [
        name
        for expected, name in stored.items()
        if expected not in wanted and not _HARMLESS.search(name) and not (tied and name == "lm_head.weight")
    ]
    if unused:
        raise ValueError(f"the checkpoint has tensor {_first(unused)}, for which the model has no use")


def check_shapes(
    plan: Mapping[Path, list[Part]],
    leaves: Mapping[Path, jax.ShapeDtypeStruct],
    stored: Mapping[str, str],
    source: TensorSource,
) -> None:
    for path, parts in plan.items():
        for part in parts:
            expected = part.shape(leaves[path].shape)
            found = source.shape(stored[part.tensor])
            if found != expected:
                raise ValueError(f"tensor {stored[part.tensor]!r} has shape {found}; the model expects {expected}")


def check_tie(stored: Mapping[str, str], source: TensorSource) -> None:
    """Refuse a checkpoint that says its output weights are its embedding, and holds others."""
    head = stored.get("lm_head.weight")
    embedding = next((name for name in stored.values() if name.endswith("embed_tokens.weight")), None)
    if head is None or embedding is None or head == embedding:
        return
    comparable = scheme_of(source, head) is None and source.shape(head) == source.shape(embedding)
    if not comparable or not np.array_equal(source.read(head), source.read(embedding)):
        raise ValueError(
            f"config.json ties the output weights to the embedding, but tensor {head!r} is not {embedding!r}; "
            "if the model is not tied, set tie_word_embeddings to false"
        )


def _first(names: Sequence[str]) -> str:
    """'a' or 'a' (and 3 more)."""
    return repr(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
