"""Stream a checkpoint into a tree of parameters, leaf by leaf, after checking all of it from its headers."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from fastgen_jax.checkpoint.formats import read_format
from fastgen_jax.checkpoint.host_matrix import HostMatrix, QuantizedSource, quantize_into
from fastgen_jax.checkpoint.parts import Part, check_names, check_shapes, check_tie, parts_of, stored_names
from fastgen_jax.checkpoint.source import Region, TensorSource, aligned_empty
from fastgen_jax.progress import bar
from fastgen_jax.schemes import NOT_QUANTIZED, Path, Scheme, check_cuts, projections
from fastgen_jax.sharding import Shards, piece

NO_FUSION: Mapping[str, Mapping[str, int]] = MappingProxyType({})


class Cut(NamedTuple):
    """How the leaves are shared out over devices.

    shapes: nested dict of `jax.ShapeDtypeStruct`, one shard's. axes: the same of each leaf's logical axes.
    fused: as for `load_params`, with the outputs of one shard.
    """

    shards: Shards
    shapes: Mapping[str, Any]
    axes: Mapping[str, Any]
    fused: Mapping[str, Mapping[str, int]]


def load_params(
    source: TensorSource,
    abstract_params: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    fused: Mapping[str, Mapping[str, int]] = NO_FUSION,
    tied: bool = False,
    place: Callable[[Any], Any] = jax.device_put,
    cut: Cut | None = None,
    quantize: Mapping[Path, Scheme] = NOT_QUANTIZED,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The tree of `abstract_params`, filled from `source`; every leaf becomes `place(numpy array of dtype)`, and a
    matrix that is quantised `place(QuantizedMatrix of numpy arrays)`.

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
    quantize: the leaves that are quantised here, and how. Those that the source has quantised stay as they are.
    progress: whether to show a bar on stderr; None is: if that is a terminal.

    Raises ValueError naming the tensor when one is missing, left over or misshapen, before anything is read
    or allocated. The host holds, beside the placed parameters, one leaf and a small piece of a tensor; with `cut`,
    one shard of a leaf. A quantised leaf is there with a byte for each value, and packed.
    """
    leaves = traverse_util.flatten_dict(dict(abstract_params))
    stored = stored_names(source.names())
    plan = {path: parts_of(path, leaf.shape, fused, stored) for path, leaf in leaves.items()}
    check_names(plan, stored, tied)
    check_shapes(plan, leaves, stored, source)
    if tied:
        check_tie(stored, source)
    schemes = {**quantize, **_stored_schemes(plan, leaves, stored, source, cut)}
    dtype = np.dtype(dtype)
    load = _Shared(source, stored, plan, schemes, dtype, cut) if cut else None
    params = {}
    with bar("loading weights", len(leaves), progress, unit="arrays") as advance:
        for path, leaf in leaves.items():
            if load is not None:
                params[path] = load(path)
            else:
                host = _host(leaf.shape, dtype, schemes.get(path))
                for part in plan[path]:
                    _fill(host[part.region], source, stored[part.tensor])
                # A copy still under way would keep this leaf's host array alive beside the next.
                params[path] = jax.block_until_ready(place(_finished(host)))
            advance(1)
    return traverse_util.unflatten_dict(params)


def planned_schemes(
    config: Mapping[str, Any], model: Any, shapes: Mapping[str, Any], axes: Mapping[str, Any]
) -> dict[Path, Scheme]:
    """How the leaves of `model` are quantised in a checkpoint, as far as its `quantization_config` tells.

    shapes, axes: of `models.param_shapes`, of one device's part.
    """
    format, fused, shards = read_format(config), model.config.fused(model.shards), model.shards
    candidates = projections(shapes, axes)
    if "lm_head" in shapes:
        candidates["lm_head", "weight"] = shapes["lm_head"]["weight"].shape
    axes_of = traverse_util.flatten_dict(dict(axes))
    found: dict[Path, Scheme] = {}
    matrices: dict[str, tuple[Scheme, int, int]] = {}
    for path, shape in candidates.items():
        _, inputs = shards.shape(shape, axes_of[path])
        names = [part.tensor for part in parts_of(path, shape, fused)]
        schemes = {format.planned(name.removesuffix(".weight"), inputs) for name in names}
        if len(schemes) > 1:
            raise ValueError(f"{' and '.join(map(repr, names))} make up one matrix and are not quantised alike")
        if (scheme := schemes.pop()) is not None:
            found[path], matrices[names[0]] = scheme, (scheme, inputs, shape[1])
    check_cuts(matrices)
    return found


class _Shared:
    """Loads leaves cut over devices: a leaf's path -> the array of all shards, with those of this process filled."""

    def __init__(
        self,
        source: TensorSource,
        stored: Mapping[str, str],
        plan: Mapping[Path, list[Part]],
        schemes: Mapping[Path, Scheme],
        dtype: np.dtype,
        cut: Cut,
    ) -> None:
        self._source, self._stored, self._plan, self._shards = source, stored, plan, cut.shards
        self._schemes, self._dtype = schemes, dtype
        self._shapes = traverse_util.flatten_dict(dict(cut.shapes))
        self._axes = traverse_util.flatten_dict(dict(cut.axes))
        self._local_plan = {path: parts_of(path, leaf.shape, cut.fused) for path, leaf in self._shapes.items()}

    def __call__(self, path: Path) -> Any:
        shards, local_shape, axes = self._shards, self._shapes[path].shape, self._axes[path]
        sharding = shards.sharding(*axes)
        assert sharding is not None
        found, host = [], None
        for index, device in shards.local_devices:
            if host is None or any(axis and shards.cuts(axis) for axis in axes):
                host = _finished(self._read(path, index, local_shape, axes))
            found.append(jax.block_until_ready(jax.device_put(host, device)))

        def all_shards(*arrays: jax.Array) -> jax.Array:
            shape = shards.shape(arrays[0].shape, axes)
            return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays))

        return jax.tree.map(all_shards, *found)

    def _read(
        self, path: Path, index: int, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> np.ndarray | HostMatrix:
        host = _host(shape, self._dtype, self._schemes.get(path))
        for part, local in self._parts_of(path, index):
            out, name = host[local.region], self._stored[part.tensor]
            region = tuple(
                piece(n, have, index, self._shards.size, axis)
                for n, have, axis in zip(self._source.shape(name), out.shape, axes[-out.ndim :], strict=True)
            )
            num_rows = region[0].stop - region[0].start
            out[num_rows:].fill(0)  # behind the end of the vocabulary
            _fill(out[:num_rows], self._source, name, region)
        return host

    def _parts_of(self, path: Path, index: int) -> Iterator[tuple[Part, Part]]:
        """The parts of a leaf that a shard has something of: as they are in the whole leaf, and in the shard's."""
        parts, local = self._plan[path], self._local_plan[path]
        if len(parts) < len(local):
            name = self._stored[parts[0].tensor]
            raise ValueError(f"tensor {name!r} has all experts in one, which cannot be shared out; save them apart")
        # Of a stack, whose parts lie one after the other, perhaps some.
        mine = piece(len(parts), len(local), index, self._shards.size, self._axes[path][0])
        return zip(parts[mine], local, strict=True)


def _stored_schemes(
    plan: Mapping[Path, list[Part]],
    leaves: Mapping[Path, jax.ShapeDtypeStruct],
    stored: Mapping[str, str],
    source: TensorSource,
    cut: Cut | None,
) -> dict[Path, Scheme]:
    """How the leaves are quantised that the source has quantised; ValueError for one that cannot be loaded so."""
    if not isinstance(source, QuantizedSource):
        return {}
    local = traverse_util.flatten_dict(dict(cut.shapes)) if cut else leaves
    found: dict[Path, Scheme] = {}
    names: dict[Path, str] = {}
    for path, parts in plan.items():
        schemes: dict[Scheme | None, str] = {}
        for part in parts:
            schemes.setdefault(source.scheme(stored[part.tensor]), stored[part.tensor])
        scheme, name = next(iter(schemes.items()))
        if set(schemes) == {None}:
            continue
        if path[-1] != "weight" or len(leaves[path].shape) != 2:
            raise ValueError(f"tensor {name!r} is quantised, which is supported for the matrices of projections only")
        if len(schemes) > 1 or scheme is None:
            one, other, *_ = schemes.values()
            raise ValueError(f"tensors {one!r} and {other!r} make up one matrix and are not quantised alike")
        found[path], names[path] = scheme, name
    check_cuts({names[path]: (found[path], leaves[path].shape[1], local[path].shape[1]) for path in found})
    return found


def _host(shape: tuple[int, ...], dtype: np.dtype, scheme: Scheme | None) -> np.ndarray | HostMatrix:
    """Room for a leaf."""
    return aligned_empty(shape, dtype) if scheme is None else HostMatrix.empty(scheme, shape)


def _finished(host: np.ndarray | HostMatrix) -> Any:
    """What goes to a device."""
    return host.packed() if isinstance(host, HostMatrix) else host


def _fill(out: np.ndarray | HostMatrix, source: TensorSource, name: str, region: Region | None = None) -> None:
    """Read a tensor, or a region of it, into its place."""
    if not isinstance(out, HostMatrix):
        source.read_into(name, out, *([] if region is None else [region]))
    elif isinstance(source, QuantizedSource) and source.scheme(name) is not None:
        source.read_quantized(name, out, region)
    else:
        quantize_into(source, name, out, region)
