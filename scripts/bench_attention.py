"""Time one layer's attention and K/V write of a backend; print a markdown table.

`python scripts/bench_attention.py --backend xla --dtype float32`

The last column is the time per key that a query row sees. Where it stays the same from context 64 to 8192,
the time is linear in the tokens attended to, however wide the block table is. The works take turns, so that
none finds its keys in a cache because it ran just before.
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

    def attention(self, rows: list[tuple[int, int]]) -> Callable[[], object]:
        """A call of attention over rows of (q_len, kv_len)."""
        q_lens, kv_lens = np.array(rows + [(0, 0)] * (NUM_ROWS - len(rows)), np.int32).T
        cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        q = jnp.ones((int(cu_q_lens[-1]), self.heads.num_heads, self.heads.head_dim), self.dtype)
        args = (q, jnp.asarray(cu_q_lens), jnp.asarray(kv_lens), self.tables)
        return lambda: self.attend(args[0], *self.pools, *args[1:])

    def writing(self, num_tokens: int) -> Callable[[], object]:
        """A call that writes that many tokens' K and V to consecutive slots."""
        k = jnp.ones((num_tokens, self.heads.num_kv_heads, self.heads.head_dim), self.dtype)
        slots = jnp.arange(num_tokens, dtype=jnp.int32)

        def write() -> object:
            self.pools = self.write(*self.pools, k, k, slots)
            return self.pools

        return write


def median_ms(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, taking turns; the first turn compiles and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(seconds[1:])) for name, seconds in times.items()}


def report(layer: Layer, repeats: int) -> None:
    """Print the table's rows for one layer."""
    decodes = {f"{NUM_ROWS} decodes at context {c}": [(1, c)] * NUM_ROWS for c in DECODE_CONTEXTS}
    decodes["1 decode at 8192, 31 at 64"] = [(1, 8192)] + [(1, 64)] * 31
    prompts = {
        "512-token prompt": [(512, 512)],
        "512-token chunk after 512": [(512, 1024)],
        "31 decodes at 192, 481-token prompt": [(1, 192)] * 31 + [(481, 481)],
    }
    calls = {work: layer.attention(rows) for work, rows in (decodes | prompts).items()}
    calls |= {f"write {num_tokens} tokens": layer.writing(num_tokens) for num_tokens in (32, 512)}
    for work, ms in median_ms(calls, repeats).items():
        keys = sum(kv_len for _, kv_len in decodes.get(work, []))
        print(f"| {layer.heads.name} | {work} | {ms:.2f} | {f'{1e6 * ms / keys:.0f}' if keys else ''} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, help="default: the best that can run")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--block-size", type=int, help="default: the backend's own")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    print("| heads | work of one layer | ms | ns per key |")
    print("|---|---|---|---|")
    for heads in MODELS:
        report(Layer(heads, args.backend, args.dtype, args.block_size), args.repeats)


if __name__ == "__main__":
    main()
