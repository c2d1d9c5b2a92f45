"""Stream a checkpoint into a tree of parameters, leaf by leaf, after checking all of it from its headers."""

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from fastgen_jax.checkpoint.source import TensorSource
from fastgen_jax.progress import bar
from fastgen_jax.sharding import Shards, piece

# The last key of a leaf's path -> the last part of its tensor's name.
_TENSOR_KINDS = {"weight": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # computed from the config, stored by old checkpoints
_MIXTRAL, _OTHERS = ".block_sparse_moe.", ".mlp."  # what Mixtral calls on disk what its kin call otherwise

Path = tuple[str, ...]
NO_FUSION: Mapping[str, Mapping[str, int]] = MappingProxyType({})
_ALIGNMENT = 64  # bytes; a CPU device takes a host array that is so aligned as it is, and copies any other


class Cut(NamedTuple):
    """How the leaves are shared out over devices.

    shapes: nested dict of `jax.ShapeDtypeStruct`, one shard's. axes: the same of each leaf's logical axes.
    fused: as for `load_params`, with the outputs of one shard.
    """

    shards: Shards
    shapes: Mapping[str, Any]
    axes: Mapping[str, Any]
    fused: Mapping[str, Mapping[str, int]]


class _Part(NamedTuple):
    """A checkpoint's tensor and the region of a leaf that it fills, as an index of it; () is the whole leaf."""

    tensor: str
    region: tuple[int | slice, ...]

    def shape(self, leaf: tuple[int, ...]) -> tuple[int, ...]:
        """Of the region, in a leaf of such a shape."""
        return np.broadcast_to(np.uint8(0), leaf)[self.region].shape


def load_params(
    source: TensorSource,
    abstract_params: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    fused: Mapping[str, Mapping[str, int]] = NO_FUSION,
    tied: bool = False,
    place: Callable[[np.ndarray], Any] = jax.device_put,
    cut: Cut | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The tree of `abstract_params`, filled from `source`; every leaf becomes `place(numpy array of dtype)`.

    abstract_params: nested dict of `jax.ShapeDtypeStruct`. The leaf ("model", "layers_3", "self_attn",
        "o_proj", "weight") is the tensor "model.layers.3.self_attn.o_proj.weight"; an "embedding" or a "scale"
        is a weight too, a "bias" a bias. All tensors may lack "model.".
    fused: module name -> its parts in the checkpoint and how many outputs each has, in order, for a module
        that does the work of several: {"qkv_proj": {"q_proj": 576, "k_proj": 192, "v_proj": 192}}.
        "experts.gate_up_proj" is a gate_up_proj in a module experts, and its parts lie beside experts. A "{}" in a
        part's name is an index of the leaf's first axis, the outputs are then the second:
        {"experts.gate_up_proj": {"experts.{}.w1": 14336, "experts.{}.w3": 14336}}.
    tied: the model has no lm_head of its own; one in the checkpoint has to be a copy of the embedding.
    cut: share the leaves out over devices instead of `place`. A process reads what its own devices have, and no
        device ever holds more than its shard.
    progress: whether to show a bar on stderr; None is: if that is a terminal.

    Raises ValueError naming the tensor when one is missing, left over or misshapen, before anything is read
    or allocated. The host holds, beside the placed parameters, one leaf and a small piece of a tensor; with `cut`,
    one shard of a leaf.
    """
    leaves = traverse_util.flatten_dict(dict(abstract_params))
    stored = _stored_names(source.names())
    plan = {path: _parts(path, leaf.shape, fused, stored) for path, leaf in leaves.items()}
    _check_names(plan, stored, tied)
    _check_shapes(plan, leaves, stored, source)
    if tied:
        _check_tie(stored, source)
    load = _Shared(source, stored, plan, np.dtype(dtype), cut) if cut else None
    params = {}
    with bar("loading weights", len(leaves), progress, unit="arrays") as advance:
        for path, leaf in leaves.items():
            if load is not None:
                params[path] = load(path)
            else:
                host = _aligned_empty(leaf.shape, np.dtype(dtype))
                for part in plan[path]:
                    source.read_into(stored[part.tensor], host[part.region])
                # A copy still under way would keep this leaf's host array alive beside the next.
                params[path] = jax.block_until_ready(place(host))
            advance(1)
    return traverse_util.unflatten_dict(params)


class _Shared:
    """Loads leaves cut over devices: a leaf's path -> the array of all shards, with those of this process filled."""

    def __init__(
        self,
        source: TensorSource,
        stored: Mapping[str, str],
        plan: Mapping[Path, list[_Part]],
        dtype: np.dtype,
        cut: Cut,
    ) -> None:
        self._source, self._stored, self._plan, self._dtype, self._shards = source, stored, plan, dtype, cut.shards
        self._shapes = traverse_util.flatten_dict(dict(cut.shapes))
        self._axes = traverse_util.flatten_dict(dict(cut.axes))
        self._local_plan = {path: _parts(path, leaf.shape, cut.fused) for path, leaf in self._shapes.items()}

    def __call__(self, path: Path) -> jax.Array:
        shards, local_shape, axes = self._shards, self._shapes[path].shape, self._axes[path]
        sharding = shards.sharding(*axes)
        assert sharding is not None
        arrays, host = [], None
        for index, device in shards.local_devices:
            if host is None or any(axis and shards.cuts(axis) for axis in axes):
                host = self._read(path, index, local_shape, axes)
            arrays.append(jax.block_until_ready(jax.device_put(host, device)))
        return jax.make_array_from_single_device_arrays(shards.shape(local_shape, axes), sharding, arrays)

    def _read(self, path: Path, index: int, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> np.ndarray:
        host = _aligned_empty(shape, self._dtype)
        for part, local in self._parts_of(path, index):
            out, name = host[local.region], self._stored[part.tensor]
            region = tuple(
                piece(n, have, index, self._shards.size, axis)
                for n, have, axis in zip(self._source.shape(name), out.shape, axes[-out.ndim :], strict=True)
            )
            num_rows = region[0].stop - region[0].start
            out[num_rows:] = 0  # behind the end of the vocabulary
            self._source.read_into(name, out[:num_rows], region)
        return host

    def _parts_of(self, path: Path, index: int) -> Iterator[tuple[_Part, _Part]]:
        """The parts of a leaf that a shard has something of: as they are in the whole leaf, and in the shard's."""
        parts, local = self._plan[path], self._local_plan[path]
        if len(parts) < len(local):
            name = self._stored[parts[0].tensor]
            raise ValueError(f"tensor {name!r} has all experts in one, which cannot be shared out; save them apart")
        # Of a stack, whose parts lie one after the other, perhaps some.
        mine = piece(len(parts), len(local), index, self._shards.size, self._axes[path][0])
        return zip(parts[mine], local, strict=True)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -data.ctypes.data % _ALIGNMENT
    return data[first : first + nbytes].view(dtype).reshape(shape)


def _parts(
    path: Path, shape: tuple[int, ...], fused: Mapping[str, Mapping[str, int]], stored: Container[str] = ()
) -> list[_Part]:
    """The tensors that fill a leaf, in Hugging Face's names. stored: those that the checkpoint has."""
    *scopes, module, leaf = path
    if leaf not in _TENSOR_KINDS:
        raise ValueError(f"parameter {'/'.join(path)} must be named one of {', '.join(_TENSOR_KINDS)}")
    modules = [re.sub(r"^layers_(\d+)$", r"layers.\1", scope) for scope in scopes]
    whole, kind = ".".join((*modules, module)), _TENSOR_KINDS[leaf]
    if (nested := ".".join((*modules[-1:], module))) in fused:
        if whole in stored:  # the stack that transformers 5 makes of the experts, saved as it is
            return [_Part(whole, ())]
        module, modules = nested, modules[:-1]
    if module not in fused:
        return [_Part(f"{whole}.{kind}", ())]
    sizes = fused[module]
    is_stack = any("{}" in part for part in sizes)
    indexes: list[tuple[int, ...]] = [(i,) for i in range(shape[0])] if is_stack else [()]
    if sum(sizes.values()) != shape[len(indexes[0])]:
        raise ValueError(f"parameter {'/'.join(path)} has {shape[len(indexes[0])]} outputs, its parts {dict(sizes)}")
    stops = np.cumsum(list(sizes.values())).tolist()
    return [
        _Part(".".join((*modules, part.format(*index), kind)), (*index, slice(stop - outputs, stop)))
        for index in indexes
        for (part, outputs), stop in zip(sizes.items(), stops, strict=True)
    ]


def _stored_names(names: Sequence[str]) -> dict[str, str]:
    """Tensor names as a causal language model has them -> as the checkpoint has them.

    They differ where the checkpoint was saved from the base model, without its "model." prefix, and in Mixtral's.
    """
    prefix = "" if any(name.startswith("model.") for name in names) else "model."
    return {(name if name.startswith("lm_head.") else prefix + name.replace(_MIXTRAL, _OTHERS)): name for name in names}


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
            expected = part.shape(leaves[path].shape)
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
