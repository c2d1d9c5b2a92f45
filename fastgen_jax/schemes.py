"""How a matrix is quantised, and which matrices of a model are, before there are any numbers.

F outputs, E inputs, G groups of inputs that share a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.typing import DTypeLike

from fastgen_jax.quantization import QuantizedMatrix, values_per_byte

Path = tuple[str, ...]
GROUPS = (128, 64, 32, 16)
"""Inputs that share a scale in a matrix that is quantised to int4 here: the first of these that divides them."""

_DTYPES = {"int8": jnp.int8, "int4": jnp.uint8, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True)
class Scheme:
    """What a quantised matrix consists of, beside its sizes.

    kind: one of `quantization.KINDS`. group: inputs that share a scale; None: all of them do. zeros: whether a group
    has a zero of its own. scale_dtype: of the scales.
    """

    kind: str
    group: int | None = None
    zeros: bool = False
    scale_dtype: str = "float32"

    def num_groups(self, inputs: int) -> int:
        return 1 if self.group is None else inputs // self.group

    def shapes(self, outputs: int, inputs: int) -> QuantizedMatrix:
        """The arrays of a matrix [outputs, inputs], as shapes."""
        groups = (outputs, self.num_groups(inputs))
        stored = (outputs, inputs // values_per_byte(self.kind))
        return QuantizedMatrix(
            jax.ShapeDtypeStruct(stored, jnp.dtype(_DTYPES[self.kind])),
            jax.ShapeDtypeStruct(groups, jnp.dtype(self.scale_dtype)),
            jax.ShapeDtypeStruct(groups, jnp.dtype(jnp.int8)) if self.zeros else None,
            self.kind,
        )


NOT_QUANTIZED: Mapping[Path, Scheme] = MappingProxyType({})


def on_load(kind: str, inputs: int, dtype: DTypeLike) -> Scheme:
    """That of a matrix which is quantised while it is loaded: a scale for each output, and of int4 for each group.

    dtype: of the model's activations; the scales of groups, which are many, have it too. A matrix of which no group
    size divides the inputs has one group.
    """
    if kind != "int4":
        return Scheme(kind)
    if inputs % 2:
        raise ValueError(f"quantization='int4' stores two inputs in a byte, and a matrix has {inputs}; use int8")
    group = next((size for size in GROUPS if inputs % size == 0), inputs)
    return Scheme(kind, group, zeros=True, scale_dtype=jnp.dtype(dtype).name)


def check_cuts(matrices: Mapping[str, tuple[Scheme, int, int]]) -> None:
    """ValueError, with the numbers of devices that would do, unless each has whole groups of the inputs that are cut.

    matrices: by name, the scheme, the inputs, and those that one device has.
    """
    cut = {
        name: (scheme.group, inputs, local)
        for name, (scheme, inputs, local) in matrices.items()
        if scheme.group is not None and local != inputs
    }
    for name, (group, inputs, local) in cut.items():
        if local % group:
            groups = [inputs // group for group, inputs, _ in cut.values()]
            valid = ", ".join(str(n) for n in range(1, min(groups) + 1) if not any(count % n for count in groups))
            raise ValueError(
                f"tensor_parallel={inputs // local} cuts the {inputs} inputs of {name!r} within groups of {group}; "
                f"for whole groups it can be {valid}"
            )


def projections(shapes: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[Path, tuple[int, int]]:
    """The matrices that are worth quantising, and their sizes: those that heads or an MLP have one side of.

    shapes, axes: of `models.param_shapes`. Embeddings, heads, norms, routers and stacks of experts are none of them.
    """
    leaves, names = traverse_util.flatten_dict(dict(shapes)), traverse_util.flatten_dict(dict(axes))
    return {
        path: leaf.shape
        for path, leaf in leaves.items()
        if len(leaf.shape) == 2 and {"heads", "mlp"} & set(names[path])
    }


def projections_on_load(
    kind: str, shapes: Mapping[str, Any], axes: Mapping[str, Any], dtype: DTypeLike
) -> dict[Path, Scheme]:
    """How each of the projections is quantised while it is loaded. shapes: of one device's part of them."""
    return {path: on_load(kind, inputs, dtype) for path, (_, inputs) in projections(shapes, axes).items()}


def quantized_shapes(tree: Mapping[str, Any], schemes: Mapping[Path, Scheme]) -> dict[str, Any]:
    """A tree of shapes, with the matrices of `schemes` as they are when quantised."""
    leaves = traverse_util.flatten_dict(dict(tree))
    return traverse_util.unflatten_dict(
        {path: schemes[path].shapes(*leaf.shape) if path in schemes else leaf for path, leaf in leaves.items()}
    )
