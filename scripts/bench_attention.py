"""Time one layer's attention and K/V write of a backend; print a markdown table.

`python scripts/bench_attention.py --backend xla --dtype float32`

The last column is what one more context token costs a row, over what it costs from context 64 to 512:
1.0 is linear in the tokens attended to, however wide the block table is.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgen_jax.kernels import BACKENDS, DTYPES, choose_backend

MAX_MODEL_LEN = 16384
NUM_ROWS = 32
POOL_BYTES = 512 << 20  # past this, rows share blocks: far more than a cache holds either way


class Heads(NamedTuple):
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = [Heads("H=9 K=3 D=64", 9, 3, 64), Heads("H=32 K=8 D=128", 32, 8, 128)]
DECODE_CONTEXTS = [64, 192, 512, 2048, 8192]


class Layer:
    """One layer's pools under a full block table, and the compiled calls on them."""

    def __init__(self, heads: Heads, backend: str | None, dtype: str, block_size: int | None) -> None:
        self.heads, self.dtype = heads, jnp.dtype(dtype)
        _, num_heads, num_kv_heads, head_dim = heads
        self.kernels = choose_backend(
            backend,
            head_dim=head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            dtype=dtype,
        )
        block_size = block_size or self.kernels.DEFAULT_BLOCK_SIZE
        block_bytes = 2 * block_size * num_kv_heads * head_dim * self.dtype.itemsize
        columns = MAX_MODEL_LEN // block_size
        self.num_slots = min(NUM_ROWS * columns + 1, POOL_BYTES // block_bytes) * block_size
        num_blocks = self.num_slots // block_size
        shapes = self.kernels.pool_shapes(num_blocks, block_size, num_kv_heads, head_dim)
        self.pools = tuple(jnp.full(shape, 0.5, self.dtype) for shape in shapes)
        # Columns first, so that short rows share no block.
        ids = 1 + np.arange(NUM_ROWS * columns) % (num_blocks - 1)
        self.tables = jnp.asarray(ids.reshape(columns, NUM_ROWS).T, jnp.int32)
        self.attend = jax.jit(self._attend)
        self.write = jax.jit(self.kernels.write_kv, donate_argnums=(0, 1))

    def _attend(self, q: jax.Array, *rest: jax.Array) -> jax.Array:
        return self.kernels.ragged_attention(q, *rest, scale=self.heads.head_dim**-0.5)

    def attention_ms(self, rows: list[tuple[int, int]], repeats: int) -> float:
        """Milliseconds of attention over rows of (q_len, kv_len)."""
        q_lens, kv_lens = np.array(rows + [(0, 0)] * (NUM_ROWS - len(rows)), np.int32).T
        cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        q = jnp.ones((int(cu_q_lens[-1]), self.heads.num_heads, self.heads.head_dim), self.dtype)
        args = (q, *self.pools, jnp.asarray(cu_q_lens), jnp.asarray(kv_lens), self.tables)
        return median_ms(lambda: self.attend(*args), repeats)

    def write_ms(self, num_tokens: int, repeats: int) -> float:
        """Milliseconds of writing that many tokens' K and V to consecutive slots."""
        k = jnp.ones((num_tokens, self.heads.num_kv_heads, self.heads.head_dim), self.dtype)
        slots = jnp.arange(num_tokens, dtype=jnp.int32)

        def write() -> tuple[jax.Array, ...]:
            self.pools = self.write(*self.pools, k, k, slots)
            return self.pools

        return median_ms(write, repeats)


def median_ms(call: Callable[[], object], repeats: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def report(layer: Layer, repeats: int) -> None:
    """Print the table's rows for one layer."""

    def line(work: str, ms: float, note: str = "") -> None:
        print(f"| {layer.heads.name} | {work} | {ms:.2f} | {note} |", flush=True)

    decode = {c: layer.attention_ms([(1, c)] * NUM_ROWS, repeats) for c in DECODE_CONTEXTS}
    slope = (decode[512] - decode[64]) / (512 - 64)
    for context, ms in decode.items():
        relative = (ms - decode[64]) / (context - 64) / slope if context > 512 else None
        line(f"{NUM_ROWS} decodes at context {context}", ms, f"{relative:.2f}" if relative else "")
    line("1 decode at 8192, 31 at 64", layer.attention_ms([(1, 8192)] + [(1, 64)] * 31, repeats))
    line("512-token prompt", layer.attention_ms([(512, 512)], repeats))
    line("512-token chunk after 512", layer.attention_ms([(512, 1024)], repeats))
    line("31 decodes at 192, 481-token prompt", layer.attention_ms([(1, 192)] * 31 + [(481, 481)], repeats))
    line("write 32 tokens", layer.write_ms(32, repeats))
    line("write 512 tokens", layer.write_ms(512, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, help="default: the best that can run")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--block-size", type=int, help="default: the backend's own")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    print("| heads | work of one layer | ms | marginal cost |")
    print("|---|---|---|---|")
    for heads in MODELS:
        report(Layer(heads, args.backend, args.dtype, args.block_size), args.repeats)


if __name__ == "__main__":
    main()
