"""K and V of 8 bits a number in the GPU kernels: read as they are, and made 16 bits before they are multiplied.

The tensor cores of no GPU multiply bfloat16 by `float8_e4m3fn`, and queries of 8 bits would lose what K and V kept. So
a stage of keys or values goes from shared memory through registers back to shared memory, in the layout that a stage of
16 bits has, once for all the warps that read it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.typing import DTypeLike

from fastgen_jax.kernels.mosaic_gpu_common import Config, for_each_unit, stages_of

MOST_NUMBERS = 64 * 128
"""That a warpgroup converts at a time: 64 a thread take 48 registers."""


def score_scale(c: Config, kv_scales: Any) -> float | Array:
    """What scores are multiplied by. kv_scales: float32 [2], K's and V's, or None where `c` has none."""
    return c.scale if kv_scales is None else c.scale * kv_scales[0]


def output_scale(kv_scales: Any) -> float | Array:
    """What outputs are multiplied by: read when it is wanted, and not kept in a register until then."""
    return 1.0 if kv_scales is None else kv_scales[1]


def widen(c: Config, source: Any, target: Any) -> None:
    """Write `source`, [rows, D] in shared memory, in 16 bits to `target`, likewise; a warpgroup does it together."""
    num_rows, num_columns = source.shape
    if num_rows * num_columns > MOST_NUMBERS:
        num_rows //= 2
    layout = copy_layout(c, num_rows, num_columns)
    for row in range(0, source.shape[0], num_rows):
        rows = pl.ds(row, num_rows)
        target[rows] = to_16_bits(plgpu.load(source.at[rows], layout=layout), c.dtype, layout)


def in_16_bits(c: Config, stage: Any, wide: Any) -> Any:
    """A stage's keys or values [kv_tile, D] to multiply: the stage, or if it has 8 bits a number `wide`, filled now."""
    if not c.widens:
        return stage
    widen(c, stage, wide)
    return wide


def widen_stages(c: Any, items: Any, num_items: Any, num_kv_heads: int, copied: Any, stages: Any) -> None:
    """What a warpgroup does that stands between one that copies and those that compute.

    copied, stages: in 8 and in 16 bits the keys and the values of `c.num_copied` and of `c.num_stages` stages, the
    barriers that say that they are there, and the one that says that both have been read.
    """
    k_in, v_in, k_came, v_came, read = copied
    k_out, v_out, k_ready, v_ready, consumed = stages

    def unit(item: Array, head: Array, step: Array) -> Array:
        del head
        num_stages, _, _ = stages_of(c, items, item)

        def stage(i: Array, _: None) -> None:
            source, target = lax.rem(step + i, c.num_copied), lax.rem(step + i, c.num_stages)

            @pl.when(step + i >= c.num_stages)
            def _wait_for_room() -> None:
                plgpu.barrier_wait(consumed.at[target])

            for smem, came, out, ready in ((k_in, k_came, k_out, k_ready), (v_in, v_came, v_out, v_ready)):
                plgpu.barrier_wait(came.at[source])
                widen(c, smem.at[source], out.at[target])
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[target])
            plgpu.barrier_arrive(read.at[source])

        lax.fori_loop(0, num_stages, stage, None)
        return step + num_stages

    for_each_unit(c, num_items, num_kv_heads, unit)


def copy_layout(c: Config, num_rows: int, num_columns: int) -> Any:
    """Of a warpgroup's registers, with numbers that lie together in shared memory in the same thread."""
    warp_columns = max(1, 4 // (num_rows // 8))
    columns = next(n for n in (64, 32, 16) if n <= c.tile_columns and num_columns % (n * warp_columns) == 0)
    return plgpu.Layout.SMEM_GMEM_COPY((num_rows, num_columns), c.dtype, 2 * columns)


def to_16_bits(x: Array, dtype: DTypeLike, layout: Any) -> Array:
    """`float8_e4m3fn` to bfloat16 or float16, exactly, NaN to NaN; x in registers, of `layout`."""
    ptx = conversion(dtype)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout))
    def convert(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            registers[index] = _convert_register(register, ptx, mgpu.utils.dtype_to_ir_type(dtype))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return convert(x)


def conversion(dtype: DTypeLike) -> str:
    """PTX that makes two pairs of 16-bit numbers, $0 and $1, of the four bytes in $2.

    The byte's exponent and mantissa are moved to where the other format has them, which leaves the value too small by
    the difference of the exponents' biases, a power of two: a multiplication puts that right, and what both formats
    call subnormal with it. Bytes 7F and FF are NaN. GPUs before 8.9 have no conversion of their own, and later ones
    none to bfloat16.
    """
    shift, mask, power, kind = {
        "bfloat16": (4, "0x07f007f0", "0x7b807b80", "bf16x2"),
        "float16": (1, "0x3f803f80", "0x5c005c00", "f16x2"),
    }[jnp.dtype(dtype).name]
    lines = [
        ".reg .b32 nan, high0, high1, low, sign, power, zero;",
        "prmt.b32 high0, $2, 0, 0x1404;",
        "prmt.b32 high1, $2, 0, 0x3424;",
        "and.b32 nan, $2, 0x7f7f7f7f;",
        "add.u32 nan, nan, 0x01010101;",
        f"mov.b32 power, {power};",
        "mov.b32 zero, 0x80008000;",
    ]
    for out, high, nans in (("$0", "high0", "0x9988"), ("$1", "high1", "0xbbaa")):
        lines += [
            f"shr.u32 low, {high}, {shift};",
            f"and.b32 sign, {high}, 0x80008000;",
            f"and.b32 low, low, {mask};",
            "or.b32 low, low, sign;",
            f"fma.rn.{kind} low, low, power, zero;",
            f"prmt.b32 {high}, nan, 0, {nans};",
            f"or.b32 {out}, low, {high};",
        ]
    return "\n".join(("{", *lines, "}"))


def _convert_register(register: Any, ptx: str, element: Any) -> Any:
    """A vector of a multiple of four numbers of 8 bits as one of 16 bits each."""
    i32 = ir.IntegerType.get_signless(32)
    (size,) = ir.VectorType(register.type).shape
    pairs = []
    for start in range(0, size, 4):
        four = mgpu.utils.bitcast(mgpu.utils.vector_slice(register, slice(start, start + 4)), i32)
        pairs += mgpu.utils.inline_ptx(ptx, four, result_types=(i32, i32))
    return mgpu.utils.vector_concat([mgpu.utils.bitcast(pair, ir.VectorType.get((2,), element)) for pair in pairs])
