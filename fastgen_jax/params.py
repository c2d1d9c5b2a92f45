"""What holds of a whole tree of params, some of whose matrices may be quantised."""

from typing import Any

import jax
import jax.numpy as jnp

from fastgen_jax.models.layers import Params
from fastgen_jax.quantization import QuantizedMatrix


def check_same(old: Params, new: Params) -> None:
    """ValueError naming the first leaf of `new` that is missing, surplus, or of another shape or dtype."""

    def leaves(tree: Params) -> dict[str, Any]:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    have, want = leaves(new), leaves(old)
    if names := sorted(set(have) ^ set(want)):
        raise ValueError(f"the new params {'lack' if names[0] in want else 'have a surplus'} {names[0]}")
    for name, leaf in want.items():
        found = have[name]
        if (found.shape, jnp.dtype(found.dtype)) != (leaf.shape, jnp.dtype(leaf.dtype)):
            raise ValueError(f"{name} is {found.dtype}{list(found.shape)}; it must be {leaf.dtype}{list(leaf.shape)}")


def one_dtype(params: Params) -> Any:
    """The dtype of all of `params` that are not quantised, which is that of the activations.

    ValueError naming a leaf that has another than the first.
    """
    (_, first), *others = [(path, leaf) for path, leaf in leaves_with_path(params) if not is_quantized(leaf)]
    for path, leaf in others:
        if leaf.dtype != first.dtype:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"params are of one dtype: {name} is {leaf.dtype} and the first leaf {first.dtype}")
    return first.dtype


def quantization(params: Params) -> str | None:
    """The kinds that the quantised matrices of `params` have, with commas between them; None without any."""
    kinds = {leaf.kind for _, leaf in leaves_with_path(params) if is_quantized(leaf)}
    return ", ".join(sorted(kinds)) or None


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedMatrix)


def leaves_with_path(params: Params) -> list[tuple[Any, Any]]:
    """As JAX has it, a quantised matrix being one leaf."""
    return jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
