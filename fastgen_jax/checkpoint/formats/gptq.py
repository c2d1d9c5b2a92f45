"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it, in 4 or 8 bits.

`QuantLinear.pack` of https://github.com/AutoGPTQ/AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py):

qweight: int32 [E * bits / 32, F], in each word the values of neighbouring inputs, the first in the lowest bits.
qzeros: int32 [G, F * bits / 32], likewise of neighbouring outputs; less 1 in the format "gptq", as it is in "gptq_v2".
scales: float16 [G, F]. g_idx: int32 [E], the group of each input, of which only 0, 0, ..., 1, 1, ... is supported.

The weight is (value - zero) * scale, and zero is half the range where the config says "sym".
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastgen_jax.checkpoint.formats.format import (
    FLOATS,
    around,
    check_group,
    check_order,
    check_shape,
    group_dtype,
    groups_of,
    piece,
    shape_of,
    sizes_of,
    unpack,
    word_chunks,
)
from fastgen_jax.checkpoint.host_matrix import HostMatrix
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.schemes import Scheme

UNREAD = """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
    dataset desc_act disable_exllama exllama_config hyb_act is_marlin_format max_input_length meta model_file_base_name
    model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize mse offload_to_disk
    static_groups tokenizer true_sequential use_cuda_fp16 use_exllama
""".split()  # noqa: SIM905 (a list of strings would take a line for each)
"""Fields that say how a checkpoint was made, and with which kernels it might be run."""


@dataclass(frozen=True)
class Gptq:
    bits: int
    group: int | None
    symmetric: bool
    less_one: bool
    quantizes_head: bool

    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    unread: ClassVar[str | None] = None

    def planned(self, module: str, inputs: int) -> Scheme | None:
        if module == "lm_head" and not self.quantizes_head:
            return None
        check_group(self.group, module, inputs)
        return self._scheme("float16")

    def _scheme(self, dtype: str) -> Scheme:
        scale_dtype = "float32" if self.group is None else dtype
        return Scheme(f"int{self.bits}", self.group, zeros=not self.symmetric, scale_dtype=scale_dtype)

    def scheme(self, source: SafetensorsSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        per_word = 32 // self.bits
        num_words, outputs = sizes_of(source, module, "qweight", ["I32"])
        inputs = num_words * per_word
        check_group(self.group, module, inputs)
        groups, why = inputs // (self.group or inputs), f"with group_size={self.group or -1} and {inputs} inputs"
        check_shape(module, "scales", shape_of(source, module, "scales", FLOATS), (groups, outputs), why)
        check_shape(module, "qzeros", shape_of(source, module, "qzeros", ["I32"]), (groups, outputs // per_word), why)
        check_order(source, module, "g_idx", inputs, self.group)
        return self._scheme(group_dtype(source, f"{module}.scales", self.group)), (outputs, inputs)

    def read(self, source: SafetensorsSource, module: str, out: HostMatrix, rows: slice, columns: slice) -> None:
        per_word, middle = 32 // self.bits, 1 << (self.bits - 1)
        words, _ = around(columns, per_word)
        for chunk in word_chunks(words, 4 * (rows.stop - rows.start)):
            values = unpack(piece(source, f"{module}.qweight", (chunk, rows)).T, self.bits)
            first = chunk.start * per_word - columns.start
            out.values[:, first : first + values.shape[1]] = (values - np.uint8(middle)).view(np.int8)
        groups = groups_of(columns, self.group)
        out.scales[...] = piece(source, f"{module}.scales", (groups, rows)).T
        words, mine = around(rows, per_word)
        zeros = unpack(piece(source, f"{module}.qzeros", (groups, words)), self.bits)[:, mine].T
        zeros = (zeros + np.uint8(self.less_one)) & np.uint8(2 * middle - 1)
        if out.zeros is not None:
            out.zeros[...] = (zeros - np.uint8(middle)).view(np.int8)
        elif np.any(zeros != middle):
            raise ValueError(f"tensor '{module}.qzeros' has zeros that are not {middle}, as they are where sym is true")


def read(fields: HFConfig) -> Gptq:
    fields.only("pack_dtype", "int32")
    for name in ("adapter", "rotation", "dynamic"):  # the last: modules that differ from the others
        if value := fields.take(name):
            raise ValueError(f"{name}={value!r:.80} of this {fields.family} model is not supported")
    version = fields.take("checkpoint_format") or fields.take("format", "gptq")
    fields.take("format")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format={version!r} of this {fields.family} model must be 'gptq' or 'gptq_v2'")
    for name in UNREAD:
        fields.take(name)
    bits = fields.count("bits")
    if bits not in (4, 8):
        raise ValueError(f"bits={bits!r} of this {fields.family} model is not supported, only 4 or 8")
    return Gptq(
        bits,
        read_group(fields),
        symmetric=fields.take("sym", True),
        less_one=version == "gptq",
        quantizes_head=fields.take("lm_head", False),
    )


def read_group(fields: HFConfig, name: str = "group_size", default: int = 128) -> int | None:
    """Inputs that share a scale; -1 is all."""
    size = fields.take(name, default)
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 8 or size % 8:
        raise ValueError(f"{name}={size!r} of this {fields.family} model must be a multiple of 8, or -1 for all inputs")
    return size
