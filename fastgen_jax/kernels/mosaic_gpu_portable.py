"""Ragged paged attention for the GPUs without wgmma: sm_80, sm_86, sm_89 and sm_100a.

As in FlashAttention-2 (arXiv 2307.08691) each warp multiplies its own 16 rows of M by `mma`. Every thread block is
one warpgroup of 64 rows, which copies several stages of keys ahead itself; several thread blocks on an SM hide each
other's waits. The copies are cp.async before Hopper and TMA after it.
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from fastgen_jax.kernels import mosaic_gpu_common, work
from fastgen_jax.kernels.mosaic_gpu_common import (
    MASKED,
    ROWS,
    block_of,
    clear_unseen,
    for_each_unit,
    is_edge,
    stages_of,
    store,
    visible,
    weigh,
)
from fastgen_jax.kernels.mosaic_gpu_widen import in_16_bits, output_scale, score_scale

QUERY_PADDING = ROWS
"""Rows of q behind the last token's, which the last tile may read."""

MAX_STAGES = 4
MMA_DEPTH = 16  # keys of one mma
RESERVED_SMEM = 1024  # of each thread block, by CUDA
OTHER_SMEM = 1024  # of each thread block: barriers, and a byte that the compiler adds


@dataclass(frozen=True)
class Config(mosaic_gpu_common.Config):
    """tma: whether copies signal barriers, as from Hopper on, or are waited for in order."""

    tma: bool

    @property
    def num_copies(self) -> int:
        """Copies of the keys of a stage, and as many of its values."""
        return self.kv_tile // self.copy_rows

    @property
    def tile_columns(self) -> int:
        """As the base class's, but cp.async wants four tiles, one for each warp, in the 8-row tiles of a copy."""
        if self.tma or self.copy_rows > 16:
            return super().tile_columns
        return next(columns for columns in (64, 32, 16) if self.head_dim % (2 * columns) == 0)

    @property
    def reload_queries(self) -> bool:
        """Whether the queries are read from shared memory for each stage: there are not registers for more."""
        return self.head_dim > 128


def config(
    capability: tuple[int, int], num_sms: int, smem_bytes: int, *, head_dim: int, splits: bool, **shape: Any
) -> Config:
    """The variant for a shape: two thread blocks on each SM, if two stages for each fit in its shared memory.

    shape: `dtype`, `kv_dtype`, `group`, `block_size`, `scale`, `window` and `softcap` of `Config`.
    """
    tma = capability >= (9, 0)
    # Many keys at a time cost less each, as far as registers go; copies by TMA take a few more.
    tiles = (64, 32) if head_dim <= 64 else (32, 16) if head_dim <= 128 or not tma else (16,)
    odd_to_widen = shape["kv_dtype"] != shape["dtype"] and head_dim > 128 and head_dim % 128 > 0
    if odd_to_widen:  # tiles of 16 keys and 64 columns have no layout for it that keeps to the banks
        tiles = (32, 16)
    sizes = {"num_warpgroups": 1, "kv_tile": tiles[0], "num_stages": 2, "num_ctas": num_sms}
    c = Config(head_dim=head_dim, splits=splits, tma=tma, **sizes, **shape)
    item = jnp.dtype(c.dtype).itemsize
    output = ROWS * (c.store_columns + 8) * jnp.dtype(c.store_dtype).itemsize
    other = output + OTHER_SMEM + (ROWS * head_dim * item if c.reload_queries else 0)
    kv_item = jnp.dtype(c.kv_dtype).itemsize
    choices = list(itertools.product((2, 1), tiles))
    if head_dim % 64 or odd_to_widen:  # 16 keys are no multiple of 16 bytes for each thread
        choices.sort(key=lambda choice: -choice[1])
    for ctas_per_sm, kv_tile in choices:
        free = (smem_bytes + RESERVED_SMEM) // ctas_per_sm - RESERVED_SMEM - other
        if c.widens:
            free -= kv_tile * head_dim * item
        num_stages = min(MAX_STAGES, free // (2 * kv_tile * head_dim * kv_item))
        if num_stages >= 2:
            break
    return replace(c, num_ctas=ctas_per_sm * num_sms, kv_tile=kv_tile, num_stages=num_stages)


def kernel(c: Config, q, k_pool, v_pool, items, num_items, tables, *rest) -> None:
    """The body. q: [K, T * G + padding, D]; pools: [N, K, B, D].

    rest: of pools of 8 bits their scales, float32 [2]; out [T, K, G, Do], partials, scratch.
    """
    kv_scales, *refs = rest if c.widens else (None, *rest)
    if c.splits:
        out, partial_out, partial_lse, *scratch = refs
    else:
        (out, *scratch), partial_out, partial_lse = refs, None, None
    q_s, k_s, v_s, wide_s, output, k_ready, v_ready = scratch
    scale = score_scale(c, kv_scales)
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def unit(item: Array, head: Array, step: Array) -> Array:
        position, kv_stop = items[item, work.POSITION], items[item, work.KV_STOP]
        num_stages, num_masked, first_key = stages_of(c, items, item)

        def fetch(i: Array) -> None:
            """Start the copies of the i-th stage, if there is one: its keys, then its values."""

            @pl.when(i < num_stages)
            def _() -> None:
                slot, parts = lax.rem(i, c.num_stages), range(0, c.kv_tile, c.copy_rows)
                blocks = [block_of(c, items, item, tables, first_key(i) + part) for part in parts]
                for pool, smem, ready in ((k_pool, k_s, k_ready), (v_pool, v_s, v_ready)):
                    for part, block in zip(parts, blocks, strict=True):
                        source = pool.at[block, head]
                        if c.copy_rows < c.block_size:
                            source = source.at[pl.ds(lax.rem(first_key(i) + part, c.block_size), c.copy_rows)]
                        copy(c, source, smem.at[slot].at[pl.ds(part, c.copy_rows)], ready, slot)

        for i in range(c.num_stages - 1):
            fetch(jnp.int32(i))
        rows = pl.ds(items[item, work.TOKEN] * c.group, ROWS)
        queries = plgpu.load(q.at[head, rows], layout=plgpu.Layout.MMA_LHS(c.dtype), optimized=False)
        if c.reload_queries:
            q_s[...] = queries
            queries = q_s

        def stage(i: Array, carry: tuple[Array, Array, Array], *, masked: bool) -> tuple[Array, Array, Array]:
            acc, m, l = carry
            slot, num_after = lax.rem(i, c.num_stages), num_stages - 1 - i
            wait_copies(c, k_ready, slot, jnp.minimum(num_after, c.num_stages - 2), c.num_stages - 2, c.num_copies)
            fetch(i + c.num_stages - 1)  # over the stage before this one, which all are done with

            scores = dot_keys(c, queries, in_16_bits(c, k_s.at[slot], wide_s))
            seen = visible(c, position, first_key(i), kv_stop, plgpu.Layout.WGMMA) if masked else None
            p, acc, m, l = weigh(c, scale, scores, seen, acc, m, l)

            wait_copies(c, v_ready, slot, jnp.minimum(num_after, c.num_stages - 1), c.num_stages - 1, 0)
            values = in_16_bits(c, v_s.at[slot], wide_s)
            if masked:

                @pl.when(is_edge(c, first_key(i), position, kv_stop))
                def _() -> None:
                    clear_values(c, values, first_key(i), position, kv_stop)

            acc = add_values(c, acc, as_operand(p.astype(c.dtype)), values)
            if c.tma:
                plgpu.commit_smem()  # before the next copy overwrites what was read
            return acc, m, l

        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, c.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), row_layout),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout),
        )
        carry = lax.fori_loop(0, num_masked, partial(stage, masked=True), carry)
        acc, m, l = lax.fori_loop(num_masked, num_stages, partial(stage, masked=False), carry)

        l = jnp.where(l > 0, l, 1.0)
        acc = acc * lax.broadcast_in_dim(output_scale(kv_scales) / l, acc.shape, [0])
        for column in range(0, c.head_dim, c.store_columns):
            width = min(c.store_columns, c.head_dim - column)
            output[:, :width] = lax.slice(acc, (0, column), (ROWS, column + width)).astype(output.dtype)
            store(c, items, item, head, column, 0, output, out, partial_out)
        if c.splits:

            @pl.when(items[item, work.SLOT] >= 0)
            def _() -> None:
                partial_lse[items[item, work.SLOT], head, pl.ds(0, ROWS)] = m + jnp.log2(l)

        return step

    for_each_unit(c, num_items, q.shape[0], unit)


def copy(c: Config, source: Any, target: Any, ready: Any, slot: Array) -> None:
    """Start one copy to shared memory."""
    if c.tma:
        plgpu.copy_gmem_to_smem(source, target, ready.at[slot])
    else:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def wait_copies(c: Config, ready: Any, slot: Array, num_stages: Array, most_stages: int, num_copies: int) -> None:
    """Wait for the copies to a slot; begun since are those of num_stages <= most_stages stages and `num_copies` more.

    cp.async is waited for in order, and how many of the last may be under way is part of the instruction.
    """
    if c.tma:
        plgpu.barrier_wait(ready.at[slot])
    else:
        counts = [2 * c.num_copies * n + num_copies for n in range(most_stages + 1)]
        lax.switch(num_stages, [partial(plgpu.wait_gmem_to_smem, count) for count in counts])


def dot_keys(c: Config, queries: Any, keys: Any) -> Array:
    """queries [64, D] times the transpose of keys [kv_tile, D] in shared memory.

    queries: an operand of `mma`, or in shared memory if `reload_queries`.
    """
    scores = plgpu.layout_cast(jnp.zeros((ROWS, c.kv_tile), jnp.float32), plgpu.Layout.MMA_ACC(c.dtype))
    for column in range(0, c.head_dim, c.tile_columns):
        columns = pl.ds(column, c.tile_columns)
        if c.reload_queries:
            part = plgpu.load(queries.at[:, columns], layout=plgpu.Layout.MMA_LHS(c.dtype))
        else:
            part = lax.slice(queries, (0, column), (ROWS, column + c.tile_columns))
        scores = plgpu.mma(scores, part, plgpu.load(keys.at[:, columns].T, layout=plgpu.Layout.MMA_RHS(c.dtype)))
    return scores


def add_values(c: Config, acc: Array, p: Array, values: Any) -> Array:
    """acc [64, D] plus p [64, kv_tile], an operand of `mma`, times values [kv_tile, D] in shared memory."""
    for row in range(0, c.kv_tile, MMA_DEPTH):
        part = plgpu.load(values.at[pl.ds(row, MMA_DEPTH)], layout=plgpu.Layout.MMA_RHS(c.dtype))
        acc = plgpu.mma(acc, lax.slice(p, (0, row), (ROWS, row + MMA_DEPTH)), part)
    return acc


def as_operand(p: Array) -> Array:
    """An accumulator of `mma` as its left operand: each thread has the same values in the same order.

    Mosaic numbers the registers by other tiles, and has no cast between the two layouts.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.MMA_ACC(p.dtype),),
        return_type=plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=plgpu.Layout.MMA_LHS(p.dtype)),
    )
    def relayout(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = plgpu.Layout.MMA_LHS(p.dtype).to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=x.is_signed)

    return relayout(p)


def clear_values(c: Config, values: Any, first_key: Array, position: Array, kv_stop: Array) -> None:
    """Zero those values of a stage that no query sees."""
    layout = plgpu.Layout.MMA_ACC(c.dtype, m_warps=1)  # in tiles of 16 keys and 32 columns
    width = max(c.tile_columns, 32)
    for column in range(0, c.head_dim, width):  # some at a time, to take few registers
        part = values.at[:, pl.ds(column, width)]
        key = first_key + plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=layout)
        clear_unseen(c, part, key, position, kv_stop, layout)


def scratch_types(c: Config) -> list[Any]:
    """Shared memory and barriers, in the order of `kernel`'s; None for what this variant does without."""
    stages = plgpu.SMEM((c.num_stages, c.kv_tile, c.head_dim), c.kv_dtype, transforms=c.kv_transforms)
    ready = plgpu.Barrier(num_arrivals=c.num_copies, num_barriers=c.num_stages) if c.tma else None
    return [
        plgpu.SMEM((ROWS, c.head_dim), c.dtype, transforms=c.transforms) if c.reload_queries else None,
        stages,
        stages,
        plgpu.SMEM((c.kv_tile, c.head_dim), c.dtype, transforms=c.transforms) if c.widens else None,
        # Eight columns more than are used, so that threads that store to different rows meet different banks.
        plgpu.SMEM((ROWS, c.store_columns + 8), c.store_dtype),
        ready,
        ready,
    ]


def launch(
    c: Config,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    kv_scales: Array | None,
    work_list: work.Work,
    block_tables: Array,
    *refs: Any,
    out_type: Any,
    interpret: Any = None,
) -> Any:
    """Run a work list. Of splits, `refs` is the reference to the output, written in place.

    kv_scales: float32 [2], K's and V's, of pools of 8 bits.
    """
    return plgpu.kernel(
        partial(kernel, c),
        out_type=out_type,
        scratch_types=scratch_types(c),
        grid=(c.num_ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows are reduced within a warp
        ),
        kernel_name="portable_splits" if c.splits else "portable_tiles",
        interpret=interpret,
    )(q, k_pool, v_pool, *work_list, block_tables, *([] if kv_scales is None else [kv_scales]), *refs)
