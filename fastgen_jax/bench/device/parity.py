"""Stage `parity`: the attention kernels against `fastgen_jax.kernels.reference`, over drawn shapes and batches."""

import itertools
import random
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fastgen_jax.bench.device.record import Stage, one_line
from fastgen_jax.bench.device.sizes import Sizes
from fastgen_jax.kernels import Backend, choose_backend, reference

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}  # of the largest value of the reference's result
COMPILING_AT_ONCE = 8


@dataclass(frozen=True)
class Case:
    """A shape, and the rows (query tokens, tokens attended to) of a batch. The padding follows them."""

    dtype: str
    head_dim: int
    num_kv_heads: int
    group: int
    block_size: int
    window: int | None
    softcap: float | None
    rows: tuple[tuple[int, int], ...]
    pad_rows: int
    pad_tokens: int

    @property
    def name(self) -> str:
        return (
            f"{self.dtype} D={self.head_dim} K={self.num_kv_heads} G={self.group} B={self.block_size} "
            f"window={self.window} softcap={self.softcap}"
        )

    @property
    def num_tokens(self) -> int:
        return sum(q_len for q_len, _ in self.rows) + self.pad_tokens


def draw(index: int, sizes: Sizes) -> Case:
    """The case of this index: every head dim and block size in turn, and the rest by chance."""
    rng = random.Random(index)
    block_size = BLOCK_SIZES[index % 4]
    context = sizes.parity_context
    decodes = [1, block_size, block_size + 1, context, *(rng.randint(1, context) for _ in range(rng.randint(0, 5)))]
    rows = [(1, kv_len) for kv_len in decodes]
    for _ in range(rng.randint(1, 3)):
        q_len = rng.randint(2, sizes.parity_chunk)
        rows.append((q_len, q_len + rng.choice((0, rng.randint(1, context - q_len)))))
    rng.shuffle(rows)
    return Case(
        dtype=("bfloat16", "float16")[index // 2 % 2],
        head_dim=HEAD_DIMS[index % 5],
        num_kv_heads=rng.choice((1, 2, 4)),
        group=rng.choice(GROUPS),
        block_size=block_size,
        window=rng.choice((7, 130, 1500)) if index % 3 == 2 else None,
        softcap=rng.choice((3.0, 20.0)) if index % 7 == 6 else None,
        rows=tuple(rows),
        pad_rows=rng.randint(0, 4),
        pad_tokens=rng.randint(0, 40),
    )


def batch(case: Case, seed: int) -> tuple[np.ndarray, ...]:
    """slots [M] of the M tokens attended to, cu_q_lens, kv_lens, block_tables and num_splits; int32.

    Blocks lie in the pool in no order, and two of them, beside the null block, belong to nobody.
    """
    rng = np.random.default_rng(seed)
    num_rows, size = len(case.rows) + case.pad_rows, case.block_size
    used = [-(-kv_len // size) for _, kv_len in case.rows]
    blocks = iter(1 + rng.permutation(sum(used) + 2))
    tables = np.zeros((num_rows, max(used)), np.int32)
    slots = []
    for row, (_, kv_len) in enumerate(case.rows):
        tables[row, : used[row]] = list(itertools.islice(blocks, used[row]))
        position = np.arange(kv_len)
        slots.append(tables[row, position // size] * size + position % size)
    q_lens = [q_len for q_len, _ in case.rows] + [0] * case.pad_rows
    kv_lens = [kv_len for _, kv_len in case.rows] + [0] * case.pad_rows
    num_splits = rng.integers(0, 17, num_rows)
    arrays = (np.concatenate(slots), np.cumsum([0, *q_lens]), kv_lens, tables, num_splits)
    return tuple(np.asarray(array, np.int32) for array in arrays)


def compare(case: Case, backend: Backend, key: Array, slots: Array, *lengths: Array) -> dict[str, Array]:
    """Run a case both ways: the largest `error` and `value`, and whether `padding` tokens are zeros.

    The pools are NaN wherever no token was written: none of it may reach the result, where it would make the error
    NaN. lengths: cu_q_lens, kv_lens, block_tables and num_splits.
    """
    *tables, num_splits = lengths
    shape = (len(slots), case.num_kv_heads, case.head_dim)
    k, v = (jax.random.normal(k, shape, case.dtype) for k in jax.random.split(key))
    q = 2 * jax.random.normal(key, (case.num_tokens, case.num_kv_heads * case.group, case.head_dim), case.dtype)
    num_blocks = 3 + sum(-(-kv_len // case.block_size) for _, kv_len in case.rows)

    def attend(by: Any, dtype: str) -> Array:
        shapes = by.pool_shapes(num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
        pools = by.write_kv(*(jnp.full(s, jnp.nan, dtype) for s in shapes), k.astype(dtype), v.astype(dtype), slots)
        out = by.ragged_attention(
            q.astype(dtype), *pools, *tables,
            scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap, num_splits=num_splits,
        )  # fmt: skip
        return out.astype(jnp.float32)

    out, expected = attend(backend, case.dtype), attend(reference, "float32")
    padding = out[case.num_tokens - case.pad_tokens :]
    return {"error": jnp.abs(out - expected).max(), "value": jnp.abs(expected).max(), "padding": jnp.all(padding == 0)}


def measure(stage: Stage, sizes: Sizes) -> None:
    """A row a case: `error`, of the largest value, the `tolerance` for it, and whether it is `ok`."""
    cases = [draw(index, sizes) for index in range(sizes.parity_cases)]
    threads = ThreadPoolExecutor(COMPILING_AT_ONCE)
    try:
        programs = [threads.submit(compile_case, case, index) for index, case in enumerate(cases)]
        for index, (case, program) in enumerate(zip(cases, programs, strict=True)):
            wait([program], timeout=max(stage.left_s, 0))
            stage.check_time()
            stage.add(case=case.name, rows=case.rows, **check(case, index, program))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def check(case: Case, index: int, program: Future) -> dict[str, Any]:
    """What a case's program finds, or why it finds nothing."""
    try:
        backend, run = program.result()
        found = jax.device_get(run(jax.random.key(index), *batch(case, index)))
    except Exception as error:
        return {"ok": False, "failed": one_line(error)}
    relative, tolerance = float(found["error"] / found["value"]), TOLERANCE[case.dtype]
    ok = relative <= tolerance and bool(found["padding"])  # NaN is no less than anything
    return {"ok": ok, "error": relative, "tolerance": tolerance, "backend": backend}


def compile_case(case: Case, index: int) -> tuple[str, Any]:
    """The name of the backend that runs a case, and the compiled comparison."""
    backend = choose_backend(
        head_dim=case.head_dim,
        num_heads=case.num_kv_heads * case.group,
        num_kv_heads=case.num_kv_heads,
        block_size=case.block_size,
        dtype=case.dtype,
    )
    run = jax.jit(lambda *args: compare(case, backend, *args))
    return backend.NAME, run.lower(jax.random.key(index), *batch(case, index)).compile()
