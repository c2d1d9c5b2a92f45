"""An engine's shapes on a GPU that is not here: its weights, its programs, and the blocks that fit beside them."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from fastgen_jax import defaults, kernels, kv_pool, models
from fastgen_jax.gpus import Gpu
from fastgen_jax.kernels import Backend, mosaic_gpu
from fastgen_jax.kernels.mosaic_gpu import MosaicGpu, Target
from fastgen_jax.models.layers import Params
from fastgen_jax.programs import Key, Programs
from fastgen_jax.roofline import Work
from fastgen_jax.types import UNTUNED_BUDGET, EngineConfig


@dataclass(frozen=True)
class Shard:
    """A model's config as one of `tp` devices sees it: its share of the heads, of the MLP and of the vocabulary."""

    whole: Any
    tp: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            if (value := getattr(self.whole, name)) % self.tp:
                raise ValueError(f"tp={self.tp} does not divide the model's {name}, {value}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def num_heads(self) -> int:
        return self.whole.num_heads // self.tp

    @property
    def num_kv_heads(self) -> int:
        return self.whole.num_kv_heads // self.tp

    @property
    def intermediate_size(self) -> int:
        return self.whole.intermediate_size // self.tp

    @property
    def vocab_size(self) -> int:
        return -(-self.whole.vocab_size // self.tp)


def backend_for(gpu: Gpu, model_config: Any, dtype: str, config: EngineConfig) -> tuple[Backend, str | None]:
    """The attention backend of an engine on this GPU, and why it is not the GPU's own; None if it is, or was not asked.

    ValueError, one sentence, where the backend that was asked for cannot run.
    """
    reason = None
    heads = {name: getattr(model_config, name) for name in ("head_dim", "num_heads", "num_kv_heads")}
    if config.backend in (None, mosaic_gpu.NAME):
        backend = MosaicGpu(Target(gpu.capability, gpu.num_sms, gpu.limits.shared_per_block))
        block_size = config.block_size or backend.DEFAULT_BLOCK_SIZE
        reason = backend.supported(**heads, block_size=block_size, dtype=jnp.dtype(dtype), platform="gpu")
        if reason is None:
            return backend, None
        if config.backend is not None:
            raise ValueError(f"backend={config.backend!r} cannot run: {reason}")
    other = kernels.choose_backend(
        config.backend or "xla", **heads, block_size=config.block_size, dtype=jnp.dtype(dtype), platform="gpu"
    )
    return other, reason


class Sizing:
    """The sizes an `Engine` with `config` would have on `gpu`; everything is of one of `tp` devices.

    limit_bytes: what JAX may use on the device. budget_bytes: the share of it for weights, one step and the pool.
    """

    def __init__(self, hf_config: dict[str, Any], gpu: Gpu, config: EngineConfig, *, tp: int, mem_fraction: float):
        family = models.family(hf_config.get("model_type", ""))
        whole = family.from_hf(hf_config)
        self.gpu, self.config, self.tp = gpu, config, tp
        longest = whole.max_positions
        self.wanted_len = config.max_model_len or longest
        if self.wanted_len > longest:
            raise ValueError(f"max_model_len={self.wanted_len} is more than the model's {longest} positions")
        self.model_config = Shard(whole, tp) if tp > 1 else whole
        self.dtype = config.dtype or "bfloat16"  # an engine's choice on a GPU
        self.backend, self.backend_reason = backend_for(gpu, self.model_config, self.dtype, config)
        self.model = family.Model(self.model_config, self.backend)
        self.params = shapes(self.model, self.dtype)
        self.weights_bytes = num_bytes(self.params)
        self.limit_bytes = int(gpu.memory_bytes * mem_fraction)
        self.budget_bytes = int(self.limit_bytes * config.gpu_memory_utilization)
        self.block_size = config.block_size or self.backend.DEFAULT_BLOCK_SIZE
        given = config.max_num_batched_tokens
        # Nothing can be timed here.
        self.budget = max(UNTUNED_BUDGET, config.max_num_seqs or 0) if given == "auto" else given
        self.max_num_seqs = config.max_num_seqs or min(defaults.MAX_NUM_SEQS, self.budget)
        self.block_bytes = kv_pool.block_bytes(self.model_config, self.backend, self.block_size, self.dtype)

    @property
    def free_bytes(self) -> int:
        """What the weights leave of the budget; less than 0 if they are more than it."""
        return self.budget_bytes - self.weights_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one sequence."""
        return -(-num_tokens // self.block_size)

    def fit_blocks(self, step_bytes: Callable[[int], int]) -> int:
        """Blocks of the pool, as `ModelRunner` sizes it; ValueError if not even two fit beside a step."""
        most = self.max_num_seqs * self.blocks_for(self.wanted_len) + 1
        return kv_pool.size_pool(self.free_bytes, self.block_bytes, most, step_bytes)

    def max_model_len(self, num_blocks: int) -> int:
        """The longest sequence that a pool of so many blocks holds, up to the wanted length."""
        return min(self.wanted_len, (num_blocks - 1) * self.block_size + 1)

    def programs(self, num_blocks: int, max_model_len: int) -> Programs:
        """The engine's programs, none compiled yet."""
        return Programs.of_engine(
            self.model,
            self.params,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
        )

    @cached_property
    def work(self) -> Work:
        """What a step costs, for the roofline."""
        c, head = self.model_config, self.model.head_params(self.params)
        tables = num_bytes(leaves(self.params, "embedding")) - num_bytes(leaves(head, "embedding"))
        return Work(
            weights_bytes=self.weights_bytes - tables,
            layer_params=num_elements(leaves(self.params, "weight")) - num_elements(leaves(head, "weight")),
            head_params=num_elements(leaves(head, "weight", "embedding")),
            kv_bytes=self.block_bytes // (self.block_size * c.num_layers),
            pair_flops=4 * c.num_heads * c.head_dim,
            windows=c.windows,
        )


def shapes(model: Any, dtype: str) -> Params:
    """The model's parameters in `dtype`, as shapes."""
    params = jax.eval_shape(partial(models.init_params, model), jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), params)


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def num_elements(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def leaves(params: Params, *names: str) -> list[jax.ShapeDtypeStruct]:
    """The arrays of `params` that are called one of `names`."""
    return [x for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key in names]


def compile_all(
    programs: Programs, keys: list[Key], device: jax.Device, advance: Callable[[int], Any]
) -> dict[Key, float]:
    """Compile for `device`, several at once; key -> seconds that it took. advance: told of each that is done."""

    def compile_one(key: Key) -> float:
        start = time.perf_counter()
        with jax.default_device(device):  # a thread's own
            programs.get(*key)
        advance(1)
        return time.perf_counter() - start

    with ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1)) as threads:
        return dict(zip(keys, threads.map(compile_one, keys), strict=True))
