"""The product of activations with a quantised weight, for Hopper (sm_90a): values are converted in registers.

T tokens, F outputs, E inputs, G groups of E / G inputs that share a scale. A thread block computes 128 outputs, or 64,
of up to 128 tokens, over some of the inputs: outputs are wgmma's M, so that its smallest M of 64 wastes nothing on a
few tokens, which are its N. One warpgroup only issues TMA copies, of 128 inputs at a time, or 64, several stages ahead.
Each of the others has 64 outputs: it reads their values into registers, converts them to bfloat16, which is exact, and
multiplies them, from there, with the activations in shared memory. The scales come to each group's sums.

Where outputs and tokens are too few for all multiprocessors, inputs are split; XLA adds up what the splits leave.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Outputs of a warpgroup."""

INPUTS = (128, 64)
"""Inputs of a stage: the first that divides a weight's."""

MAX_TOKENS = 128
"""Tokens of a thread block: two accumulators of 64 registers a thread, all sums and a group's."""

FEW_TOKENS = 32
"""Tokens with which no thread needs more registers than its share of the launch."""

MAX_STAGES = 8
SMEM_BYTES = 200 * 1024
"""Shared memory for the stages of the thread blocks of a multiprocessor, which has 227 KiB for them."""

START_BYTES = 32 * 1024
"""What a multiprocessor could have read in the microsecond that a thread block takes to begin and end."""

VALUES = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True)
class Config:
    """One compiled variant.

    group: inputs that share a scale. inputs: of a stage. tokens: of a thread block, a multiple of 8.
    num_warpgroups: of those that compute. splits: into which the inputs are cut, each of `stages_of_a_split` stages
    but for the last.
    """

    kind: str
    group: int
    inputs: int
    tokens: int
    num_warpgroups: int
    num_stages: int
    splits: int
    stages_of_a_split: int

    @property
    def rows(self) -> int:
        """Outputs of a thread block."""
        return self.num_warpgroups * ROWS

    @property
    def groups_of_a_stage(self) -> int:
        return max(self.inputs // self.group, 1)

    @property
    def columns(self) -> int:
        """Activations of a row that lie together in shared memory, all of one group."""
        return min(self.group, 64)


def supported(kind: str, num_outputs: int, num_inputs: int, num_groups: int, dtype: Any) -> str | None:
    """None if the kernel can run this, else the reason why not."""
    if jnp.dtype(dtype).name != "bfloat16":
        return f"it multiplies in bfloat16, and activations are {jnp.dtype(dtype).name}"
    if num_outputs % ROWS or num_inputs % INPUTS[-1]:
        return f"[{num_outputs}, {num_inputs}] is not a multiple of [{ROWS}, {INPUTS[-1]}]"
    group, inputs = num_inputs // num_groups, _inputs(num_inputs)
    if group not in (32, 64) and group % inputs:
        return f"{group} of {num_inputs} inputs share a scale, and it takes 32, 64 or a multiple of {inputs}"
    return None


def _inputs(num_inputs: int) -> int:
    return next(inputs for inputs in INPUTS if num_inputs % inputs == 0)


def config(kind: str, num_tokens: int, num_outputs: int, num_inputs: int, num_groups: int, *, num_sms: int) -> Config:
    """The variant for a shape. Inputs are cut into as many splits as take least time, by what there is to read."""
    num_warpgroups = 2 if num_outputs % (2 * ROWS) == 0 else 1
    rows, group, inputs = num_warpgroups * ROWS, num_inputs // num_groups, _inputs(num_inputs)
    tokens = min(-(-num_tokens // 8) * 8, MAX_TOKENS if group > 32 else MAX_TOKENS // 2)
    num_blocks = num_outputs // rows * -(-num_tokens // tokens)
    per_sm = blocks_per_sm(group, tokens)
    num_stages = num_inputs // inputs
    stage_bytes = inputs * (rows * (4 if kind == "int4" else 8) // 8 + 2 * tokens)
    sums_bytes = 2 * 4 * rows * tokens  # written, and read to be added up

    def busiest(splits: int) -> int:
        """Thread blocks of the multiprocessor that has most."""
        return -(-num_blocks * splits // num_sms)

    def time(splits: int) -> int:
        """In bytes that a multiprocessor reads."""
        block_bytes = -(-num_stages // splits) * stage_bytes + sums_bytes
        return busiest(splits) * block_bytes + -(-busiest(splits) // per_sm) * START_BYTES

    stages_of_a_split = -(-num_stages // min(range(1, num_stages + 1), key=time))
    splits = -(-num_stages // stages_of_a_split)
    room = SMEM_BYTES // min(per_sm, busiest(splits))
    return Config(
        kind=kind,
        group=group,
        inputs=inputs,
        tokens=tokens,
        num_warpgroups=num_warpgroups,
        num_stages=min(MAX_STAGES, stages_of_a_split, room // stage_bytes),
        splits=splits,
        stages_of_a_split=stages_of_a_split,
    )


def blocks_per_sm(group: int, tokens: int) -> int:
    """Two where a thread takes at most 80 registers."""
    return 2 if tokens <= (16 if group >= 128 else 8) else 1


def product(x: Array, values: Array, scales: Array, *, kind: str, num_sms: int, interpret: Any = None) -> Array:
    """x bfloat16 [T, E] times the weight value * scale [F, E], -> float32 [T, F]."""
    (num_tokens, num_inputs), (num_outputs, num_groups) = x.shape, scales.shape
    c = config(kind, num_tokens, num_outputs, num_inputs, num_groups, num_sms=num_sms)
    if kind == "int4":
        values = lax.bitcast_convert_type(values, jnp.int4).reshape(num_outputs, num_inputs)
    num_blocks = -(-num_tokens // c.tokens)
    x = jnp.pad(x, ((0, num_blocks * c.tokens - num_tokens), (0, 0)))
    sums = plgpu.kernel(
        partial(kernel, c),
        out_type=jax.ShapeDtypeStruct((c.splits, num_outputs, x.shape[0]), jnp.float32),
        scratch_types=scratch_types(c),
        grid=(num_blocks, num_outputs // c.rows, c.splits),
        grid_names=("tokens", "outputs", "split"),
        num_threads=c.num_warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        kernel_name="hopper_mixed_matmul",
        interpret=interpret,
    )(x, values, scales)
    return jnp.sum(sums, axis=0).T[:num_tokens]


def scratch_types(c: Config) -> list[Any]:
    """Shared memory and barriers, in the order of `kernel`'s."""
    bits = 4 if c.kind == "int4" else 8
    return [
        plgpu.SMEM(
            (c.num_stages, c.rows, c.inputs),
            VALUES[c.kind],
            transforms=(plgpu.TilingTransform((8, c.inputs)), plgpu.SwizzleTransform(c.inputs * bits // 8)),
        ),
        plgpu.SMEM(
            (c.num_stages, c.tokens, c.inputs),
            jnp.bfloat16,
            transforms=(plgpu.TilingTransform((8, c.columns)), plgpu.SwizzleTransform(2 * c.columns)),
        ),
        plgpu.Barrier(num_arrivals=2, num_barriers=c.num_stages),
        plgpu.Barrier(num_arrivals=c.num_warpgroups, num_barriers=c.num_stages),
    ]


def kernel(c: Config, x, values, scales, out, values_s, x_s, ready, consumed) -> None:
    """The body. x: [T, E]; values: [F, E]; scales: [F, G]; out: float32 [splits, F, T]."""
    wg = lax.axis_index("wg")
    split = lax.axis_index("split")
    first_output = lax.axis_index("outputs") * c.rows
    first_token = lax.axis_index("tokens") * c.tokens
    first_stage = split * c.stages_of_a_split
    num_stages = jnp.minimum(x.shape[1] // c.inputs - first_stage, c.stages_of_a_split)

    more_registers = c.num_warpgroups == 2 and c.tokens > FEW_TOKENS

    @pl.when(wg == c.num_warpgroups)
    def _produce() -> None:
        if more_registers:
            plgpu.set_max_registers(24, action="decrease")  # 24 + 2 * 240: what the block was launched with, 3 * 168

        def stage(i: Array, _: None) -> None:
            slot = lax.rem(i, c.num_stages)

            @pl.when(i >= c.num_stages)
            def _wait_for_room() -> None:
                plgpu.barrier_wait(consumed.at[slot])

            inputs = pl.ds((first_stage + i) * c.inputs, c.inputs)
            plgpu.copy_gmem_to_smem(values.at[pl.ds(first_output, c.rows), inputs], values_s.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(x.at[pl.ds(first_token, c.tokens), inputs], x_s.at[slot], ready.at[slot])

        lax.fori_loop(0, num_stages, stage, None)

    @pl.when(wg < c.num_warpgroups)
    def _consume() -> None:
        if more_registers:
            plgpu.set_max_registers(240, action="increase")
        outputs = pl.ds(first_output + wg * ROWS, ROWS)

        def stage(i: Array, acc: Array) -> Array:
            slot = lax.rem(i, c.num_stages)
            first_group = lax.div((first_stage + i) * c.inputs, c.group)
            layout = plgpu.Layout.WGMMA.reduce(1)
            by = [
                plgpu.load(scales.at[outputs, first_group + g], layout=layout, optimized=False).astype(jnp.float32)
                for g in range(c.groups_of_a_stage)
            ]
            plgpu.barrier_wait(ready.at[slot])
            weight = converted(c, values_s.at[slot, pl.ds(wg * ROWS, ROWS)])
            width = c.inputs // c.groups_of_a_stage
            for g in range(c.groups_of_a_stage):
                columns = pl.ds(g * width, width)
                part = lax.slice(weight, (0, g * width), (ROWS, (g + 1) * width))

                def dot(sums: Any, part: Array = part, columns: Any = columns) -> Array:
                    plgpu.wgmma(sums, part, x_s.at[slot, :, columns].T)
                    return sums[...]

                sums = pl.run_scoped(dot, plgpu.ACC((ROWS, c.tokens), jnp.float32))
                acc = acc + sums * lax.broadcast_in_dim(by[g], sums.shape, [0])
            plgpu.commit_smem()  # what was loaded from it, before the next copy overwrites it
            plgpu.barrier_arrive(consumed.at[slot])
            return acc

        acc = plgpu.layout_cast(jnp.zeros((ROWS, c.tokens), jnp.float32), plgpu.Layout.WGMMA)
        acc = lax.fori_loop(0, num_stages, stage, acc)
        out[split, outputs, pl.ds(first_token, c.tokens)] = acc


def converted(c: Config, values: Any) -> Array:
    """Values [64, inputs] of shared memory in registers, bfloat16, as wgmma takes them."""
    if c.kind == "int4":
        loaded = plgpu.layout_cast(plgpu.load(values, layout=plgpu.Layout.WGMMA_UPCAST_4X), plgpu.Layout.WGMMA)
        return loaded.astype(jnp.bfloat16)
    loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if c.kind == "fp8":
        loaded = loaded.astype(jnp.float16).astype(jnp.float32)
    return plgpu.layout_cast(loaded.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
