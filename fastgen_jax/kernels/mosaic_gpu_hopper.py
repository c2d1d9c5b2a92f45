"""Ragged paged attention for Hopper (sm_90a).

As in FlashAttention-3 (arXiv 2407.08608) the warps are specialised: one warpgroup only issues TMA copies, several
stages of keys ahead, and the others multiply by wgmma, each its own 64 rows of M. Where K and V come in 8 bits a
number, a warpgroup between them makes 16 of these.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fastgen_jax.kernels import mosaic_gpu_common, work
from fastgen_jax.kernels.mosaic_gpu_common import (
    LSE_COLUMNS,
    MASKED,
    ROWS,
    block_of,
    clear_unseen,
    for_each_unit,
    is_edge,
    stages_of,
    store,
    store_lse,
    visible,
    weigh,
)
from fastgen_jax.kernels.mosaic_gpu_widen import copy_layout, output_scale, score_scale, widen_stages

QUERY_PADDING = 2 * ROWS
"""Rows of q behind the last token's, which the last tile may read."""


MAX_STAGES = 8
WIDENING_REGISTERS = 72
"""Of a thread that makes 16 bits of 8."""


@dataclass(frozen=True)
class Config(mosaic_gpu_common.Config):
    """num_copied: stages of 8 bits a number in shared memory, from which those of 16 are made; 0 where none are."""

    num_copied: int = 0

    @property
    def num_threads(self) -> int:
        """Warpgroups of a thread block."""
        return self.num_warpgroups + (2 if self.widens else 1)

    @property
    def max_registers(self) -> tuple[int, int] | None:
        """Of a thread that copies and of one that computes; None is what all get.

        With `WIDENING_REGISTERS`, no more than what the block was launched with: 4 * 128 or 3 * 168.
        """
        if self.num_warpgroups > 1:
            return (24, 208) if self.widens else (24, 240)
        return (64, 256) if self.widens else None


def config(
    capability: tuple[int, int], num_sms: int, smem_bytes: int, *, head_dim: int, splits: bool, **shape: Any
) -> Config:
    """The variant for a shape: as many stages as shared memory holds, one thread block for each SM.

    shape: `dtype`, `kv_dtype`, `group`, `block_size`, `scale`, `window` and `softcap` of `Config`.
    """
    del capability  # there is one
    num_warpgroups = 1 if splits or head_dim > 128 else 2
    # Stages of 32 KiB at least for rows of one query: a stage's fixed cost weighs there.
    kv_tile = 128 if num_warpgroups == 2 or head_dim <= 64 else 64
    c = Config(
        head_dim=head_dim,
        splits=splits,
        num_warpgroups=num_warpgroups,
        kv_tile=kv_tile,
        num_stages=2,
        num_ctas=num_sms,
        **shape,
    )
    item = jnp.dtype(c.dtype).itemsize
    if c.widens:
        c = replace(c, kv_tile=128 if head_dim <= 64 else 64, num_stages=2 if head_dim <= 128 else 1)
    stage = 2 * c.kv_tile * head_dim * item
    output = (c.store_columns + 8) * jnp.dtype(c.store_dtype).itemsize
    other = (
        num_warpgroups * (ROWS * (head_dim * item + output) + LSE_COLUMNS * 4) + 2048
    )  # barriers, and a buffer's end rounded up to 1024
    free = smem_bytes - other
    if c.widens:
        return replace(c, num_copied=min(MAX_STAGES, (free - c.num_stages * stage) // (stage // item)))
    return replace(c, num_stages=min(MAX_STAGES, free // stage))


def kernel(c: Config, q, k_pool, v_pool, items, num_items, tables, *rest) -> None:
    """The body. q: [K, T * G + padding, D]; pools: [N, K, B, D].

    rest: of pools of 8 bits their scales, float32 [2]; out [T, K, G, Do], partials, scratch.
    """
    kv_scales, *refs = rest if c.widens else (None, *rest)
    if c.splits:
        out, partial_out, partial_lse, *scratch = refs
    else:
        (out, *scratch), partial_out, partial_lse = refs, None, None
    q_s, stages, copied, o_s, lse_s, cleared = scratch
    k_s, v_s, k_ready, v_ready, consumed = stages
    num_kv_heads = q.shape[0]
    wg = lax.axis_index("wg")

    @pl.when(wg == c.num_warpgroups)
    def _produce() -> None:
        if c.max_registers is not None:
            plgpu.set_max_registers(c.max_registers[0], action="decrease")
        k_s, v_s, k_ready, v_ready, consumed = copied if c.widens else stages
        depth = c.num_copied if c.widens else c.num_stages

        def unit(item: Array, head: Array, step: Array) -> Array:
            num_stages, _, first_key = stages_of(c, items, item)

            def stage(i: Array, _: None) -> None:
                slot = lax.rem(step + i, depth)

                @pl.when(step + i >= depth)
                def _wait_for_room() -> None:
                    plgpu.barrier_wait(consumed.at[slot])

                for part in range(0, c.kv_tile, c.copy_rows):
                    key = first_key(i) + part
                    block = block_of(c, items, item, tables, key)
                    for pool, smem, ready in ((k_pool, k_s, k_ready), (v_pool, v_s, v_ready)):
                        source = pool.at[block, head]
                        if c.copy_rows < c.block_size:
                            source = source.at[pl.ds(lax.rem(key, c.block_size), c.copy_rows)]
                        target = smem.at[slot].at[pl.ds(part, c.copy_rows)]
                        plgpu.copy_gmem_to_smem(source, target, ready.at[slot])

            lax.fori_loop(0, num_stages, stage, None)
            return step + num_stages

        for_each_unit(c, num_items, num_kv_heads, unit)

    if c.widens:

        @pl.when(wg > c.num_warpgroups)
        def _widen() -> None:
            plgpu.set_max_registers(WIDENING_REGISTERS, action="decrease")
            widen_stages(c, items, num_items, num_kv_heads, copied, stages)

    @pl.when(wg < c.num_warpgroups)
    def _consume() -> None:
        if c.max_registers is not None:
            plgpu.set_max_registers(c.max_registers[1], action="increase")
        scale = score_scale(c, kv_scales)
        queries, output = q_s.at[wg], o_s.at[wg]
        row_layout = plgpu.Layout.WGMMA.reduce(1)

        def unit(item: Array, head: Array, step: Array) -> Array:
            first_row = (items[item, work.TOKEN] + wg * c.warpgroup_tokens) * c.group
            # Not by TMA: it takes rows by eights, and an item begins at any token.
            layout = plgpu.Layout.SMEM_GMEM_COPY((ROWS, c.tile_columns), c.dtype, 2 * c.tile_columns)
            for column in range(0, c.head_dim, c.tile_columns):
                columns = pl.ds(column, c.tile_columns)
                part = plgpu.load(q.at[head, pl.ds(first_row, ROWS), columns], layout=layout, optimized=False)
                queries[:, columns] = part
            plgpu.commit_smem()
            num_stages, num_masked, first_key = stages_of(c, items, item)

            def stage(i: Array, carry: tuple[Array, Array, Array], *, masked: bool) -> tuple[Array, Array, Array]:
                acc, m, l = carry
                slot = lax.rem(step + i, c.num_stages)
                plgpu.barrier_wait(k_ready.at[slot])

                def dot_keys(scores: Any) -> Array:
                    plgpu.wgmma(scores, queries, k_s.at[slot].T)
                    return scores[...]

                scores = pl.run_scoped(dot_keys, plgpu.ACC((ROWS, c.kv_tile), jnp.float32))
                seen = None
                if masked:  # read for each stage, not kept: registers are scarce
                    position, kv_stop = items[item, work.POSITION], items[item, work.KV_STOP]
                    own = position + wg * c.warpgroup_tokens
                    seen = visible(c, own, first_key(i), kv_stop, plgpu.Layout.WGMMA)
                p, acc, m, l = weigh(c, scale, scores, seen, acc, m, l)
                p = p.astype(c.dtype)
                plgpu.barrier_wait(v_ready.at[slot])
                if masked:

                    @pl.when(is_edge(c, first_key(i), position, kv_stop))
                    def _() -> None:
                        clear_values(first_key(i), position, kv_stop, slot)

                def dot_values(acc: Any) -> None:
                    plgpu.wgmma(acc, p, v_s.at[slot])

                acc = pl.run_state(dot_values)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(consumed.at[slot])
                return acc, m, l

            carry = (
                plgpu.layout_cast(jnp.zeros((ROWS, c.head_dim), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), row_layout),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout),
            )
            if c.head_dim > 128:  # the registers of two loops do not fit beside so wide an accumulator
                num_masked = num_stages
            carry = lax.fori_loop(0, num_masked, partial(stage, masked=True), carry)
            if c.head_dim <= 128:
                carry = lax.fori_loop(num_masked, num_stages, partial(stage, masked=False), carry)
            acc, m, l = carry

            l = jnp.where(l > 0, l, 1.0)
            acc = acc * lax.broadcast_in_dim(output_scale(kv_scales) / l, acc.shape, [0])
            for column in range(0, c.head_dim, c.store_columns):
                width = min(c.store_columns, c.head_dim - column)
                output[:, :width] = lax.slice(acc, (0, column), (ROWS, column + width)).astype(output.dtype)
                store(c, items, item, head, column, wg, output, out, partial_out)
            if c.splits:
                store_lse(items, item, head, m + jnp.log2(l), lse_s.at[wg], partial_lse)
            return step + num_stages

        def clear_values(first_key: Array, position: Array, kv_stop: Array, slot: Array) -> None:
            """Zero the values of a stage that no query sees; each warpgroup a part, and none reads before all did."""
            num_rows = c.kv_tile // c.num_warpgroups
            layout = plgpu.Layout.WGMMA if num_rows % ROWS == 0 else copy_layout(c, num_rows, c.tile_columns)
            for column in range(0, c.head_dim, c.tile_columns):  # one at a time, to take few registers
                part = v_s.at[slot].at[pl.ds(wg * num_rows, num_rows), pl.ds(column, c.tile_columns)]
                row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=layout)
                clear_unseen(c, part, first_key + wg * num_rows + row, position, kv_stop, layout)
            plgpu.commit_smem()
            if c.num_warpgroups > 1:
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

        for_each_unit(c, num_items, num_kv_heads, unit)


def scratch_types(c: Config) -> list[Any]:
    """Shared memory and barriers, in the order of `kernel`'s."""
    num_copies = c.kv_tile // c.copy_rows

    def stages(depth: int, dtype: Any, transforms: Any, num_ready: int, num_consumed: int) -> list[Any]:
        """Those of K and of V, a barrier for each that it is there, and one that both are done with."""
        smem = plgpu.SMEM((depth, c.kv_tile, c.head_dim), dtype, transforms=transforms)
        ready = plgpu.Barrier(num_arrivals=num_ready, num_barriers=depth)
        return [smem, smem, ready, ready, plgpu.Barrier(num_arrivals=num_consumed, num_barriers=depth)]

    return [
        plgpu.SMEM((c.num_warpgroups, ROWS, c.head_dim), c.dtype, transforms=c.transforms),
        stages(c.num_stages, c.dtype, c.transforms, 1 if c.widens else num_copies, c.num_warpgroups),
        stages(c.num_copied, c.kv_dtype, c.kv_transforms, num_copies, 1) if c.widens else None,
        # Eight columns more than are used, so that threads that store to different rows meet different banks.
        plgpu.SMEM((c.num_warpgroups, ROWS, c.store_columns + 8), c.store_dtype),
        plgpu.SMEM((c.num_warpgroups, LSE_COLUMNS), jnp.float32),
        plgpu.Barrier(num_arrivals=c.num_warpgroups),
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
        num_threads=c.num_threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        kernel_name="hopper_splits" if c.splits else "hopper_tiles",
        interpret=interpret,
    )(q, k_pool, v_pool, *work_list, block_tables, *([] if kv_scales is None else [kv_scales]), *refs)
