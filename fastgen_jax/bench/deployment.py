"""`Deployment`: a model on GPUs that are not here, by arithmetic alone: nothing is compiled."""

from dataclasses import dataclass, replace
from typing import Any

from fastgen_jax.batch import bucket_ladder
from fastgen_jax.bench.simulator import SimulatedEngine, SimulatorConfig
from fastgen_jax.bench.step_model import Roofline
from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.gpus import Gpu
from fastgen_jax.models import family
from fastgen_jax.models.hf_config import first_layers
from fastgen_jax.plan import MAX_TP
from fastgen_jax.roofline import Work
from fastgen_jax.scheduler import widest
from fastgen_jax.sizing import Sizing
from fastgen_jax.types import EngineConfig

MEMORY_SHARE = 0.9
"""Of a GPU's memory, for weights, a step and the pool: an engine's default, of a JAX that may use it all."""

STEP_BYTES = 1 << 30
"""Kept for a step's temporaries and the runtime. docs/plan.md: a step of llama2-7b takes 0.2 GB."""


@dataclass(frozen=True)
class Deployment:
    """A model on `tp` GPUs; all figures are those of one of them.

    weights_bytes: of all weights, embedding tables included.
    """

    model: str
    gpu: Gpu
    tp: int
    dtype: str
    work: Work
    weights_bytes: int
    hidden_size: int
    vocab_size: int
    max_positions: int

    @classmethod
    def of(
        cls,
        model: str,
        gpu: Gpu,
        *,
        tp: int = 1,
        dtype: str = "bfloat16",
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
    ) -> "Deployment":
        """A deployment of an alias, a folder, a config.json or a .gguf file. ValueError, one sentence, if it cannot be.

        Where layers have the same weights, those of one and two layers tell those of all.
        """
        if not 1 <= tp <= MAX_TP:
            raise ValueError(f"tp={tp} must be a whole number from 1 to {MAX_TP}")
        hf_config = read_config(model)
        config = family(hf_config.get("model_type", "")).from_hf(hf_config)
        engine = EngineConfig(dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization)
        work, weights_bytes = _costs(hf_config, config, gpu, tp, engine)
        return cls(
            model,
            gpu,
            tp,
            dtype,
            work,
            weights_bytes=weights_bytes,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
        )

    def num_blocks(self, block_size: int) -> int:
        """Blocks of the KV pool, the null block included; ValueError if the weights leave no room for two."""
        block_bytes = block_size * self.work.kv_bytes * len(self.work.windows)
        free = int(self.gpu.memory_bytes * MEMORY_SHARE) - self.weights_bytes - STEP_BYTES
        if free < 2 * block_bytes:
            raise ValueError(
                f"{self.model} does not fit: {self.weights_bytes / 1e9:.1f} GB of weights on each of {self.tp} "
                f"{self.gpu.name} of {self.gpu.memory_bytes / 1e9:.1f} GB; raise tp or choose a larger GPU"
            )
        return free // block_bytes

    def roofline(self, config: SimulatorConfig) -> Roofline:
        """The step model of an engine of that `config`."""
        return Roofline(
            self.work,
            self.gpu,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            tp=self.tp,
            buckets=bucket_ladder(config.max_num_batched_tokens) if config.pad else (),
            row_buckets=bucket_ladder(config.max_num_seqs) if config.pad else (),
        )

    def engine(self, config: SimulatorConfig) -> SimulatedEngine:
        """A simulated engine, with all the memory's blocks for its pool."""
        if (config.max_model_len or 0) > self.max_positions:
            raise ValueError(
                f"max_model_len={config.max_model_len} is more than the model's {self.max_positions} positions"
            )
        return SimulatedEngine(
            self.roofline(config),
            config,
            num_blocks=self.num_blocks(config.block_size),
            max_model_len=self.max_positions,
            window=widest(self.work.windows),
        )


def _costs(hf_config: dict[str, Any], config: Any, gpu: Gpu, tp: int, engine: EngineConfig) -> tuple[Work, int]:
    """What a step of the model costs, and the bytes of all its weights."""
    if len(set(getattr(config, "mixtures", ()))) > 1:  # some layers have experts and some have not
        whole = _sizing(hf_config, gpu, tp, engine)
        return whole.work, whole.weights_bytes
    one, two = (_sizing(first_layers(hf_config, layers), gpu, tp, engine) for layers in (1, 2))
    more = config.num_layers - 1
    work = replace(
        one.work,
        weights_bytes=one.work.weights_bytes + more * (two.work.weights_bytes - one.work.weights_bytes),
        experts_bytes=one.work.experts_bytes * config.num_layers,
        layer_params=one.work.layer_params * config.num_layers,
        windows=config.windows,
    )
    return work, one.weights_bytes + more * (two.weights_bytes - one.weights_bytes)


def _sizing(hf_config: dict[str, Any], gpu: Gpu, tp: int, engine: EngineConfig) -> Sizing:
    return Sizing(hf_config, gpu, engine, tp=tp, mem_fraction=1)
