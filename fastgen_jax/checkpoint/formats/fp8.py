"""Hugging Face's "fp8": weights of `float8_e4m3fn`, with one scale a matrix or one a block of it.

`FP8Linear` of https://github.com/huggingface/transformers (integrations/finegrained_fp8.py):

weight: float8_e4m3fn [F, E]. weight_scale_inv: float32 [F / 128, E / 128], rounded up, or of the blocks that
`weight_block_size` says; of a whole matrix [] or [1], and then it may be called weight_scale. The weight is the value
times its scale, whatever the name says. activation_scale and input_scale are for activations in 8 bits.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from fastgen_jax.checkpoint.formats.format import (
    FLOATS,
    check_shape,
    is_named,
    piece,
    read_block,
    shape_of,
    sizes_of,
    spread,
)
from fastgen_jax.checkpoint.host_matrix import HostMatrix
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.schemes import Scheme

_SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Fp8:
    """block: outputs and inputs that share a scale; None: all do."""

    block: tuple[int, int] | None
    unquantized: tuple[str, ...]

    marks: ClassVar[tuple[str, ...]] = ("weight",)
    parts: ClassVar[tuple[str, ...]] = ("weight", *_SCALES, "activation_scale", "input_scale")
    unread: ClassVar[str | None] = None

    def planned(self, module: str, inputs: int) -> Scheme | None:
        return None if module == "lm_head" or is_named(module, self.unquantized) else self._scheme(inputs)

    def _scheme(self, inputs: int) -> Scheme:
        return Scheme("fp8", self.block and math.gcd(self.block[1], inputs))

    def scheme(self, source: SafetensorsSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        outputs, inputs = sizes_of(source, module, "weight", ["F8_E4M3"])
        part = self._scales(source, module)
        found = shape_of(source, module, part, FLOATS)
        if self.block is None:
            if math.prod(found) != 1:
                check_shape(module, part, found, (1,), "without weight_block_size")
        else:
            blocks = math.ceil(outputs / self.block[0]), math.ceil(inputs / self.block[1])
            check_shape(module, part, found, blocks, f"in blocks of {self.block[0]} by {self.block[1]}")
        return self._scheme(inputs), (outputs, inputs)

    def _scales(self, source: SafetensorsSource, module: str) -> str:
        return next((part for part in _SCALES if f"{module}.{part}" in source), _SCALES[0])

    def read(self, source: SafetensorsSource, module: str, out: HostMatrix, rows: slice, columns: slice) -> None:
        source.read_into(f"{module}.weight", out.values, (rows, columns))
        scales = piece(source, f"{module}.{self._scales(source, module)}")
        if self.block is None:
            out.scales[...] = scales.reshape(1, 1)
        else:
            group = out.shape[1] // out.scales.shape[1]
            out.scales[...] = spread(scales, rows, columns, self.block, group)


def read(fields: HFConfig) -> Fp8:
    fields.only("fmt", "e4m3")
    fields.only("scale_fmt", "float")
    fields.only("activation_scheme", "dynamic", "static")
    fields.only("expert_dtype", "fp8")
    fields.only("modules_to_convert", None)
    fields.take("dequantize")
    skipped = (*fields.names("modules_to_not_convert"), *fields.names("ignored_layers"))
    return Fp8(read_block(fields, "weight_block_size"), skipped)
