"""The definition of ragged paged attention, one query token at a time in plain jnp: slow and short.

Pools are [N, B, K, D] each for K and V.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fastgen_jax.kernels.fp8 import times, to_stored

NAME = "reference"
DEFAULT_BLOCK_SIZE = 16
HEADS_AXIS = 2


def supported(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    dtype: DTypeLike,
    platform: str,
    kv_dtype: DTypeLike | None = None,
) -> str | None:
    """None: it runs everything, everywhere."""
    return None


def split_limits(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    dtype: DTypeLike,
    kv_dtype: DTypeLike | None = None,
) -> None:
    """None: rows are not split."""


def pool_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V pool."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return shape, shape


def pool_dims(k_pool: Array, v_pool: Array) -> tuple[int, int, int, int]:
    """(N, B, K, D) of pools made by `allocate`."""
    num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    return num_blocks, block_size, num_kv_heads, head_dim


def allocate(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> tuple[Array, Array]:
    """Empty K and V pools."""
    k_shape, v_shape = pool_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    return jnp.zeros(k_shape, dtype), jnp.zeros(v_shape, dtype)


def write_kv(
    k_pool: Array,
    v_pool: Array,
    k: Array,
    v: Array,
    slot_mapping: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> tuple[Array, Array]:
    """Put token t's k[t], v[t] [K, D] at slot_mapping[t] = block * B + offset; other slots are dropped."""
    num_blocks, block_size, *row = k_pool.shape
    num_slots = num_blocks * block_size
    # A negative index would count from the end.
    slots = jnp.where(slot_mapping < 0, num_slots, slot_mapping)

    def write(pool: Array, new: Array, scale: Array | None) -> Array:
        new = to_stored(new, pool.dtype, scale)
        return pool.reshape(num_slots, *row).at[slots].set(new, mode="drop").reshape(pool.shape)

    return write(k_pool, k, k_scale), write(v_pool, v, v_scale)


def combine(outs: Array, lses: Array) -> Array:
    """The output over all keys from those over splits of them: the definition of Dynamic SplitKV's second kernel.

    outs: [Z, .., D], each normalised over its own keys. lses: [Z, ..], their log-sum-exps (natural logarithm).
    """
    weights = jnp.exp(lses - lses.max(axis=0))
    return jnp.sum(weights[..., None] * outs, axis=0) / jnp.sum(weights, axis=0)[..., None]


def ragged_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    cu_q_lens: Array,
    kv_lens: Array,
    block_tables: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """Attention of each query token over its sequence: `fastgen_jax.kernels.ragged_attention`'s contract."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[2]
    last_row = kv_lens.shape[0] - 1
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def attend(token: Array) -> Array:
        row = jnp.minimum(jnp.sum(cu_q_lens[1:] <= token), last_row)
        position = kv_lens[row] - cu_q_lens[row + 1] + token
        keys = jnp.take(k_pool, block_tables[row], axis=0, mode="clip").reshape(-1, num_kv_heads, head_dim)
        values = jnp.take(v_pool, block_tables[row], axis=0, mode="clip").reshape(-1, num_kv_heads, head_dim)
        key_position = jnp.arange(keys.shape[0])
        visible = (key_position <= position) & (key_position < kv_lens[row])
        if window is not None:
            visible &= key_position > position - window

        query = q[token].reshape(num_kv_heads, -1, head_dim)
        keys = keys.astype(q.dtype)  # exact, of 8 bits
        scores = times(scale, k_scale) * jnp.einsum(
            "kgd,ckd->kgc", query, keys, precision=precision, preferred_element_type=jnp.float32
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible[None, None], scores, jnp.finfo(jnp.float32).min)
        # What lies in slots no query may see can be anything, NaN too, and 0 * NaN is NaN.
        values = jnp.where(visible[:, None, None], values, 0).astype(jnp.float32)
        out = jnp.einsum("kgc,ckd->kgd", jax.nn.softmax(scores), values, precision=jax.lax.Precision.HIGHEST)
        out = jnp.where(token < cu_q_lens[-1], times(out, v_scale), 0)
        return out.reshape(num_heads, head_dim).astype(q.dtype)

    return jax.lax.map(attend, jnp.arange(num_tokens, dtype=jnp.int32))
