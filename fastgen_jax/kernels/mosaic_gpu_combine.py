"""The second kernel of Dynamic SplitKV: one output from the partial results of a row's splits.

O = sum_i 2^(lse_i - M) O_i / sum_i 2^(lse_i - M), M = max_i lse_i: FlashDecoding's sum, in powers of 2.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TOKEN, FIRST_SLOT, NUM_SLOTS = range(3)
"""Columns of `work.SplitWork.rows`."""

THREADS = 128


def kernel(columns, partial_out, partial_lse, rows, num_rows, out):
    """One row and `THREADS` of the numbers of one KV head's G outputs: a part of one head's, or two heads'."""
    row = lax.axis_index("row")
    num_heads = THREADS // columns  # in a part
    kv_head, head, part = lax.axis_index("kv_head"), lax.axis_index("head") * num_heads, lax.axis_index("part")
    shape = (num_heads, columns)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)

    def full(value):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    @pl.when(row < num_rows[0])
    def _():
        first = rows[row, FIRST_SLOT]
        index = (kv_head, pl.ds(head, num_heads), pl.ds(part * columns, columns))

        def add(i, state):
            m, l, o = state
            slot = first + i
            lse = full(partial_lse[slot, kv_head, head])
            if num_heads == 2:
                is_second = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) == 1
                lse = jnp.where(is_second, full(partial_lse[slot, kv_head, head + 1]), lse)
            m_new = jnp.maximum(m, lse)
            keep, weight = jnp.exp2(m - m_new), jnp.exp2(lse - m_new)
            values = plgpu.load(partial_out.at[slot, *index], layout=layout)
            return m_new, l * keep + weight, o * keep + values * weight

        start = (full(-1e30), full(0.0), full(0.0))
        _, l, o = lax.fori_loop(0, rows[row, NUM_SLOTS], add, start)
        out[rows[row, TOKEN], *index] = (o / l).astype(out.dtype)


def combine(partial_out: Array, partial_lse: Array, rows: Array, num_rows: Array, out, *, interpret=None) -> None:
    """Write the rows of several splits to `out`, a reference to [T, K, G, Do], in place.

    partial_out: float32 [W, K, G, Do], normalised. partial_lse: float32 [W, K, >= G], log-sum-exp to base 2.
    rows, num_rows: those of `work.SplitWork`.
    """
    _, num_kv_heads, group, out_dim = partial_out.shape
    columns = min(out_dim, THREADS)
    plgpu.kernel(
        partial(kernel, columns),
        out_type=(),
        grid=(len(rows), num_kv_heads, group * columns // THREADS, out_dim // columns),
        grid_names=("row", "kv_head", "head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="combine",
        interpret=interpret,
    )(partial_out, partial_lse, rows, num_rows, out)
