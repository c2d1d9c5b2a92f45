"""The arithmetic of kernel jaxprs in NumPy: evaluated equation by equation, nothing is compiled.

`evaluate` returns `NotImplemented` for a primitive it does not know; the caller then falls back to JAX.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with NumPy)
import numpy as np

Rule = Callable[..., Any]


def _div(x, y):
    """lax.div: integers round towards zero."""
    if not np.issubdtype(np.asarray(x).dtype, np.integer):
        return np.divide(x, y)
    return np.where(y == 0, -1, np.trunc(np.divide(x, np.where(y == 0, 1, y), dtype=np.float64)))


def _reduce(ufunc: np.ufunc) -> Rule:
    return lambda x, *, axes, **_: ufunc.reduce(x, axis=tuple(axes), dtype=np.asarray(x).dtype)


def _broadcast_in_dim(x, *, shape, broadcast_dimensions, **_):
    x = np.asarray(x)
    expanded = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        expanded[axis] = size
    return np.broadcast_to(x.reshape(expanded), shape)


def _iota(*, dtype, shape, dimension, **_):
    along = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension]).astype(dtype).reshape(along), shape)


def _select_n(which, *cases):
    which = np.asarray(which)
    if which.dtype == np.bool_:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _slice(x, *, start_indices, limit_indices, strides, **_):
    strides = strides or (1,) * len(start_indices)
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _integer_pow(x, *, y, **_):
    return functools.reduce(operator.mul, [x] * abs(y)) if y > 0 else np.power(np.asarray(x, np.float32), y)


def _wide(function: Rule) -> Rule:
    """Computes in float32 what NumPy computes poorly or not at all in 16 bits."""
    return lambda x: function(np.asarray(x, np.promote_types(np.asarray(x).dtype, np.float32)))


_UNARY: dict[str, Rule] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exp": _wide(np.exp),
    "exp2": _wide(np.exp2),
    "log": _wide(np.log),
    "log1p": _wide(np.log1p),
    "tanh": _wide(np.tanh),
    "sin": _wide(np.sin),
    "cos": _wide(np.cos),
    "sqrt": _wide(np.sqrt),
    "rsqrt": _wide(lambda x: 1 / np.sqrt(x)),
    "logistic": _wide(lambda x: 1 / (1 + np.exp(-x))),
    "floor": np.floor,
    "ceil": np.ceil,
    "square": np.square,
    "is_finite": np.isfinite,
    "not": np.invert,
    "copy": np.asarray,
    "copy_p": np.asarray,
    "stop_gradient": np.asarray,
    "layout_cast": np.asarray,
}

_BINARY: dict[str, Rule] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
}

_OTHER: dict[str, Rule] = {
    "select_n": _select_n,
    "clamp": lambda low, x, high, **_: np.minimum(np.maximum(x, low), high),
    "convert_element_type": lambda x, *, new_dtype, **_: np.asarray(x).astype(new_dtype),
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "reshape": lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
    "squeeze": lambda x, *, dimensions, **_: np.squeeze(x, tuple(dimensions)),
    "expand_dims": lambda x, *, dimensions, **_: np.expand_dims(x, tuple(dimensions)),
    "transpose": lambda x, *, permutation, **_: np.transpose(x, permutation),
    "concatenate": lambda *xs, dimension, **_: np.concatenate(xs, dimension),
    "slice": _slice,
    "integer_pow": _integer_pow,
    "reduce_sum": _reduce(np.add),
    "reduce_max": _reduce(np.maximum),
    "reduce_min": _reduce(np.minimum),
    "reduce_prod": _reduce(np.multiply),
    "reduce_and": _reduce(np.logical_and),
    "reduce_or": _reduce(np.logical_or),
}


def evaluate(name: str, params: dict[str, Any], inputs: Sequence[Any]) -> Any:
    """What primitive `name` makes of `inputs`, or `NotImplemented`. The dtype may be wider than JAX's."""
    if rule := _UNARY.get(name) or _BINARY.get(name):
        return rule(*inputs)
    if rule := _OTHER.get(name):
        return rule(*inputs, **params)
    if name == "optimization_barrier":
        return list(inputs)
    return NotImplemented


def matmul(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`acc + a @ b`, multiplied and summed in float32 as tensor cores do, in acc's dtype."""
    return (acc.astype(np.float32) + a.astype(np.float32) @ b.astype(np.float32)).astype(acc.dtype)
