"""From a model's name to everything an engine is made of."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgen_jax import budget, checkpoint, defaults, kernels, kv_pool, models, schemes
from fastgen_jax.kernels.mixed import Chip
from fastgen_jax.models.layers import Params
from fastgen_jax.orders import Group
from fastgen_jax.params import one_dtype, quantization
from fastgen_jax.quantization import on_chip
from fastgen_jax.runner import ModelRunner
from fastgen_jax.sharding import WHOLE, Shards, check_heads, rules_for
from fastgen_jax.types import EngineConfig


class Pretrained(NamedTuple):
    """What `Engine` takes of the same names."""

    model: Any
    params: Params
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    default_params: dict[str, Any]


def load(
    name: str,
    config: EngineConfig,
    *,
    revision: str | None,
    group: Group | None = None,
    show_progress: bool | None,
) -> Pretrained:
    """Find a model and load it; a model that is not supported is refused before its tensors are read.

    group: processes that share it, each of which calls this: ValueError unless they have the same model and versions.
    """
    found = checkpoint.resolve(name, revision=revision)
    if group is not None:
        group.agree(_facts(config, found))
    model_config = models.family(found.hf_config.get("model_type", "")).from_hf(found.hf_config)
    dtype = config.dtype or defaults.dtype()
    shards = shards_for(config, model_config)
    backend = kernels.choose_backend(
        config.backend,
        **shards.head_sizes(model_config),
        block_size=config.block_size,
        dtype=jnp.dtype(dtype),
        kv_dtype=kv_pool.pool_dtype(config.kv_cache_dtype, dtype),
    )
    tokenizer = found.tokenizer()
    model, params = load_model(
        found,
        model_config,
        backend,
        dtype,
        shards,
        show_progress,
        quantize=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    eos = defaults.eos_token_ids(found.generation_config, found.hf_config, {"eos_token_id": tokenizer.eos_token_id})
    return Pretrained(model, params, tokenizer, eos, defaults.sampling(found.generation_config))


def load_model(
    found: checkpoint.Checkpoint,
    model_config: Any,
    backend: kernels.Backend,
    dtype: str,
    shards: Shards,
    show_progress: bool | None,
    *,
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[Any, Params]:
    """The model of a checkpoint, and its params, each device's in its memory.

    quantize: the kind that its projections are quantised to. The params have the scales that the checkpoint brings for
    its KV cache only where kv_cache_dtype is "fp8".
    """
    checkpoint.check_quantization(quantize, found.hf_config, model_config)
    family = models.family(found.hf_config["model_type"])
    model = family.Model(model_config, backend, shards)
    shapes, axes = models.param_shapes(model)
    whole, cut = shapes, None
    if shards.size > 1:
        whole, _ = models.param_shapes(model.clone(shards=WHOLE))
        cut = checkpoint.Cut(shards, shapes, axes, model_config.fused(shards))
    opened = found.open()
    if hasattr(family, "layout"):
        opened = checkpoint.LaidOut(opened, family.layout(model_config))
    source = checkpoint.WithoutKVScales(opened)
    params = checkpoint.load_params(
        source,
        whole,
        dtype=dtype,
        fused=model_config.fused(),
        tied=model_config.tie_word_embeddings,
        cut=cut,
        quantize=schemes.projections_on_load(quantize, shapes, axes, dtype) if quantize else {},
        progress=show_progress,
    )
    if kv_cache_dtype == "fp8":
        params = checkpoint.with_kv_scales(
            params, source.scales(), lambda scale: shards.everywhere(np.asarray(scale, jnp.dtype(dtype)))
        )
    return model, params


def _facts(config: EngineConfig, found: checkpoint.Checkpoint) -> dict[str, str]:
    """What processes that share a model must have in common, by name."""
    return {
        "the engine's configuration": repr(replace(config, seed=0)),  # only the leader draws seeds
        "the checkpoint's fingerprint": found.fingerprint(),
    }


def shards_for(config: EngineConfig, model_config: Any) -> Shards:
    """The first `tensor_parallel` devices, with a part of the model each; ValueError if it or they do not suffice."""
    tensor_parallel, rules = config.tensor_parallel, rules_for(model_config, config.expert_parallel)
    check_heads(model_config, tensor_parallel, rules)
    devices = jax.devices()
    if tensor_parallel > len(devices):
        hint = f"; XLA_FLAGS=--xla_force_host_platform_device_count={tensor_parallel} makes as many of a CPU"
        raise ValueError(
            f"tensor_parallel={tensor_parallel} is more than the devices that JAX sees, {len(devices)}"
            + (hint if devices[0].platform == "cpu" else "")
        )
    if jax.process_count() > 1 and tensor_parallel != len(devices):
        raise ValueError(
            f"tensor_parallel={tensor_parallel} leaves out some of the {len(devices)} devices that "
            f"{jax.process_count()} processes have; it must be {len(devices)}"
        )
    return Shards.over(devices[:tensor_parallel], rules)


def make_runner(model: Any, params: Params, config: EngineConfig, group: Group | None = None) -> ModelRunner:
    """The device's side of an engine; ValueError where `config`, the model and its params do not fit together.

    Quantised matrices are told the GPU that they are multiplied on, wherever they come from.
    """
    found = one_dtype(params).name
    if config.dtype not in (None, found):
        raise ValueError(f"dtype={config.dtype!r} does not fit params of {found}; cast them first")
    stored = quantization(params)
    if config.quantization not in (None, stored):
        raise ValueError(f"quantization={config.quantization!r} does not fit params of {stored or found}; load them so")
    if config.backend not in (None, model.backend.NAME):
        raise ValueError(f"backend={config.backend!r} is not the model's, which is {model.backend.NAME!r}")
    block_size = config.block_size or model.backend.DEFAULT_BLOCK_SIZE
    if config.kv_cache_dtype != "auto":  # the model may have been made without it
        sizes, kv_dtype = model.shards.head_sizes(model.config), kv_pool.pool_dtype(config.kv_cache_dtype, found)
        reason = model.backend.supported(
            **sizes, block_size=block_size, dtype=found, platform=jax.default_backend(), kv_dtype=kv_dtype
        )
        if reason is not None:
            raise ValueError(f"backend={model.backend.NAME!r} cannot run: {reason}")
    if config.tensor_parallel not in (1, size := model.shards.size):
        raise ValueError(f"tensor_parallel={config.tensor_parallel} is not the model's, which has {size} shards")
    if config.compile_cache:
        defaults.enable_compile_cache()
    longest = model.config.max_positions
    wanted = config.max_model_len or longest
    if wanted > longest:
        raise ValueError(f"max_model_len={wanted} is more than the model's {longest} positions")
    largest = budget.largest(config)
    return ModelRunner(
        model,
        on_chip(params, Chip.here()),
        config,
        max_num_batched_tokens=largest,
        max_model_len=wanted,
        max_num_seqs=config.max_num_seqs or min(defaults.MAX_NUM_SEQS, largest),
        block_size=block_size,
        group=group,
    )
