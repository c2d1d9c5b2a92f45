"""What each thread block of an attention launch does, worked out on the device from the batch's lengths.

Two lists of work items, padded to a fixed length, so that any mix of rows is one compiled program. `tiles` cuts
the rows of several query tokens into tiles of queries; `splits` cuts the keys of the rows of one query token.
An item is done once for each KV head. Items come longest first, which evens out the thread blocks' loads.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

ROW, TOKEN, NUM_TOKENS, POSITION, KV_START, KV_STOP, SLOT = range(7)
"""Columns of an item: the row of the block table; its first query token, how many and the first one's position;
the keys [KV_START, KV_STOP) it reads, from a block's beginning; the slot of its partial result, -1 for none."""

MIN_SPLIT_TOKENS = 512
MAX_SPLITS = 16  # of a row, where the caller does not say


class Work(NamedTuple):
    """items: int32 [W, 7]. num_items: int32 [1], how many of them are real."""

    items: Array
    num_items: Array


class SplitWork(NamedTuple):
    """rows: int32 [C, 3], the rows of several splits: token, first slot, number of slots. num_rows: int32 [1]."""

    work: Work
    rows: Array
    num_rows: Array


def tiles(
    cu_q_lens: Array, kv_lens: Array, num_tokens: int, *, tile_tokens: int, block_size: int, window: int | None
) -> Work:
    """Tiles of at most `tile_tokens` queries of one row, of the rows of more than one query.

    The tokens past cu_q_lens[-1] are tiles that read no key, so that their output is written too.
    """
    q_lens = jnp.append(jnp.diff(cu_q_lens), num_tokens - cu_q_lens[-1])
    kv_lens = jnp.append(kv_lens, q_lens[-1])
    last = len(q_lens) - 1
    counts = jnp.where((q_lens > 1) | (jnp.arange(last + 1) == last), -(-q_lens // tile_tokens), 0)
    most_rows = min(last, num_tokens // 2) + 1
    most = num_tokens // tile_tokens + most_rows
    row, index, num_items = _expand(counts, most)
    start = index * tile_tokens
    num = jnp.minimum(tile_tokens, q_lens[row] - start)
    position = kv_lens[row] - q_lens[row] + start
    stop = jnp.where(row == last, 0, position + num)
    first = jnp.where(row == last, 0, _first_key(position, block_size, window))
    items = jnp.stack((row, cu_q_lens[row] + start, num, position, first, stop, jnp.full_like(row, -1)), axis=1)
    real = jnp.arange(most) < num_items
    order = jnp.argsort(jnp.where(real, first - stop, 1), stable=True)
    return Work(items[order], num_items[None])


def splits(
    cu_q_lens: Array,
    kv_lens: Array,
    num_splits: Array | None,
    *,
    max_items: int,
    block_size: int,
    window: int | None,
) -> SplitWork:
    """Splits of the keys of the rows of one query, as equal as whole blocks allow.

    num_splits: int32 [S]; None is kv_lens // 512, at most 16. Fewer where a window leaves less to split, and
    where there would be more than `max_items` items.
    """
    num_rows = len(kv_lens)
    first = _first_key(kv_lens - 1, block_size, window)
    num_blocks = -(-(kv_lens - first) // block_size)
    fit = jnp.clip((kv_lens - first) // MIN_SPLIT_TOKENS, 1)
    counts = jnp.minimum(MAX_SPLITS if num_splits is None else jnp.clip(num_splits, 1), fit)
    counts = jnp.where(jnp.diff(cu_q_lens) == 1, counts, 0)
    extra = jnp.clip(counts - 1, 0)
    counts = jnp.where(jnp.cumsum(extra) <= max_items - num_rows, counts, jnp.minimum(counts, 1))

    row, index, num_items = _expand(counts, max_items)
    start = first[row] + index * num_blocks[row] // jnp.clip(counts[row], 1) * block_size
    stop = first[row] + (index + 1) * num_blocks[row] // jnp.clip(counts[row], 1) * block_size
    stop = jnp.minimum(stop, kv_lens[row])
    item = jnp.arange(max_items, dtype=jnp.int32)
    slot = jnp.where(counts[row] > 1, item, -1)
    items = jnp.stack((row, cu_q_lens[row], jnp.ones_like(row), kv_lens[row] - 1, start, stop, slot), axis=1)
    order = jnp.argsort(jnp.where(item < num_items, start - stop, 1), stable=True)

    (split,) = jnp.nonzero(counts > 1, size=min(num_rows, max_items - num_rows), fill_value=0)
    first_slot = jnp.cumsum(counts) - counts
    rows = jnp.stack((cu_q_lens[:-1], first_slot, counts), axis=1)[split]
    work = Work(items[order].astype(jnp.int32), num_items[None])
    return SplitWork(work, rows.astype(jnp.int32), jnp.sum(counts > 1, dtype=jnp.int32)[None])


def _expand(counts: Array, most: int) -> tuple[Array, Array, Array]:
    """For each of `most` items its owner and its index there, and the number of real items, sum(counts)."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    item = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32), len(counts) - 1)
    return owner, item - (ends[owner] - counts[owner]), ends[-1]


def _first_key(position: Array, block_size: int, window: int | None) -> Array:
    """The beginning of the block of the first key that a query at `position` sees."""
    if window is None:
        return jnp.zeros_like(position)
    return jnp.clip(position - window + 1, 0) // block_size * block_size
