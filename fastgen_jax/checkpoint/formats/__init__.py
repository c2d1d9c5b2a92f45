"""The formats of quantised checkpoints, one file each, named by Hugging Face's `quant_method`."""

from collections.abc import Callable, Mapping
from typing import Any

from fastgen_jax.checkpoint.formats import awq, compressed_tensors, fp8, gptq
from fastgen_jax.checkpoint.formats.format import Format
from fastgen_jax.models.hf_config import HFConfig

FORMATS: dict[str, Callable[[HFConfig], Format]] = {
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
}


def method(config: Any) -> str:
    """What a `quantization_config` calls itself; ValueError unless it is an object."""
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config is {config!r:.80}; it must be an object")
    is_bitsandbytes = "load_in_4bit" in config or "load_in_8bit" in config  # which used not to say so
    return str(config.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "?"))


def read_format(config: Mapping[str, Any]) -> Format:
    """From a `quantization_config`; ValueError, one sentence, for what is not understood."""
    name = method(config)
    if name not in FORMATS:
        raise ValueError(
            f"quant_method={name!r} of this checkpoint is not supported; the methods are {', '.join(FORMATS)}"
        )
    fields = HFConfig({**config, "model_type": f"{name}-quantised"})
    fields.take("quant_method")
    found = FORMATS[name](fields)
    fields.finish()
    return found


__all__ = ["FORMATS", "Format", "method", "read_format"]
