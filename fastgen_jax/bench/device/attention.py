"""Stages `decode` and `prefill`: one layer's attention, held against the copy bandwidth and the matmul peak."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fastgen_jax.bench.device import torch_sdpa
from fastgen_jax.bench.device.record import Stage
from fastgen_jax.bench.device.sizes import Decodes, Heads, Prefill, Sizes
from fastgen_jax.bench.device.timing import random_array, seconds_per_call
from fastgen_jax.kernels import choose_backend
from fastgen_jax.scheduler.split_plan import SplitPlanner

POLICIES = ("waves", "proportional", "fixed(8)", "none")
DTYPE = jnp.dtype(jnp.bfloat16)
DECODE_BUCKETS = (16, 64, 256)

Shape = tuple[int, int, int]
"""Of a batch: tokens, rows, blocks a row. One program serves all batches of a shape, whatever their lengths."""


class Layer:
    """One layer's pools, full of random K and V, and the programs that attend over them.

    A program makes several attention calls. As in a model's layers, each takes the output of the one before as its
    queries and reads other blocks, and all share what is worked out from the lengths. So a call's time is that of a
    layer within a step: without the host's part, and with keys that no cache holds yet.
    """

    def __init__(self, heads: Heads, sizes: Sizes) -> None:
        self.heads, self._num_calls, self._min_time_s = heads, sizes.chained_calls, sizes.min_time_s
        _, num_heads, num_kv_heads, head_dim = heads
        self.backend = choose_backend(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=DTYPE)
        self.block_size = self.backend.DEFAULT_BLOCK_SIZE
        num_blocks = sizes.pool_tokens // self.block_size
        shapes = self.backend.pool_shapes(num_blocks, self.block_size, num_kv_heads, head_dim)
        self.pools = tuple(random_array(seed, shape) for seed, shape in enumerate(shapes))
        self._blocks = 1 + np.random.default_rng(0).permutation(num_blocks - 1)
        # Jitted, so that the calls of a program are traced once.
        self._attend = jax.jit(partial(self.backend.ragged_attention, scale=head_dim**-0.5))

    @property
    def block_bytes(self) -> int:
        """K and V of a block."""
        return 2 * self.block_size * self.heads.num_kv_heads * self.heads.head_dim * DTYPE.itemsize

    def num_blocks_of(self, kv_len: int) -> int:
        return -(-kv_len // self.block_size)

    def planner(self, policy: str) -> SplitPlanner:
        """Dynamic SplitKV as the engine has it; for 132 SMs where the backend splits nothing."""
        num_heads, num_kv_heads, head_dim = self.heads.num_heads, self.heads.num_kv_heads, self.heads.head_dim
        limits = self.backend.split_limits(head_dim, num_heads, num_kv_heads, self.block_size, DTYPE)
        num_readers, max_extra = limits or (132, None)
        return SplitPlanner(num_kv_heads, num_readers, self.block_size, policy=policy, max_extra=max_extra)

    def compile(self, shape: Shape) -> Any:
        """The program for batches of this shape."""
        num_tokens, num_rows, blocks_per_row = shape

        def run(q: Array, pools: tuple[Array, ...], tables: list[Array], *lengths: Array) -> Array:
            cu_q_lens, kv_lens, num_splits = lengths
            for table in tables:
                q = self._attend(q, *pools, cu_q_lens, kv_lens, table, num_splits=num_splits)
            return q

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        q = jax.ShapeDtypeStruct((num_tokens, self.heads.num_heads, self.heads.head_dim), DTYPE)
        tables = [ints(num_rows, blocks_per_row)] * self._num_calls
        lengths = ints(num_rows + 1), ints(num_rows), ints(num_rows)
        return jax.jit(run).lower(q, self.pools, tables, *lengths).compile()

    def tables(self, kv_lens: list[int], num_rows: int, blocks_per_row: int) -> list[np.ndarray]:
        """A block table for each call.

        The pool's blocks, in no order, go to row after row and call after call, and then all again: a block that is
        read twice is read after as much else as the pool holds.
        """
        tables = np.zeros((self._num_calls, num_rows, blocks_per_row), np.int32)
        first = 0
        for table in tables:
            for row, kv_len in enumerate(kv_lens):
                used = self.num_blocks_of(kv_len)
                table[row, :used] = self._blocks[np.arange(first, first + used) % len(self._blocks)]
                first += used
        return list(tables)

    def seconds(self, program: Any, shape: Shape, rows: list[tuple[int, int]], splits: list[int]) -> float:
        """Of one attention call over rows of (query tokens, tokens attended to), in the program of this shape."""
        num_tokens, num_rows, blocks_per_row = shape
        q_lens, kv_lens, num_splits = np.zeros((3, num_rows), np.int32)
        q_lens[: len(rows)], kv_lens[: len(rows)] = zip(*rows, strict=True)
        num_splits[: len(rows)] = splits
        cu_q_lens = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
        q = random_array(2, (num_tokens, self.heads.num_heads, self.heads.head_dim))
        tables = self.tables([kv_len for _, kv_len in rows], num_rows, blocks_per_row)
        args = jax.device_put((q, self.pools, tables, cu_q_lens, kv_lens, num_splits))
        return seconds_per_call(partial(program, *args), self._min_time_s) / self._num_calls


def compile_all(layer: Layer, shapes: Iterable[Shape]) -> dict[Shape, Any]:
    """The programs of a layer, compiled at once."""
    different = sorted(set(shapes))
    with ThreadPoolExecutor(len(different)) as threads:
        return dict(zip(different, threads.map(layer.compile, different), strict=True))


def measure_decode(stage: Stage, sizes: Sizes) -> None:
    """A row a batch and policy, `bytes` being those of K and V read, in whole blocks."""
    for heads in dict.fromkeys(case.heads for case in sizes.decodes):
        cases = [case for case in sizes.decodes if case.heads == heads]
        stage.check_time()
        layer = Layer(heads, sizes)
        blocks_per_row = max(layer.num_blocks_of(max(case.kv_lens)) for case in cases)
        shape_of = {case: (bucket := _bucket(case), bucket, blocks_per_row) for case in cases}
        programs = compile_all(layer, shape_of.values())
        for case in cases:
            _measure_policies(stage, layer, case, shape_of[case], programs[shape_of[case]])
    if jax.default_backend() == "gpu":
        torch_sdpa.measure(stage, sizes.decodes)


def _bucket(case: Decodes) -> int:
    return next(bucket for bucket in DECODE_BUCKETS if bucket >= len(case.kv_lens))


def _measure_policies(stage: Stage, layer: Layer, case: Decodes, shape: Shape, program: Any) -> None:
    """A policy that plans as one before it has that one's time."""
    rows = [(1, kv_len) for kv_len in case.kv_lens]
    seconds: dict[tuple[int, ...], float] = {}
    for policy in POLICIES:
        splits = layer.planner(policy).plan(case.kv_lens)
        if tuple(splits) not in seconds:
            stage.check_time()
            seconds[tuple(splits)] = layer.seconds(program, shape, rows, splits)
        stage.add(
            kv_heads=case.heads.num_kv_heads,
            batch=case.name,
            policy=policy,
            splits=sum(splits),
            bytes=sum(map(layer.num_blocks_of, case.kv_lens)) * layer.block_bytes,
            seconds=seconds[tuple(splits)],
        )


def measure_prefill(stage: Stage, sizes: Sizes) -> None:
    """A row a chunk and context; `flops` are those of the keys that the queries see, none of the masked ones."""
    for heads in dict.fromkeys(case.heads for case in sizes.prefills):
        cases = [case for case in sizes.prefills if case.heads == heads]
        stage.check_time()
        layer = Layer(heads, sizes)
        blocks_per_row = max(layer.num_blocks_of(case.context + case.chunk) for case in cases)
        shape_of = {case: (case.chunk, DECODE_BUCKETS[0], blocks_per_row) for case in cases}
        programs = compile_all(layer, shape_of.values())
        for case in cases:
            stage.check_time()
            shape = shape_of[case]
            stage.add(
                kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                chunk=case.chunk,
                context=case.context,
                flops=flops(case),
                seconds=layer.seconds(programs[shape], shape, [(case.chunk, case.context + case.chunk)], [0]),
            )


def flops(case: Prefill) -> int:
    """Of q . k and of the weighted sum of v: 4 D for each query head and pair of a query and a key that it sees."""
    pairs = sum(case.context + i + 1 for i in range(case.chunk))
    return 4 * case.heads.head_dim * case.heads.num_heads * pairs
