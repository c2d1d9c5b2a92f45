"""AWQ (arXiv 2306.00978) in 4 bits, in the version "gemm" of AutoAWQ.

`WQLinear_GEMM` of https://github.com/casper-hansen/AutoAWQ (awq/modules/linear/gemm.py):

qweight: int32 [E, F / 8], in each word the values of eight neighbouring outputs, from the lowest bits on those of the
outputs `ORDER`. qzeros: int32 [G, F / 8], likewise. scales: float16 [G, F]. The weight is (value - zero) * scale.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastgen_jax.checkpoint.formats.format import (
    FLOATS,
    around,
    check_group,
    check_shape,
    group_dtype,
    groups_of,
    is_named,
    piece,
    shape_of,
    sizes_of,
    unpack,
    word_chunks,
)
from fastgen_jax.checkpoint.formats.gptq import UNREAD, read_group
from fastgen_jax.checkpoint.host_matrix import HostMatrix
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.schemes import Scheme

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = np.argsort(ORDER)


@dataclass(frozen=True)
class Awq:
    group: int | None
    unquantized: tuple[str, ...]

    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    unread: ClassVar[str | None] = None

    def planned(self, module: str, inputs: int) -> Scheme | None:
        if module == "lm_head" or is_named(module, self.unquantized):
            return None
        check_group(self.group, module, inputs)
        return self._scheme("float16")

    def _scheme(self, dtype: str) -> Scheme:
        return Scheme("int4", self.group, zeros=True, scale_dtype="float32" if self.group is None else dtype)

    def scheme(self, source: SafetensorsSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        inputs, num_words = sizes_of(source, module, "qweight", ["I32"])
        check_group(self.group, module, inputs)
        groups, why = inputs // (self.group or inputs), f"with group_size={self.group or -1} and {inputs} inputs"
        check_shape(module, "scales", shape_of(source, module, "scales", FLOATS), (groups, 8 * num_words), why)
        check_shape(module, "qzeros", shape_of(source, module, "qzeros", ["I32"]), (groups, num_words), why)
        return self._scheme(group_dtype(source, f"{module}.scales", self.group)), (8 * num_words, inputs)

    def read(self, source: SafetensorsSource, module: str, out: HostMatrix, rows: slice, columns: slice) -> None:
        words, mine = around(rows, 8)
        for chunk in word_chunks(columns, 4 * (words.stop - words.start)):
            values = _outputs(piece(source, f"{module}.qweight", (chunk, words)))[:, mine]
            first = chunk.start - columns.start
            out.values[:, first : first + len(values)] = values.T
        groups = groups_of(columns, self.group)
        out.scales[...] = piece(source, f"{module}.scales", (groups, rows)).T
        assert out.zeros is not None
        out.zeros[...] = _outputs(piece(source, f"{module}.qzeros", (groups, words)))[:, mine].T


def _outputs(words: np.ndarray) -> np.ndarray:
    """int32 [n, F / 8] -> int8 [n, F], the outputs in their order, less 8."""
    found = unpack(words, 4).reshape(*words.shape, 8)[..., _PLACES]
    return (found - np.uint8(8)).view(np.int8).reshape(len(words), -1)


def read(fields: HFConfig) -> Awq:
    version = fields.take("version") or fields.take("format", "gemm")
    fields.take("format")
    if str(version).lower() != "gemm":
        raise ValueError(f"version={version!r} of this {fields.family} model is not supported, only 'gemm'")
    fields.only("zero_point", True)
    for name in ("bits", "w_bit"):
        fields.only(name, 4)
    for name in (*UNREAD, "sym", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"):
        fields.take(name)
    group = read_group(fields)
    group = read_group(fields, "q_group_size", group or -1)  # as quant_config.json calls it
    return Awq(group, fields.names("modules_to_not_convert"))
