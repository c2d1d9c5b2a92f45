"""compressed-tensors, which llm-compressor writes: weights of int8 or `float8_e4m3fn`, or int4 packed into words.

https://github.com/vllm-project/compressed-tensors (quantization/quant_config.py, quant_args.py; compressors/), for a
module that a group of `config_groups` has among its targets:

weight: int8 or float8_e4m3fn [F, E] ("int-quantized", "float-quantized", "naive-quantized"). Or ("pack-quantized")
weight_packed: int32 [F, E * bits / 32], the value of the first input in the lowest bits, half the range added to it;
weight_shape: int64 [2].
weight_scale: float [1] of a tensor, [F, 1] of channels, [F, G] of groups, [F / 128, E / 128] of blocks.
weight_zero_point, where not symmetric: int8 of the same shape, or packed as the weight is, along the outputs.
The weight is (value - zero) * scale. input_scale and its like are for activations in 8 bits.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fastgen_jax.checkpoint.formats.format import (
    FLOATS,
    around,
    check_group,
    check_order,
    check_shape,
    groups_of,
    piece,
    read_block,
    shape_of,
    sizes_of,
    spread,
    unpack,
    word_chunks,
)
from fastgen_jax.checkpoint.host_matrix import HostMatrix
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.schemes import Scheme

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_KINDS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
_STORED_AS = {"int8": "I8", "fp8": "F8_E4M3"}


@dataclass(frozen=True)
class Weights:
    """Of the modules that `targets` mean. strategy: what shares a scale: a tensor, a channel, a group or a block."""

    targets: tuple[str, ...]
    kind: str
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool

    def scheme(self, module: str, inputs: int, dtype: str) -> Scheme:
        check_group(self.group, module, inputs)
        group = math.gcd(self.block[1], inputs) if self.block else self.group
        return Scheme(self.kind, group, not self.symmetric, "float32" if group is None else dtype)

    def scale_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        if self.block:
            return math.ceil(outputs / self.block[0]), math.ceil(inputs / self.block[1])
        return (1,) if self.strategy == "tensor" else (outputs, inputs // (self.group or inputs))


@dataclass(frozen=True)
class CompressedTensors:
    groups: tuple[Weights, ...]
    ignore: tuple[str, ...]

    marks: ClassVar[tuple[str, ...]] = ("weight", "weight_packed")
    parts: ClassVar[tuple[str, ...]] = (
        *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point"),
    )
    # The output_scale of a k_proj or v_proj is its KV cache's.
    unread: ClassVar[str | None] = r"\.(q_scale|[qkv]_zero_point|output_zero_point)$|(?<!\.[kv]_proj)\.output_scale$"

    def _weights(self, module: str) -> Weights | None:
        """The group that has a module, by its name first, and otherwise as a Linear."""
        by_name = (group for group in self.groups if any(_means(target, module) for target in group.targets))
        every = (group for group in self.groups if "Linear" in group.targets)
        return next(by_name, next(every, None))

    def planned(self, module: str, inputs: int) -> Scheme | None:
        weights = self._weights(module)
        if weights is None or any(_means(target, module) for target in self.ignore):
            return None
        return weights.scheme(module, inputs, "float32" if weights.block else "bfloat16")

    def scheme(self, source: SafetensorsSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        weights = self._weights(module)
        if weights is None:
            raise ValueError(f"{module!r} is quantised, and no group of quantization_config has it among its targets")
        outputs, inputs = self._shape(source, module, weights)
        name = f"{module}.weight_scale"
        found = shape_of(source, module, "weight_scale", FLOATS)
        scheme = weights.scheme(module, inputs, source.dtype(name).name)
        wanted, why = weights.scale_shape(outputs, inputs), f"of {inputs} inputs, by {weights.strategy}"
        if weights.group is not None:
            why += f" with group_size={weights.group}"
        check_shape(module, "weight_scale", found or (1,), wanted, why)
        if not weights.symmetric:
            zeros = shape_of(source, module, "weight_zero_point", ["I8", "I32"])
            if source.stored_as(f"{module}.weight_zero_point") == "I32":
                wanted = (math.ceil(wanted[0] / _per_word(weights.kind)), *wanted[1:])
            check_shape(module, "weight_zero_point", zeros or (1,), wanted, why)
        check_order(source, module, "weight_g_idx", inputs, weights.group)
        return scheme, (outputs, inputs)

    def _shape(self, source: SafetensorsSource, module: str, weights: Weights) -> tuple[int, int]:
        if f"{module}.weight" in source:
            if weights.kind not in _STORED_AS:
                raise ValueError(f"tensor '{module}.weight' is not packed, which {weights.kind} weights must be")
            return sizes_of(source, module, "weight", [_STORED_AS[weights.kind]])
        sizes = shape_of(source, module, "weight_shape", ["I64", "I32"])
        check_shape(module, "weight_shape", sizes, (2,), "for outputs and inputs")
        outputs, inputs = piece(source, f"{module}.weight_shape").tolist()
        packed = (outputs, math.ceil(inputs / _per_word(weights.kind)))
        check_shape(
            module, "weight_packed", shape_of(source, module, "weight_packed", ["I32"]), packed, "by its weight_shape"
        )
        return outputs, inputs

    def read(self, source: SafetensorsSource, module: str, out: HostMatrix, rows: slice, columns: slice) -> None:
        weights = self._weights(module)
        assert weights is not None
        if f"{module}.weight" in source:
            source.read_into(f"{module}.weight", out.values, (rows, columns))
        else:
            _read_packed(source, module, out, rows, columns)
        group = None if out.scales.shape[1] == 1 else out.shape[1] // out.scales.shape[1]
        out.scales[...] = self._spread(piece(source, f"{module}.weight_scale"), weights, rows, columns, group)
        if out.zeros is not None:
            zeros = piece(source, f"{module}.weight_zero_point")
            if zeros.dtype == np.int32:
                bits = 32 // _per_word(weights.kind)
                zeros = (unpack(zeros.T, bits) - np.uint8(1 << (bits - 1))).view(np.int8).T
            out.zeros[...] = self._spread(zeros, weights, rows, columns, group)

    def _spread(
        self, values: np.ndarray, weights: Weights, rows: slice, columns: slice, group: int | None
    ) -> np.ndarray:
        """Scales or zeros as they are stored, as those of rows and groups."""
        if weights.block:
            return spread(values, rows, columns, weights.block, group)
        if weights.strategy == "tensor":
            return values.reshape(1, 1)
        return values[rows, groups_of(columns, weights.group)]


def _per_word(kind: str) -> int:
    return 8 if kind == "int4" else 4


def _read_packed(source: SafetensorsSource, module: str, out: HostMatrix, rows: slice, columns: slice) -> None:
    per_word = _per_word(out.kind)
    words, mine = around(columns, per_word)
    middle = np.uint8(1 << (32 // per_word - 1))
    for chunk in word_chunks(rows, 4 * (words.stop - words.start)):
        values = unpack(piece(source, f"{module}.weight_packed", (chunk, words)), 32 // per_word)[:, mine]
        first = chunk.start - rows.start
        out.values[first : first + len(values)] = (values - middle).view(np.int8)


def _means(target: str, module: str) -> bool:
    """Whether a target is a module's name, or "re:" and a regular expression of its beginning."""
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def read(fields: HFConfig) -> CompressedTensors:
    groups = fields.need("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ValueError(f"config_groups={groups!r:.80} of this {fields.family} model must be an object of objects")
    if groups:
        fields.only("format", *_FORMATS)
        fields.only("quantization_status", "compressed")
    else:  # the KV cache alone is quantised
        fields.only("format", "dense", *_FORMATS)
        fields.take("quantization_status")
    for name in ("sparsity_config", "transform_config"):
        value = fields.take(name) or {}
        if not isinstance(value, Mapping) or value.get("format", "dense") != "dense" or value.get("config_groups"):
            raise ValueError(f"{name}={value!r:.80} of this {fields.family} model is not supported")
    for name in ("global_compression_ratio", "kv_cache_scheme", "version"):
        fields.take(name)
    return CompressedTensors(
        tuple(_weights(fields.family, name, group) for name, group in groups.items()),
        fields.names("ignore"),
    )


def _weights(family: str, name: str, group: Mapping[str, Any]) -> Weights:
    of, weights = f"config_groups.{name} of this {family} model", group.get("weights")
    given = HFConfig({**(weights if isinstance(weights, Mapping) else {}), "model_type": family})
    kind = _KINDS.get((str(given.take("type", "int")), given.count("num_bits", 8)))
    if kind is None or not isinstance(weights, Mapping):
        raise ValueError(f"{of} has weights {weights!r:.120}; it can have int of 4 or 8 bits, or float of 8")
    size, block = given.take("group_size"), read_block(given, "block_structure")
    strategy = given.take("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ValueError(f"{of} has the strategy {strategy!r}; supported are tensor, channel, group and block")
    if strategy == "group" and (not isinstance(size, int) or size < 1):
        raise ValueError(f"{of} has group_size={size!r}; by group, it must be a whole number from 1")
    if strategy == "block" and block is None:
        raise ValueError(f"{of} has weights by block and lacks block_structure")
    given.only("dynamic", False)
    for unread in ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        given.take(unread)
    symmetric = given.take("symmetric", True)
    given.finish()
    return Weights(
        HFConfig({**group, "model_type": family}).names("targets"),
        kind,
        strategy,
        size if strategy == "group" else None,
        block if strategy == "block" else None,
        symmetric,
    )
