"""The paged KV pool: how many blocks there is memory for, and their allocation."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fastgen_jax.kernels import Backend
from fastgen_jax.kernels.fp8 import FP8

LayerKV = tuple[Array, Array]
"""One layer's K and V pools, in the backend's layout."""

CPU_POOL_BYTES = 1 << 30
"""What the pool may take on a CPU unless num_blocks says otherwise."""


def pool_dtype(kv_cache_dtype: str, dtype: Any) -> Any:
    """That of the pools, by an engine's `kv_cache_dtype` and the model's dtype."""
    return {"auto": jnp.dtype(dtype), "fp8": FP8}[kv_cache_dtype]


def block_bytes(model: Any, block_size: int, dtype: Any) -> int:
    """Bytes of one block of pools of `dtype` over all layers, K and V together, on one device."""
    config = model.config
    num_kv_heads = model.shards.local_kv_heads(config.num_kv_heads)
    shapes = model.backend.pool_shapes(1, block_size, num_kv_heads, config.head_dim)
    return sum(math.prod(shape) for shape in shapes) * config.num_layers * jnp.dtype(dtype).itemsize


def free_bytes(device: jax.Device, utilization: float) -> int:
    """What may still be taken on `device`: a share of what JAX may use there, less what is in use."""
    if device.platform == "cpu":
        return CPU_POOL_BYTES
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(f"{device} does not say how much memory it has; set num_blocks")
    return int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"]


def fit_blocks(num_bytes: int, bytes_per_block: int, most: int) -> int:
    """Blocks that fit into `num_bytes`, `most` at most; ValueError if not even two do (one is the null block)."""
    if num_bytes < 2 * bytes_per_block:
        raise ValueError(
            f"no memory for a KV pool: {max(num_bytes, 0):,} bytes are left and a block takes {bytes_per_block:,}; "
            "set num_blocks, lower max_num_batched_tokens, raise gpu_memory_utilization or use a 16-bit dtype "
            "or kv_cache_dtype='fp8'"
        )
    return min(num_bytes // bytes_per_block, most)


def size_pool(num_bytes: int, bytes_per_block: int, most: int, step_bytes: Callable[[int], int]) -> int:
    """Blocks that fit into `num_bytes` beside a step, `most` at most; ValueError as `fit_blocks`.

    step_bytes: blocks of a pool -> what the largest step takes beside it. Asked with the pool as large as it could
        be, so that a copy of it would show.
    """
    num_blocks = fit_blocks(num_bytes, bytes_per_block, most)
    return fit_blocks(num_bytes - step_bytes(num_blocks), bytes_per_block, most)


def allocate(model: Any, num_blocks: int, block_size: int, dtype: Any) -> list[LayerKV]:
    """A zeroed pool of `dtype` for every layer, K and V apart, in the backend's layout; of all shards together."""
    config = model.config
    num_kv_heads = model.shards.pool_kv_heads(config.num_kv_heads)
    return [
        model.backend.allocate(num_blocks, block_size, num_kv_heads, config.head_dim, dtype)
        for _ in range(config.num_layers)
    ]


def axes(backend: Backend) -> tuple[str | None, ...]:
    """The logical axes of a layer's pools, which have four."""
    return tuple("kv_heads" if axis == backend.HEADS_AXIS else None for axis in range(4))
