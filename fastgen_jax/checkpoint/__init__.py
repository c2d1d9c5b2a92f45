"""From a model's name to its parameters: find the checkpoint, open its tensors, stream them into a tree.

checkpoint = resolve("smollm2-135m")
params = load_params(checkpoint.open(), abstract_params, dtype="bfloat16", fused=..., tied=...)
tokenizer = checkpoint.tokenizer()
"""

from fastgen_jax.checkpoint.aliases import ALIASES
from fastgen_jax.checkpoint.kv_scales import WithoutKVScales, with_kv_scales
from fastgen_jax.checkpoint.laid_out import LaidOut
from fastgen_jax.checkpoint.load import Cut, load_params, planned_schemes
from fastgen_jax.checkpoint.quantized import check_quantization
from fastgen_jax.checkpoint.resolve import Checkpoint, resolve
from fastgen_jax.checkpoint.source import TensorSource

__all__ = [
    "ALIASES",
    "Checkpoint",
    "Cut",
    "LaidOut",
    "TensorSource",
    "WithoutKVScales",
    "check_quantization",
    "load_params",
    "planned_schemes",
    "resolve",
    "with_kv_scales",
]
