"""Stream a checkpoint into a tree of parameters, leaf by leaf, after checking all of it from its headers."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from fastgen_jax.checkpoint.source import TensorSource
from fastgen_jax.progress import bar

# The last key of a leaf's path -> the last part of its tensor's name.
_TENSOR_KINDS = {"weight": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # computed from the config, stored by old checkpoints

Path = tuple[str, ...]
NO_FUSION: Mapping[str, Mapping[str, int]] = MappingProxyType({})
_ALIGNMENT = 64  # bytes; a CPU device takes a host array that is so aligned as it is, and copies any other


class _Part(NamedTuple):
    """A checkpoint's tensor and the outputs (first axis) of a leaf that it fills; None is the whole leaf."""

    tensor: str
    outputs: slice | None


def load_params(
    source: TensorSource,
    abstract_params: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    fused: Mapping[str, Mapping[str, int]] = NO_FUSION,
    tied: bool = False,
    place: Callable[[np.ndarray], Any] = jax.device_put,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The tree of `abstract_params`, filled from `source`; every leaf becomes `place(numpy array of dtype)`.

    abstract_params: nested dict of `jax.ShapeDtypeStruct`. The leaf ("model", "layers_3", "self_attn",
        "o_proj", "weight") is the tensor "model.layers.3.self_attn.o_proj.weight"; an "embedding" or a "scale"
        is a weight too, a "bias" a bias. All tensors may lack "model.".
    fused: module name -> its parts in the checkpoint and how many outputs each has, in order, for a module
        that does the work of several: {"qkv_proj": {"q_proj": 576, "k_proj": 192, "v_proj": 192}}.
    tied: the model has no lm_head of its own; one in the checkpoint has to be a copy of the embedding.
    progress: whether to show a bar on stderr; None is: if that is a terminal.

    Raises ValueError naming the tensor when one is missing, left over or misshapen, before anything is read
    or allocated. The host holds, beside the placed parameters, one leaf and a small piece of a tensor.
    """
    leaves = traverse_util.flatten_dict(dict(abstract_params))
    plan = {path: _parts(path, leaf.shape, fused) for path, leaf in leaves.items()}
    stored = _stored_names(source.names())
    _check_names(plan, stored, tied)
    _check_shapes(plan, leaves, stored, source)
    if tied:
        _check_tie(stored, source)
    params = {}
    with bar("loading weights", len(leaves), progress, unit="arrays") as advance:
        for path, leaf in leaves.items():
            host = _aligned_empty(leaf.shape, np.dtype(dtype))
            for part in plan[path]:
                source.read_into(stored[part.tensor], host if part.outputs is None else host[part.outputs])
            # A copy still under way would keep this leaf's host array alive beside the next.
            params[path] = jax.block_until_ready(place(host))
            advance(1)
    return traverse_util.unflatten_dict(params)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -data.ctypes.data % _ALIGNMENT
    return data[first : first + nbytes].view(dtype).reshape(shape)


def _parts(path: Path, shape: tuple[int, ...], fused: Mapping[str, Mapping[str, int]]) -> list[_Part]:
    """The tensors that fill a leaf, in Hugging Face's names."""
    *scopes, module, leaf = path
    if leaf not in _TENSOR_KINDS:
        raise ValueError(f"parameter {'/'.join(path)} must be named one of {', '.join(_TENSOR_KINDS)}")
    modules = [re.sub(r"^layers_(\d+)$", r"layers.\1", scope) for scope in scopes]
    if module not in fused:
        return [_Part(".".join((*modules, module, _TENSOR_KINDS[leaf])), None)]
    sizes = fused[module]
    if sum(sizes.values()) != shape[0]:
        raise ValueError(f"parameter {'/'.join(path)} has {shape[0]} outputs, its parts {dict(sizes)}")
    stops = np.cumsum(list(sizes.values())).tolist()
    return [
        _Part(".".join((*modules, part, _TENSOR_KINDS[leaf])), slice(stop - outputs, stop))
        for (part, outputs), stop in zip(sizes.items(), stops, strict=True)
    ]


def _stored_names(names: Sequence[str]) -> dict[str, str]:
    """Tensor names as a causal language model has them -> as the checkpoint has them.

    They differ where the checkpoint was saved from the base model, without its "model." prefix.
    """
    if any(name.startswith("model.") for name in names):
        return {name: name for name in names}
    return {name if name.startswith("lm_head.") else f"model.{name}": name for name in names}


def _check_names(plan: Mapping[Path, list[_Part]], stored: Mapping[str, str], tied: bool) -> None:
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


def _check_shapes(
    plan: Mapping[Path, list[_Part]],
    leaves: Mapping[Path, jax.ShapeDtypeStruct],
    stored: Mapping[str, str],
    source: TensorSource,
) -> None:
    for path, parts in plan.items():
        for part in parts:
            expected = leaves[path].shape
            if part.outputs is not None:
                expected = (part.outputs.stop - part.outputs.start, *expected[1:])
            found = source.shape(stored[part.tensor])
            if found != expected:
                raise ValueError(f"tensor {stored[part.tensor]!r} has shape {found}; the model expects {expected}")


def _check_tie(stored: Mapping[str, str], source: TensorSource) -> None:
    """Refuse a checkpoint that says its output weights are its embedding, and holds others."""
    head = stored.get("lm_head.weight")
    embedding = next((name for name in stored.values() if name.endswith("embed_tokens.weight")), None)
    if head is None or embedding is None or head == embedding:
        return
    same_shape = source.shape(head) == source.shape(embedding)
    if not same_shape or not np.array_equal(source.read(head), source.read(embedding)):
        raise ValueError(
            f"config.json ties the output weights to the embedding, but tensor {head!r} is not {embedding!r}; "
            "if the model is not tied, set tie_word_embeddings to false"
        )


def _first(names: Sequence[str]) -> str:
    """'a' or 'a' (and 3 more)."""
    return repr(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
