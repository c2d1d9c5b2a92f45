"""The least time that a step can take: bytes over bandwidth, operations over peak, whichever is more.

Counted are the weights, read once a step (of experts, those that its tokens take), the keys and values, read and
written, and the operations of matmuls and attention. Not counted: activations, sampling, launches, and under tensor
parallelism the communication.
"""

from dataclasses import dataclass
from typing import Literal

from fastgen_jax.gpus import Gpu


@dataclass(frozen=True)
class Work:
    """What a model's steps cost one device.

    weights_bytes: of the weights that a step reads whole; not of tables of which it reads a few rows, nor of experts.
    layer_params: weights of the layers' matmuls that a token is multiplied with, all layers together; head_params: of
        the one to the logits.
    kv_bytes: keys and values of one token in one layer.
    pair_flops: operations for one query of one token, over all heads, to attend to one key, in one layer.
    windows: of each layer, how many keys a query sees; None is all.
    experts_bytes: of all `num_experts` experts, all layers together, of which a token takes `experts_per_token`.
    """

    weights_bytes: int
    layer_params: int
    head_params: int
    kv_bytes: int
    pair_flops: int
    windows: tuple[int | None, ...]
    experts_bytes: int = 0
    num_experts: int = 1
    experts_per_token: int = 1

    def read_bytes(self, tokens: int) -> int:
        """Of weights, in a step of so many tokens, which share no expert as long as there are others."""
        hit = min(self.experts_per_token * tokens, self.num_experts)
        return self.weights_bytes + self.experts_bytes * hit // self.num_experts


@dataclass(frozen=True)
class Bound:
    """The bound of one step: what it moves and computes, and which of the two takes longer.

    tokens: computed in the step. tokens_per_s: of them, at the bound.
    """

    step: str
    tokens: int
    bytes: int
    flops: int
    seconds: float
    limit: Literal["memory", "compute"]
    tokens_per_s: float


def decode(work: Work, gpu: Gpu, dtype: str, num_seqs: int, context: int) -> Bound:
    """One token for each of `num_seqs` sequences of `context` tokens, the new one included."""
    keys = num_seqs * sum(_seen(context, window) for window in work.windows)
    name = f"decode, {num_seqs} x {context:,} tokens"
    return _bound(name, work, gpu, dtype, tokens=num_seqs, rows=num_seqs, keys=keys, pairs=keys)


def prompt(work: Work, gpu: Gpu, dtype: str, num_tokens: int) -> Bound:
    """The first `num_tokens` of one prompt; its keys are read once, by a kernel that keeps all queries on the chip."""
    pairs = sum(sum(_seen(i, window) for i in range(1, num_tokens + 1)) for window in work.windows)
    keys = num_tokens * len(work.windows)
    name = f"prompt, {num_tokens:,} tokens"
    return _bound(name, work, gpu, dtype, tokens=num_tokens, rows=1, keys=keys, pairs=pairs)


def knee(work: Work, gpu: Gpu, dtype: str) -> float:
    """Tokens in a step at which its matmuls take as long as reading the weights: fewer leave the GPU's units idle.

    So many tokens hit every expert.
    """
    return (work.weights_bytes + work.experts_bytes) / gpu.bandwidth * gpu.flops(dtype) / (2 * work.layer_params)


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _bound(name: str, work: Work, gpu: Gpu, dtype: str, *, tokens: int, rows: int, keys: int, pairs: int) -> Bound:
    """rows: sequences whose logits are computed. keys: read, summed over layers. pairs: of query and key, likewise."""
    num_bytes = work.read_bytes(tokens) + work.kv_bytes * (keys + tokens * len(work.windows))
    flops = 2 * (work.layer_params * tokens + work.head_params * rows) + work.pair_flops * pairs
    memory_s, compute_s = num_bytes / gpu.bandwidth, flops / gpu.flops(dtype)
    seconds = max(memory_s, compute_s)
    limit: Literal["memory", "compute"] = "memory" if memory_s >= compute_s else "compute"
    return Bound(name, tokens, num_bytes, flops, seconds, limit, tokens / seconds)
