"""What a format of quantised checkpoints offers, and what they share.

A module of F outputs and E inputs, with G groups of inputs that share a scale.
"""

import math
import re
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from fastgen_jax.checkpoint.host_matrix import HostMatrix
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.checkpoint.source import Region, row_chunks
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.schemes import Scheme

FLOATS = ("F16", "BF16", "F32")
"""What scales may be stored as, in safetensors' names."""


class Format(Protocol):
    """How a checkpoint's modules are quantised, as its `quantization_config` says.

    marks: last parts of the names of tensors that only a quantised module has ("weight": unless it holds floats of 16
        bits or more). parts: those of the others that it has. unread: a regular expression of tensors that only say how
        activations would be quantised, which stay in 16 or 32 bits here.
    """

    marks: ClassVar[tuple[str, ...]]
    parts: ClassVar[tuple[str, ...]]
    unread: ClassVar[str | None]

    def planned(self, module: str, inputs: int) -> Scheme | None:
        """By the config alone, the scheme of a projection or an output head; None where it is not quantised."""
        ...

    def scheme(self, source: SafetensorsSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        """The scheme and (F, E) of a quantised module, from the headers of its tensors.

        ValueError naming the tensor that is missing or does not fit.
        """
        ...

    def read(self, source: SafetensorsSource, module: str, out: HostMatrix, rows: slice, columns: slice) -> None:
        """Some outputs and inputs of a module, a small piece at a time; the columns are whole groups."""
        ...


def shape_of(source: SafetensorsSource, module: str, part: str, dtypes: Sequence[str]) -> tuple[int, ...]:
    """Of a tensor that a quantised module must have, stored as one of `dtypes`, in safetensors' names."""
    name = f"{module}.{part}"
    if name not in source:
        raise ValueError(f"the checkpoint lacks tensor {name!r}, which the quantised {module!r} needs")
    if (found := source.stored_as(name)) not in dtypes:
        raise ValueError(f"tensor {name!r} is stored as {found}; this format has it as {' or '.join(dtypes)}")
    return source.shape(name)


def sizes_of(source: SafetensorsSource, module: str, part: str, dtypes: Sequence[str]) -> tuple[int, int]:
    """`shape_of` a tensor that is a matrix."""
    found = shape_of(source, module, part, dtypes)
    if len(found) != 2:
        raise ValueError(f"tensor '{module}.{part}' has shape {found}; it must be a matrix")
    return found[0], found[1]


def check_shape(module: str, part: str, found: tuple[int, ...], wanted: tuple[int, ...], why: str) -> None:
    if found != wanted:
        raise ValueError(f"tensor '{module}.{part}' has shape {found}; {why} it must have {wanted}")


def check_group(group: int | None, module: str, inputs: int) -> None:
    if group is not None and inputs % group:
        raise ValueError(f"group_size={group} does not divide the {inputs} inputs of {module!r}")


def check_order(source: SafetensorsSource, module: str, part: str, inputs: int, group: int | None) -> None:
    """ValueError for a module whose groups are not neighbours: it was quantised in the order of its activations."""
    name = f"{module}.{part}"
    if group is None or name not in source:
        return
    check_shape(module, part, source.shape(name), (inputs,), f"of {inputs} inputs")
    if not np.array_equal(source.read(name), np.arange(inputs) // group):
        raise ValueError(
            f"tensor {name!r} deals the inputs out to groups in the order of their activations (desc_act, actorder), "
            "which is not supported; take a checkpoint quantised without"
        )


def group_dtype(source: SafetensorsSource, name: str, group: int | None) -> str:
    """The dtype that scales are kept in: of groups, which are many, the checkpoint's."""
    return "float32" if group is None else source.dtype(name).name


def piece(source: SafetensorsSource, name: str, region: Region | None = None) -> np.ndarray:
    """A region of a tensor, in its own dtype."""
    if region is None:
        return source.read(name)
    out = np.empty([part.stop - part.start for part in region], source.dtype(name))
    source.read_into(name, out, region)
    return out


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., n], whose lowest bits come first -> uint8 [..., 32 / bits * n]."""
    found = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return found
    values = np.empty((*found.shape, 2), np.uint8)
    np.bitwise_and(found, 15, out=values[..., 0])
    np.right_shift(found, 4, out=values[..., 1])
    return values.reshape(*found.shape[:-1], -1)


def around(wanted: slice, per_word: int) -> tuple[slice, slice]:
    """The words that hold entries `wanted`, and where these are among what the words hold."""
    words = slice(wanted.start // per_word, math.ceil(wanted.stop / per_word))
    first = wanted.start - words.start * per_word
    return words, slice(first, first + wanted.stop - wanted.start)


def word_chunks(words: slice, row_bytes: int) -> list[slice]:
    """`words`, in pieces that are read at once."""
    chunks = row_chunks(words.stop - words.start, row_bytes)
    return [slice(words.start + chunk.start, words.start + chunk.stop) for chunk in chunks]


def groups_of(columns: slice, group: int | None) -> slice:
    return slice(0, 1) if group is None else slice(columns.start // group, columns.stop // group)


def spread(scales: np.ndarray, rows: slice, columns: slice, block: tuple[int, int], group: int | None) -> np.ndarray:
    """Scales of blocks of `block` outputs and inputs, [blocks, blocks] -> those of rows and groups, [F, G].

    group: divides the inputs of a block; None: there is one block of inputs.
    """
    firsts = [0] if group is None else range(columns.start, columns.stop, group)
    return scales[np.arange(rows.start, rows.stop)[:, None] // block[0], np.array(firsts)[None, :] // block[1]]


def read_block(fields: HFConfig, name: str) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale; None where the field is absent."""
    block = fields.take(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(f"{name}={block!r:.80} of this {fields.family} model must be two numbers above 0")
    return block[0], block[1]


def is_named(module: str, names: Sequence[str]) -> bool:
    """Whether `modules_to_not_convert` means a module: by its beginning, up to a dot, or its end.

    So transformers' `should_convert_module` has it.
    """
    return any(re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(name) for name in names)
