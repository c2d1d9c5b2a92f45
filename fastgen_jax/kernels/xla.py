"""Ragged paged attention in plain XLA: the fast path on CPUs, and for GPUs that no kernel supports.

Work follows the tokens attended to, not the padded block table: inside one program two loops with trip
counts computed on the device run over exactly the chunks of keys that some query sees. Rows of one query
token (decodes) are cut into chunks and a batch of chunks, of whatever rows, makes one dot; longer rows
(prompt chunks) are cut into tiles of queries, and a tile visits its chunks one by one. Both merge chunks as
FlashAttention does (arXiv 2205.14135): running maximum m, sum l and unnormalised output o, in float32.

K pool [N, K, D, B], V pool [N, K, B, D]: on a CPU the scores of few queries want the keys along the lanes.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fastgen_jax.kernels.fp8 import as_bits, from_bits, times, to_stored

NAME = "xla"
DEFAULT_BLOCK_SIZE = 128
HEADS_AXIS = 1

# Chosen by measurement on two CPU cores: scripts/bench_attention.py, and docs/performance.md, "What was tried".
_TILE = 128  # queries of one prompt tile
_PROMPT_CHUNK = 128  # keys a tile visits at a time
_SEEN_CHUNK = 256  # likewise, of keys that all its queries see
_DECODE_CHUNK = 64  # keys of one decode row in a batch
_DECODE_BATCH_BYTES = 3 << 20  # K and V of one batch of chunks: what the cores' L2 caches hold
_DECODE_BATCH_MAX = 32

_MASKED = -1e30  # finite: (-inf) - (-inf) is NaN where a whole chunk is masked


def supported(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    dtype: DTypeLike,
    platform: str,
    kv_dtype: DTypeLike | None = None,
) -> str | None:
    """None: it runs every shape, dtype and platform."""
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
    return (
        (num_blocks, num_kv_heads, head_dim, block_size),
        (num_blocks, num_kv_heads, block_size, head_dim),
    )


def pool_dims(k_pool: Array, v_pool: Array) -> tuple[int, int, int, int]:
    """(N, B, K, D) of pools made by `allocate`."""
    num_blocks, num_kv_heads, head_dim, block_size = k_pool.shape
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
    """Put token t's k[t], v[t] [K, D] at slot_mapping[t] = block * B + offset; other slots are dropped.

    In place when the pools are donated.
    """
    num_blocks, block_size, _, _ = pool_dims(k_pool, v_pool)
    # A negative index would count from the end.
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size
    k, v = as_bits(to_stored(k, k_pool.dtype, k_scale)), as_bits(to_stored(v, v_pool.dtype, v_scale))
    k_bits = as_bits(k_pool).at[block, :, :, offset].set(k, mode="drop")
    v_bits = as_bits(v_pool).at[block, :, offset, :].set(v, mode="drop")
    return from_bits(k_bits, k_pool.dtype), from_bits(v_bits, v_pool.dtype)


type _Partial = tuple[Array, Array, Array]  # m, l, o of the chunks visited so far


class _Maths(NamedTuple):
    """What the output depends on beside q, k and v. scale: of the scores, k's included. v_scale: None is 1."""

    scale: float | Array
    window: int | None
    softcap: float | None
    v_scale: Array | None

    def first_key(self, position: Array) -> Array:
        """The first key that a query at `position` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - self.window + 1, 0)

    def scores(self, dots: Array, visible: Array | None) -> Array:
        """visible: which of them count; None is all."""
        scores = dots * self.scale
        if self.softcap is not None:
            scores = jnp.tanh(scores / self.softcap) * self.softcap
        return scores if visible is None else jnp.where(visible, scores, _MASKED)

    def normalised(self, l: Array, o: Array) -> Array:
        """o / l, and zeros where no key was seen."""
        return times(o / jnp.where(l > 0, l, 1)[..., None], self.v_scale)


@partial(jax.jit, static_argnames=("scale", "window", "softcap"))
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
    maths = _Maths(times(scale, k_scale), window, softcap, v_scale)
    with jax.named_scope("prompt_tiles"):
        out = _attend_prompts(q, k_pool, v_pool, cu_q_lens, kv_lens, block_tables, maths)
    with jax.named_scope("decode_rows"):
        is_decode = jnp.diff(cu_q_lens) == 1
        row_token = jnp.where(is_decode, cu_q_lens[:-1], q.shape[0])
        q_rows = jnp.where(is_decode[:, None, None], jnp.take(q, row_token, axis=0, mode="clip"), 0)
        rows = _attend_decodes(q_rows, k_pool, v_pool, is_decode, kv_lens, block_tables, maths)
        return out.at[row_token].set(rows, mode="drop")


def _attend_decodes(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    is_decode: Array,
    kv_lens: Array,
    block_tables: Array,
    maths: _Maths,
) -> Array:
    """Row s's single query q[s] over its kv_lens[s] keys, where is_decode[s]: [S, H, D]; elsewhere zeros."""
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = pool_dims(k_pool, v_pool)
    blocks_per_chunk = max(_DECODE_CHUNK // block_size, 1)
    chunk = blocks_per_chunk * block_size
    chunk_bytes = 2 * num_kv_heads * head_dim * chunk * q.dtype.itemsize
    batch = max(1, min(_DECODE_BATCH_MAX, _DECODE_BATCH_BYTES // chunk_bytes))
    q = q.reshape(num_rows, num_kv_heads, -1, head_dim)

    # Items are (row, chunk), numbered row by row; row s owns items [ends[s] - num_chunks[s], ends[s]).
    first_key = maths.first_key(kv_lens - 1)
    first_chunk = first_key // chunk
    num_chunks = jnp.where(is_decode, _ceil_div(kv_lens, chunk) - first_chunk, 0)
    ends = jnp.cumsum(num_chunks, dtype=jnp.int32)
    chunk_of_item_0 = first_chunk - (ends - num_chunks)

    def visit(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        item, m, l, o = state
        items = item + jnp.arange(batch, dtype=jnp.int32)
        row = _owner(ends, items)  # num_rows past the last item: reads are clipped, writes dropped
        chunk_id = items + _take(chunk_of_item_0, row)
        key_position = chunk_id[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)[None]
        visible = (key_position >= _take(first_key, row)[:, None]) & (key_position < _take(kv_lens, row)[:, None])
        keys, values = _gather_chunks(
            k_pool, v_pool, jnp.minimum(row, num_rows - 1), chunk_id, block_tables, blocks_per_chunk, q.dtype
        )
        values = jnp.where(visible[:, None, :, None], values, 0)  # 0 * NaN is NaN
        scores = maths.scores(_dot("wkgd,wkdc->wkgc", _take(q, row), keys), visible[:, None, None, :])
        m_item = scores.max(-1)
        weights = jnp.exp(scores - m_item[..., None])
        o_item = _dot("wkgc,wkcd->wkgd", weights.astype(values.dtype), values)

        m_new = m.at[row].max(m_item, mode="drop")
        keep, add = jnp.exp(m - m_new), jnp.exp(m_item - _take(m_new, row))
        l = (l * keep).at[row].add(weights.sum(-1) * add, mode="drop")
        o = (o * keep[..., None]).at[row].add(o_item * add[..., None], mode="drop")
        return item + batch, m_new, l, o

    start = jnp.int32(0), *_empty(q.shape)
    _, _, l, o = lax.while_loop(lambda state: state[0] < ends[-1], visit, start)
    return maths.normalised(l, o).reshape(num_rows, num_heads, head_dim).astype(q.dtype)


def _attend_prompts(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    cu_q_lens: Array,
    kv_lens: Array,
    block_tables: Array,
    maths: _Maths,
) -> Array:
    """Attention of the rows of more than one query: [T, H, D], zeros for every other token."""
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = pool_dims(k_pool, v_pool)
    group = num_heads // num_kv_heads
    chunk, seen_chunk = (max(size // block_size, 1) * block_size for size in (_PROMPT_CHUNK, _SEEN_CHUNK))
    tile = min(_TILE, num_tokens)

    q_lens = jnp.diff(cu_q_lens)
    num_tiles = jnp.where(q_lens > 1, _ceil_div(q_lens, tile), 0)
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)

    def attend_tile(index: Array, out: Array) -> Array:
        row = _owner(ends, index[None])[0]
        q_end, kv_len = cu_q_lens[row + 1], kv_lens[row]
        start = cu_q_lens[row] + (index - ends[row] + num_tiles[row]) * tile
        stop = jnp.minimum(start + tile, q_end)
        to_position = kv_len - q_end  # of a token of this row
        # The slice of `tile` tokens may have to begin before the tile, or reach past it.
        at = jnp.minimum(start, num_tokens - tile)
        token = at + jnp.arange(tile, dtype=jnp.int32)
        owned = (token >= start) & (token < stop)
        query = lax.dynamic_slice_in_dim(q, at, tile).reshape(tile, num_kv_heads, group, head_dim)
        query = query.swapaxes(0, 1).reshape(num_kv_heads, tile * group, head_dim)
        position = jnp.repeat(token + to_position, group)
        first_key = maths.first_key(start + to_position)

        def visit(chunk_id: Array, state: _Partial, size: int = chunk, all_seen: bool = False) -> _Partial:
            m, l, o = state
            keys, values = _gather_chunks(
                k_pool, v_pool, row[None], chunk_id[None], block_tables, size // block_size, q.dtype
            )
            keys, values, visible = keys[0], values[0], None
            if not all_seen:
                key_position = chunk_id * size + jnp.arange(size, dtype=jnp.int32)
                visible = key_position[None] <= position[:, None]
                if maths.window is not None:
                    visible &= key_position[None] > position[:, None] - maths.window
                used = (key_position >= first_key) & (key_position < kv_len)
                values = jnp.where(used[None, :, None], values, 0)  # 0 * NaN is NaN
                visible = (visible & used[None])[None]
            scores = maths.scores(_dot("kmd,kdc->kmc", query, keys), visible)
            m_new = jnp.maximum(m, scores.max(-1))
            weights, keep = jnp.exp(scores - m_new[..., None]), jnp.exp(m - m_new)
            o_chunk = _dot("kmc,kcd->kmd", weights.astype(values.dtype), values)
            return m_new, l * keep + weights.sum(-1), o * keep[..., None] + o_chunk

        state, first_chunk = _empty(query.shape), first_key // chunk
        if maths.window is None:  # every query sees what the first one does
            num_seen = (start + to_position + 1) // seen_chunk
            state = lax.fori_loop(0, num_seen, partial(visit, size=seen_chunk, all_seen=True), state)
            first_chunk = num_seen * (seen_chunk // chunk)
        last_key = stop - 1 + to_position
        _, l, o = lax.fori_loop(first_chunk, last_key // chunk + 1, visit, state)
        o = maths.normalised(l, o).reshape(num_kv_heads, tile, group, head_dim).swapaxes(0, 1)
        o = o.reshape(tile, num_heads, head_dim).astype(q.dtype)
        o = jnp.where(owned[:, None, None], o, lax.dynamic_slice_in_dim(out, at, tile))
        return lax.dynamic_update_slice_in_dim(out, o, at, 0)

    return lax.fori_loop(0, ends[-1], attend_tile, jnp.zeros_like(q))


def _gather_chunks(
    k_pool: Array,
    v_pool: Array,
    row: Array,
    chunk_id: Array,
    block_tables: Array,
    blocks_per_chunk: int,
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """Chunk chunk_id[w] of row[w], in `dtype`: keys [W, K, D, C] and values [W, K, C, D]."""
    num_blocks, block_size, num_kv_heads, head_dim = pool_dims(k_pool, v_pool)
    column = chunk_id[:, None] * blocks_per_chunk + jnp.arange(blocks_per_chunk, dtype=jnp.int32)[None]
    # Past the table's end there are only keys past kv_len, which are masked.
    block = block_tables[row[:, None], jnp.minimum(column, block_tables.shape[1] - 1)]
    # One row per block: gathering from the flat view takes half the time of a 4-D gather.
    keys = from_bits(_take(as_bits(k_pool).reshape(num_blocks, -1), block), k_pool.dtype).astype(dtype)
    values = from_bits(_take(as_bits(v_pool).reshape(num_blocks, -1), block), v_pool.dtype).astype(dtype)
    keys = keys.reshape(-1, blocks_per_chunk, num_kv_heads, head_dim, block_size)
    values = values.reshape(-1, blocks_per_chunk, num_kv_heads, block_size, head_dim)
    size = blocks_per_chunk * block_size
    keys = keys.transpose(0, 2, 3, 1, 4).reshape(-1, num_kv_heads, head_dim, size)
    return keys, values.swapaxes(1, 2).reshape(-1, num_kv_heads, size, head_dim)


def _take(table: Array, index: Array) -> Array:
    return jnp.take(table, index, axis=0, mode="clip")


def _dot(equation: str, a: Array, b: Array) -> Array:
    """A float32 result; true float32 throughout when the operands are."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _empty(query_shape: tuple[int, ...]) -> _Partial:
    """The partial result of queries [..., D] that have seen no key."""
    l = jnp.zeros(query_shape[:-1], jnp.float32)
    return l + _MASKED, l, jnp.zeros(query_shape, jnp.float32)


def _owner(ends: Array, index: Array) -> Array:
    """For each index, the row s with ends[s - 1] <= index < ends[s]; len(ends) past the last."""
    return jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)


def _ceil_div(a: Array, b: int) -> Array:
    return -(-a // b)
