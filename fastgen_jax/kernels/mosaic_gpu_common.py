"""What the Hopper and the portable attention kernels share: the walk over a work list, the masks, the output.

Their thread blocks are persistent: thread block c takes every C-th unit, a unit being one work item for one KV
head. A warpgroup owns 64 rows of M, which fold query tokens and the G query heads of the KV head, so that a block
of K and V is read once for all of them. Keys come in stages of `kv_tile`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from fastgen_jax.kernels import work

ROWS = 64
LSE_COLUMNS = 128  # 64 rows, padded to what a warpgroup stores at once
MASKED = -1e30  # finite: (-inf) - (-inf) is NaN where a whole stage is masked
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """One compiled variant of an attention kernel.

    dtype: of queries and output. kv_dtype: of the pools. head_dim: the pools', padded. splits: whether the work list
    is of splits of one token's keys, or of tiles. num_warpgroups: of those that compute. kv_tile: keys of a stage, of
    which num_stages are in shared memory. num_ctas: thread blocks of the launch.
    """

    dtype: DTypeLike
    kv_dtype: DTypeLike
    head_dim: int
    group: int
    block_size: int
    scale: float
    window: int | None
    softcap: float | None
    splits: bool
    num_warpgroups: int
    kv_tile: int
    num_stages: int
    num_ctas: int

    @property
    def warpgroup_tokens(self) -> int:
        """Query tokens of one warpgroup."""
        return ROWS // self.group

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a work item."""
        return self.num_warpgroups * self.warpgroup_tokens

    @property
    def copy_rows(self) -> int:
        """Keys of one copy: a block, or the part of one that a stage holds."""
        return min(self.block_size, self.kv_tile)

    @property
    def tile_columns(self) -> int:
        """Columns of a row that lie together in shared memory: a swizzle's 128 or 64 bytes."""
        return 64 if self.head_dim % 64 == 0 else 32

    @property
    def transforms(self) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
        """Layout in shared memory of q, and of K and V as they are multiplied."""
        return plgpu.TilingTransform((8, self.tile_columns)), plgpu.SwizzleTransform(2 * self.tile_columns)

    @property
    def widens(self) -> bool:
        """Whether K and V come in 8 bits a number, and are made 16 in shared memory before they are multiplied."""
        return jnp.dtype(self.kv_dtype) != jnp.dtype(self.dtype)

    @property
    def kv_transforms(self) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
        """Layout in shared memory of K and V as they come, in tiles of the same numbers as `transforms`."""
        row_bytes = jnp.dtype(self.kv_dtype).itemsize * self.tile_columns
        return plgpu.TilingTransform((8, self.tile_columns)), plgpu.SwizzleTransform(row_bytes)

    @property
    def out_dim(self) -> int:
        """D of the output, padded so that a warpgroup's 128 threads store a token's G rows evenly."""
        unit = 64 if self.group % 2 == 0 and self.head_dim <= 64 else 128
        return -(-self.head_dim // unit) * unit

    @property
    def store_columns(self) -> int:
        """Columns of the output that are stored at a time."""
        return min(self.out_dim, 128)

    @property
    def store_dtype(self) -> DTypeLike:
        """Of the output while it lies in shared memory."""
        return jnp.float32 if self.splits else self.dtype

    @property
    def store_heads(self) -> int:
        """Of the G heads of a token, those that lie together in the output, for the columns stored at a time."""
        return self.group if self.out_dim == self.store_columns else 1

    def strided(self, num_rows: int) -> Any:
        """Layout of `num_rows` rows of `store_columns`, even over the threads, 16 bytes each where that goes."""
        vec_size = math.gcd(num_rows * self.store_columns // 128, 16 // jnp.dtype(self.store_dtype).itemsize)
        return plgpu.Layout.WG_STRIDED((num_rows, self.store_columns), vec_size=vec_size)


def ceil_div(a: Any, b: Any) -> Array:
    """a / b rounded up, neither negative: `//` would spend instructions on signs."""
    return lax.div(a + (b - 1), b)


def for_each_unit(c: Config, num_items: Any, num_kv_heads: int, body: Callable[[Array, Array, Array], Array]) -> None:
    """body(item, KV head, step) -> step, for each unit of this thread block; step, from 0, counts KV stages."""
    num_units = num_items[0] * num_kv_heads
    cta = lax.axis_index("cta")

    def one(i: Array, step: Array) -> Array:
        # Back and forth: the longest come first, and nobody takes the longer one of each round.
        unit = i * c.num_ctas + jnp.where(lax.rem(i, 2) == 0, cta, c.num_ctas - 1 - cta)

        def run(step: Array) -> Array:
            return body(lax.div(unit, num_kv_heads), lax.rem(unit, num_kv_heads), step)

        return lax.cond(unit < num_units, run, lambda step: step, step)

    lax.fori_loop(0, ceil_div(num_units, c.num_ctas), one, jnp.int32(0))


def stages_of(c: Config, items: Any, item: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
    """Number of an item's stages, how many of them need a mask, and the first key of the i-th; those come first."""
    start, stop, position = (items[item, field] for field in (work.KV_START, work.KV_STOP, work.POSITION))
    count = ceil_div(stop - start, c.kv_tile)
    # Keys up to the first query's position are seen by every query of the item, but for those a window hides.
    full_stop = jnp.minimum(lax.div(jnp.maximum(jnp.minimum(position + 1, stop) - start, 0), c.kv_tile), count)
    full_start = jnp.int32(0)
    if c.window is not None:
        hidden = position + (1 if c.splits else c.tile_tokens) - c.window - start
        full_start = jnp.minimum(ceil_div(jnp.maximum(hidden, 0), c.kv_tile), full_stop)
    num_after = count - full_stop

    def first_key(i: Array) -> Array:
        return start + jnp.where(i < num_after, full_stop + i, i - num_after) * c.kv_tile

    return count, num_after + full_start, first_key


def block_of(c: Config, items: Any, item: Array, tables: Any, key: Array) -> Array:
    """The block of a key; of the last one for keys past the end, whose copy is as large and whose scores are masked."""
    last = lax.div(items[item, work.KV_STOP] - 1, c.block_size)
    return tables[items[item, work.ROW], jnp.minimum(lax.div(key, c.block_size), last)]


def visible(c: Config, position: Array, first_key: Array, kv_stop: Array, layout: Any) -> Array:
    """bool [64, kv_tile]: which keys of a stage each row of M sees. position: of the warpgroup's first token."""
    shape = (ROWS, c.kv_tile)
    key = first_key + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    if c.splits:  # one token
        seen = key < kv_stop
        return seen if c.window is None else seen & (key > position - c.window)
    token = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout), c.group)
    seen = key <= jnp.minimum(token + position, kv_stop - 1)
    return seen if c.window is None else seen & (key > token + (position - c.window))


def weigh(
    c: Config, scale: float | Array, scores: Array, seen: Array | None, acc: Array, m: Array, l: Array
) -> tuple[Array, ...]:
    """Softmax goes on with a stage's scores q . k [64, kv_tile] -> its weights, and acc, m and l brought up to date.

    scale: what the scores are multiplied by. seen: where they count; None is everywhere. acc [64, D], m and l [64]
    are the output, the maximum and the sum of the stages before, as in FlashAttention (arXiv 2205.14135). In powers of
    2, with the scale applied within the exponent's multiply-add.
    """
    if c.softcap is not None:
        scores, scale = jnp.tanh(scores * (scale / c.softcap)), c.softcap
    scale = scale * LOG2E
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    m_new = jnp.maximum(m, scores.max(axis=1) * scale)
    p = jnp.exp2(scores * scale - lax.broadcast_in_dim(m_new, scores.shape, [0]))
    rescale = jnp.exp2(m - m_new)
    l = l * rescale + p.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
    return p, acc, m_new, l


def is_edge(c: Config, first_key: Array, position: Array, kv_stop: Array) -> Array:
    """Whether a stage holds slots that no query of the item sees. position: of the item's first token."""
    edge = first_key + c.kv_tile > kv_stop
    return edge if c.window is None else edge | (first_key <= position - c.window)


def clear_unseen(
    c: Config, part: Any, key: Array, position: Array, kv_stop: Array, layout: Any = plgpu.Layout.WGMMA
) -> None:
    """Zero the values of `part` of shared memory that no query of the item sees: 0 * NaN is NaN.

    key: of each value. layout: key's.
    """
    seen = key < kv_stop
    if c.window is not None:
        seen &= key > position - c.window
    values = plgpu.load(part, layout=layout)
    part[...] = jnp.where(seen, values, jnp.zeros_like(values))


def store(c: Config, items: Any, item: Array, head: Array, column: int, wg: Any, output: Any, out: Any, partial: Any):
    """Store `store_columns` columns of an item's output, which lie in `output` [64, ..] of shared memory.

    out: [T, K, G, Do]. partial: [W, K, G, Do], for an item whose row has several.
    """
    columns, width = pl.ds(column, c.store_columns), pl.ds(0, c.store_columns)
    first_token = items[item, work.TOKEN] + wg * c.warpgroup_tokens
    count = jnp.clip(items[item, work.NUM_TOKENS] - wg * c.warpgroup_tokens, 0, c.warpgroup_tokens)

    def part(i: Array) -> tuple[Array, Any, Array]:
        """The i-th part of the output that is stored at a time: its token, its heads, its values."""
        parts = c.group // c.store_heads
        heads = pl.ds(lax.rem(i, parts) * c.store_heads, c.store_heads)
        rows = output.at[pl.ds(i * c.store_heads, c.store_heads), width]
        return lax.div(i, parts), heads, plgpu.load(rows, layout=c.strided(c.store_heads))

    def store_tokens() -> None:
        def one(i: Array, _: None) -> None:
            token, heads, rows = part(i)
            out[first_token + token, head, heads, columns] = rows.astype(out.dtype)

        lax.fori_loop(0, count * (c.group // c.store_heads), one, None)

    def store_tile() -> None:
        rows = plgpu.load(output.at[:, width], layout=c.strided(ROWS))
        out[pl.ds(first_token, ROWS), head, 0, columns] = rows.astype(out.dtype)

    def store_partial() -> None:
        def one(i: Array, _: None) -> None:
            _, heads, rows = part(i)
            partial[items[item, work.SLOT], head, heads, columns] = rows

        lax.fori_loop(0, c.group // c.store_heads, one, None)

    if c.splits:
        lax.cond(items[item, work.SLOT] < 0, store_tokens, store_partial)
    elif c.group == 1:
        lax.cond(count == ROWS, store_tile, store_tokens)
    else:
        store_tokens()


def store_lse(items: Any, item: Array, head: Array, lse: Array, staging: Any, partial_lse: Any) -> None:
    """Store the log-sum-exp [64] of an item whose row has several, by way of `staging` [128] of shared memory."""

    @pl.when(items[item, work.SLOT] >= 0)
    def _() -> None:
        staging[pl.ds(0, ROWS)] = lse
        layout = plgpu.Layout.WG_STRIDED((LSE_COLUMNS,), vec_size=1)
        partial_lse[items[item, work.SLOT], head] = plgpu.load(staging, layout=layout)
