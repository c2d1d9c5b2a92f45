"""Time products with quantised weights on this CPU against those with bfloat16 ones; print a markdown table.

`python scripts/bench_quantized_matmul.py`

Each cell is the time with the quantised weight over the time with the other one, below 1 where quantised is faster:
the median over pairs of calls, one after the other, and the ratio of the fastest calls, which says more where others
use the machine. `--by` takes another baseline: "float32", weight and activations, or "summed", a bfloat16 weight whose
products with one token are summed up outright, which XLA:CPU is faster at than at its matmul.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastgen_jax.models.layers import matmul
from fastgen_jax.quantization import KINDS, QuantizedMatrix, pack

# Outputs and inputs: of SmolLM2-135M, of SmolLM2-360M's MLP, and of models of 1B.
SHAPES = [(576, 576), (3072, 576), (576, 1536), (5120, 960), (960, 2560), (2048, 2048), (8192, 2048), (2048, 8192)]
GROUP = 64
CACHE_BYTES = 64 << 20


def quantized(kind: str, shape: tuple[int, int], num_groups: int) -> QuantizedMatrix:
    rng = np.random.default_rng(0)
    if kind == "fp8":
        values = rng.standard_normal(shape).astype(jnp.float8_e4m3fn)
    else:
        values = rng.integers(*{"int8": (-127, 128), "int4": (-8, 8)}[kind], shape).astype(np.int8)
    scales = rng.uniform(0.5, 1, (shape[0], num_groups)).astype(np.float32)
    return QuantizedMatrix(jnp.asarray(pack(kind, values)), jnp.asarray(scales), None, kind)


def summed(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32), axis=1)[None].astype(x.dtype)


BASELINES = {"bfloat16": matmul, "float32": matmul, "summed": summed}


def in_turn(weight: Any) -> Iterator[Any]:
    """Copies of a weight, again and again, that are together more than a cache holds, as a model's weights are."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    return itertools.cycle([jax.tree.map(jnp.copy, weight) for _ in range(-(-CACHE_BYTES // size))])


def seconds(product: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(product(*args))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--by", choices=BASELINES, default="bfloat16")
    args = parser.parse_args()
    product, baseline = jax.jit(matmul), jax.jit(BASELINES[args.by])
    dtype = "float32" if args.by == "float32" else "bfloat16"
    variants = [(kind, grouped) for grouped in (False, True) for kind in KINDS]
    names = [f"{kind}{f', groups of {GROUP}' if grouped else ''}" for kind, grouped in variants]
    print("| T | outputs x inputs | " + f"{args.by} us | " + " | ".join(names) + " |")
    print("|---|---|" + "---:|" * (len(names) + 1))
    for num_tokens in args.tokens:
        for shape in SHAPES:
            rng = np.random.default_rng(1)
            x = jnp.asarray(rng.standard_normal((num_tokens, shape[1])), dtype)
            plain = jnp.asarray(rng.standard_normal(shape), dtype)
            weights = [quantized(kind, shape, shape[1] // GROUP if grouped else 1) for kind, grouped in variants]
            plains, *turns = (in_turn(weight) for weight in (plain, *weights))
            jax.block_until_ready([baseline(x, plain), *(product(x, weight) for weight in weights)])
            pairs: list[list[tuple[float, float]]] = [[] for _ in weights]
            for _ in range(args.repeats):
                for turn, found in zip(turns, pairs, strict=True):
                    found.append((seconds(baseline, x, next(plains)), seconds(product, x, next(turn))))
            fastest = min(before for found in pairs for before, _ in found)
            cells = [f"{fastest * 1e6:.0f}"]
            for found in pairs:
                median = statistics.median(after / before for before, after in found)
                cells.append(f"{median:.2f}, {min(after for _, after in found) / fastest:.2f}")
            print(f"| {num_tokens} | {shape[0]} x {shape[1]} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
