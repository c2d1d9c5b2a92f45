"""How long device work takes, without what it costs to start it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

REPEATS = 3
MOST_CALLS = 50


def seconds_per_call(call: Callable[[], Any], min_time_s: float) -> float:
    """Median seconds of a call that returns device arrays.

    Calls are dispatched one behind the other, for `min_time_s` or more, and waited for once, so that the device has
    always the next one waiting and the wait counts for little. The first call, which loads the program, isn't counted.
    """
    jax.block_until_ready(call())
    alone = _seconds(call, 1)
    num_calls = max(1, min(MOST_CALLS, round(min_time_s / alone)))
    return statistics.median(_seconds(call, num_calls) for _ in range(REPEATS))


def _seconds(call: Callable[[], Any], num_calls: int) -> float:
    out = None
    start = time.perf_counter()
    for _ in range(num_calls):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / num_calls


def random_array(seed: int, shape: tuple[int, ...], scale: float = 1.0, dtype: Any = jnp.bfloat16) -> Array:
    """Normally distributed, drawn on the device."""
    return _draw(jax.random.key(seed), shape, scale, dtype)


def _draw_array(key: Array, shape: tuple[int, ...], scale: float, dtype: Any) -> Array:
    return scale * jax.random.normal(key, shape, dtype)


_draw = jax.jit(_draw_array, static_argnums=(1, 2, 3))
