"""An engine's shapes on a GPU that is not here: its weights, its programs, and the blocks that fit beside them."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from fastgen_jax import checkpoint, defaults, kernels, kv_pool, models
from fastgen_jax.gpus import Gpu
from fastgen_jax.kernels import Backend, mosaic_gpu
from fastgen_jax.kernels.mixed import Chip
from fastgen_jax.kernels.mosaic_gpu import MosaicGpu, Target
from fastgen_jax.models.layers import Params
from fastgen_jax.params import is_quantized, leaves_with_path, quantization
from fastgen_jax.programs import Programs
from fastgen_jax.quantization import on_chip
from fastgen_jax.roofline import Work
from fastgen_jax.scheduler import Window, widest
from fastgen_jax.schemes import NOT_QUANTIZED, Path, Scheme, projections_on_load, quantized_shapes
from fastgen_jax.sharding import WHOLE, Shards, check_heads, rules_for
from fastgen_jax.types import UNTUNED_BUDGET, EngineConfig


def backend_for(
    gpu: Gpu, model_config: Any, dtype: str, config: EngineConfig, shards: Shards = WHOLE
) -> tuple[Backend, str | None]:
    """The attention backend of an engine on this GPU, and why it is not the GPU's own; None if it is, or was not asked.

    ValueError, one sentence, where the backend that was asked for cannot run.
    """
    reason = None
    dtypes = {"dtype": jnp.dtype(dtype), "kv_dtype": kv_pool.pool_dtype(config.kv_cache_dtype, dtype)}
    heads = shards.head_sizes(model_config)
    if config.backend in (None, mosaic_gpu.NAME):
        backend = MosaicGpu(Target(gpu.capability, gpu.num_sms, gpu.limits.shared_per_block))
        block_size = config.block_size or backend.DEFAULT_BLOCK_SIZE
        reason = backend.supported(**heads, block_size=block_size, **dtypes, platform="gpu")
        if reason is None:
            return backend, None
        if config.backend is not None:
            raise ValueError(f"backend={config.backend!r} cannot run: {reason}")
    other = kernels.choose_backend(
        config.backend or "xla", **heads, block_size=config.block_size, **dtypes, platform="gpu"
    )
    return other, reason


class Sizing:
    """The sizes an `Engine` with `config` would have on `gpu`; everything is of one of `tp` devices.

    devices: as many as `tp`, to compile for; without them there is arithmetic only.
    limit_bytes: what JAX may use on the device. budget_bytes: the share of it for weights, one step and the pool.
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        gpu: Gpu,
        config: EngineConfig,
        *,
        tp: int,
        mem_fraction: float,
        devices: list[jax.Device] | None = None,
    ):
        family = models.family(hf_config.get("model_type", ""))
        self.model_config = c = family.from_hf(hf_config)
        rules = rules_for(c, config.expert_parallel)
        check_heads(c, tp, rules)
        self.gpu, self.config, self.tp = gpu, config, tp
        self.shards = Shards.over(devices, rules) if devices and tp > 1 else Shards.of_size(tp, rules)
        longest = c.max_positions
        self.wanted_len = config.max_model_len or longest
        if self.wanted_len > longest:
            raise ValueError(f"max_model_len={self.wanted_len} is more than the model's {longest} positions")
        self.dtype = config.dtype or "bfloat16"  # an engine's choice on a GPU
        self.kv_dtype = kv_pool.pool_dtype(config.kv_cache_dtype, self.dtype)
        self.backend, self.backend_reason = backend_for(gpu, c, self.dtype, config, self.shards)
        self.model = family.Model(c, self.backend, self.shards)
        checkpoint.check_quantization(config.quantization, hf_config, c)
        self._schemes = self._planned_schemes(hf_config)
        self.params = quantized_shapes(local_shapes(self.model, self.dtype), self._schemes)
        self.weights_bytes = num_bytes(self.params)
        self.limit_bytes = int(gpu.memory_bytes * mem_fraction)
        self.budget_bytes = int(self.limit_bytes * config.gpu_memory_utilization)
        self.block_size = config.block_size or self.backend.DEFAULT_BLOCK_SIZE
        given = config.max_num_batched_tokens
        # Nothing can be timed here.
        self.budget = max(UNTUNED_BUDGET, config.max_num_seqs or 0) if given == "auto" else given
        self.max_num_seqs = config.max_num_seqs or min(defaults.MAX_NUM_SEQS, self.budget)
        self.window = Window.under(config.policy, widest(c.windows), self.block_size)
        self.block_bytes = kv_pool.block_bytes(self.model, self.block_size, self.kv_dtype)

    def _planned_schemes(self, hf_config: dict[str, Any]) -> dict[Path, Scheme]:
        """How the matrices are quantised, by the checkpoint's config or by the engine's."""
        shapes, axes = models.param_shapes(self.model)
        if self.config.quantization:
            return projections_on_load(self.config.quantization, shapes, axes, self.dtype)
        if config := hf_config.get("quantization_config"):
            return checkpoint.planned_schemes(config, self.model, shapes, axes)
        return {}

    @property
    def quantization(self) -> str | None:
        """What the quantised matrices are stored as."""
        return quantization(self.params)

    @property
    def free_bytes(self) -> int:
        """What the weights leave of the budget; less than 0 if they are more than it."""
        return self.budget_bytes - self.weights_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one sequence holds at most while it generates its way to so many tokens."""
        return self.window.most_blocks(num_tokens)

    def fit_blocks(self, step_bytes: Callable[[int], int]) -> int:
        """Blocks of the pool, as `ModelRunner` sizes it; ValueError if not even two fit beside a step."""
        most = self.max_num_seqs * -(-self.wanted_len // self.block_size) + 1
        return kv_pool.size_pool(self.free_bytes, self.block_bytes, most, step_bytes)

    def max_model_len(self, num_blocks: int) -> int:
        """The longest sequence that a pool of so many blocks holds, up to the wanted length."""
        return min(self.wanted_len, self.window.longest(num_blocks - 1))

    def programs(self, num_blocks: int, max_model_len: int) -> Programs:
        """The engine's programs, none compiled yet."""
        return Programs.of_engine(
            self.model,
            on_chip(shapes(self.model, self.dtype, self._schemes), Chip(self.gpu.capability, self.gpu.num_sms)),
            kv_dtype=self.kv_dtype,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
        )

    @cached_property
    def work(self) -> Work:
        """What a step costs, for the roofline."""
        c, head, experts = self.model_config, self.model.head_params(self.params), expert_leaves(self.params)
        tables = num_bytes(leaves(self.params, "embedding")) - num_bytes(leaves(head, "embedding"))
        num_experts, top_k = (m.num_experts, m.top_k) if (m := getattr(c, "mixture", None)) else (1, 1)
        unused = num_elements(experts) * (num_experts - top_k) // num_experts
        return Work(
            weights_bytes=self.weights_bytes - tables - num_bytes(experts),
            layer_params=num_elements(leaves(self.params, "weight")) - num_elements(leaves(head, "weight")) - unused,
            head_params=num_elements(leaves(head, "weight", "embedding")),
            kv_bytes=self.block_bytes // (self.block_size * c.num_layers),
            pair_flops=4 * self.shards.local(c.num_heads, "heads") * c.head_dim,
            windows=c.windows,
            experts_bytes=num_bytes(experts),
            num_experts=num_experts,
            experts_per_token=top_k,
        )


def local_shapes(model: Any, dtype: str) -> Params:
    """One device's share of the model's parameters in `dtype`, as shapes."""
    local, _ = models.param_shapes(model)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), local)


def shapes(model: Any, dtype: str, schemes: Mapping[Path, Scheme] = NOT_QUANTIZED) -> Params:
    """The model's parameters in `dtype`, those of `schemes` quantised, as shapes that say how they are shared out."""

    def of_all(axes: tuple[str | None, ...], local: Any) -> Any:
        def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                model.shards.shape(x.shape, axes), x.dtype, sharding=model.shards.sharding(*axes)
            )

        return jax.tree.map(one, local)

    local = quantized_shapes(local_shapes(model, dtype), schemes)
    _, axes = models.param_shapes(model)
    return jax.tree.map(of_all, axes, local, is_leaf=lambda axes: isinstance(axes, tuple))


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def num_elements(tree: Any) -> int:
    """Weights, however they are stored."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree, is_leaf=is_quantized))


def leaves(params: Params, *names: str) -> list[Any]:
    """The arrays and quantised matrices of `params` that are called one of `names`."""
    return [x for path, x in leaves_with_path(params) if path[-1].key in names]


def expert_leaves(params: Params) -> list[jax.ShapeDtypeStruct]:
    """The stacks of experts of which a token takes a few."""
    return [x for path, x in leaves_with_path(params) if any(part.key == "experts" for part in path)]
