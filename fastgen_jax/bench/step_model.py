"""Step models: how long the device and the host take for a step, from nothing but its rows."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from fastgen_jax.gpus import Gpu
from fastgen_jax.roofline import Work
from fastgen_jax.scheduler import Row

MATMUL_EFFICIENCY = 0.65
"""Of the tensor cores' peak. Assumed, with what the elementwise work between matmuls takes, which is not counted
apart."""

BANDWIDTH_EFFICIENCY = 0.8
"""Of the memory's. Assumed."""

ATTENTION_EFFICIENCY = 0.4
"""Of the tensor cores' peak, for prompts. Assumed: FlashAttention-2 (arXiv 2307.08691) reaches 0.5 to 0.73 of an
A100's over contiguous keys; over blocks, and on an H100, less."""

KERNELS_PER_LAYER = 16
"""docs/plan.md: 13.9 to 15.8, compiled for an H200."""

KERNEL_GAP_S = 1.5e-6
"""Between two kernels of a command buffer. Assumed."""

LINK_EFFICIENCY = 0.75
"""Of a link's bandwidth in one direction. Assumed."""

ALL_REDUCE_LATENCY_S = 15e-6
"""Of a small message among 4 GPUs over NVLink. Assumed."""

HOST_STEP_S, HOST_ROW_S = 0.63e-3, 17e-6
"""docs/performance.md: schedule, pack and update take 0.25 ms and 1.8 us a row, the call of a program 0.38 ms, and
detokenising 15 us a token."""

LOGITS_PASSES = 2 * 2
"""Passes over float32 logits in the memory: written, and read again by the sampler; each twice."""


class StepModel(Protocol):
    """What a simulated step costs."""

    def device_seconds(self, rows: Sequence[Row]) -> float:
        """Seconds from the moment that the device begins a step of these rows until its tokens are there."""
        ...

    def host_seconds(self, rows: Sequence[Row]) -> float:
        """Seconds of the host's own work on such a step."""
        ...


def padded(buckets: Sequence[int], size: int) -> int:
    """The smallest of `buckets` that holds `size`; `size` itself where there are none: nothing is padded."""
    return buckets[bisect_left(buckets, size)] if buckets else size


def keys_and_pairs(start: int, num_new: int, window: int | None) -> tuple[int, int]:
    """Of a row in one layer: keys that it reads, and pairs of a query and a key that it attends to.

    Token i of a sequence attends to itself and what is before it, of that to the last `window` keys at most.
    """
    stop = start + num_new
    pairs = num_new * start + num_new * (num_new + 1) // 2
    if window is None or stop <= window:
        return stop, pairs
    beyond = stop - max(start, window)  # queries that do not see everything
    unseen = beyond * (max(start, window) - window) + beyond * (beyond + 1) // 2
    return min(stop, window + num_new - 1), pairs - unseen


class Roofline:
    """The roofline of a model on one or several GPUs, at the efficiencies above.

    Parts follow one another, each as slow as its memory traffic or its operations: the layers' matmuls, attention of
    decodes (rows of one token), attention of prompts, the head with sampling, all-reduces, and the gaps between
    kernels. Operations are those of the bucket, padding included.

    work: of one device. hidden_size: elements of a token's activation, what an all-reduce adds up. tp: devices.
    buckets, row_buckets: ascending; empty where steps are not padded.
    """

    def __init__(
        self,
        work: Work,
        gpu: Gpu,
        *,
        hidden_size: int,
        vocab_size: int,
        dtype: str = "bfloat16",
        tp: int = 1,
        buckets: Sequence[int] = (),
        row_buckets: Sequence[int] = (),
    ) -> None:
        self._work, self._buckets, self._row_buckets = work, buckets, row_buckets
        itemsize = 4 if dtype == "float32" else 2
        num_layers = len(work.windows)
        self._windows = sorted(Counter(work.windows).items(), key=lambda item: item[0] or 0)
        self._bandwidth = gpu.bandwidth * BANDWIDTH_EFFICIENCY
        self._flops = gpu.flops(dtype) * MATMUL_EFFICIENCY
        self._attention_flops = gpu.flops(dtype) * ATTENTION_EFFICIENCY
        self._head_bytes = work.head_params * itemsize
        self._layers_token_s = 2 * work.layer_params / self._flops
        self._gaps_s = num_layers * KERNELS_PER_LAYER * KERNEL_GAP_S
        self._logits_bytes = LOGITS_PASSES * 4 * -(-vocab_size // tp)
        self._token_link_s = 0.0
        if tp > 1:
            link = gpu.link_bandwidth * LINK_EFFICIENCY
            self._gaps_s += 2 * num_layers * ALL_REDUCE_LATENCY_S
            self._token_link_s = 2 * num_layers * 2 * (tp - 1) / tp * hidden_size * itemsize / link

    def device_seconds(self, rows: Sequence[Row]) -> float:
        num_tokens = sum(row[2] for row in rows)
        tokens = padded(self._buckets, num_tokens)
        read_s = (self._work.read_bytes(num_tokens) - self._head_bytes) / self._bandwidth
        layers = max(read_s, self._layers_token_s * tokens)
        return self._gaps_s + layers + self._token_link_s * tokens + self._attention_s(rows) + self._head_s(len(rows))

    def host_seconds(self, rows: Sequence[Row]) -> float:
        return HOST_STEP_S + HOST_ROW_S * len(rows)

    def _attention_s(self, rows: Sequence[Row]) -> float:
        work = self._work
        decode_keys = prompt_keys = prompt_pairs = num_new_tokens = 0
        for window, num_layers in self._windows:
            for _, start, num_new, _ in rows:
                if num_new == 1:
                    keys = start + 1 if window is None else min(start + 1, window)
                    decode_keys += num_layers * keys
                else:
                    keys, pairs = keys_and_pairs(start, num_new, window)
                    prompt_keys += num_layers * keys
                    prompt_pairs += num_layers * pairs
                num_new_tokens += num_layers * num_new
        read = work.kv_bytes / self._bandwidth
        prompts = max(prompt_keys * read, prompt_pairs * work.pair_flops / self._attention_flops)
        return (decode_keys + num_new_tokens) * read + prompts

    def _head_s(self, num_rows: int) -> float:
        rows = padded(self._row_buckets, num_rows)
        memory_s = (self._head_bytes + rows * self._logits_bytes) / self._bandwidth
        return max(memory_s, 2 * self._work.head_params * rows / self._flops)
