"""A GGUF file: its metadata and its tensors (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The header is parsed here and not by `gguf.GGUFReader`, which takes seconds and 160 MB for the
vocabulary of a 135M model; the quantised blocks are decoded by the gguf package.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from fastgen_jax.checkpoint.dequantize import decodable_type, dequantize
from fastgen_jax.checkpoint.source import Region, as_rows, assign, read_exactly, row_chunks

ARCHITECTURES = ("llama", "qwen2")  # llama.cpp calls Mistral a llama too

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # in front of a string
_CHUNK_BYTES = 256 << 10  # of quantised data decoded at once: the decoder's many temporaries stay in cache
_PERMUTED = re.compile(r"self_attn\.([qk])_proj\.")

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. shape: NumPy's order, e.g. [out, in]. start: its first byte in the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Everything in a GGUF file but the tensors' data."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return self.metadata.get("general.architecture", "")

    def get(self, key: str, default: Any = None) -> Any:
        """The architecture's own metadata: get("block_count") is "llama.block_count" of a llama."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def ties_embeddings(self) -> bool:
        """Whether the output projection is the embedding: not stored, or stored again bit for bit."""
        output, embedding = self.tensors.get("output.weight"), self.tensors["token_embd.weight"]
        if output is None:
            return True
        if (output.type, output.shape) != (embedding.type, embedding.shape):
            return False
        return all(
            np.array_equal(
                read_exactly(self.path, output.start + piece.start, piece.stop - piece.start),
                read_exactly(self.path, embedding.start + piece.start, piece.stop - piece.start),
            )
            for piece in row_chunks(output.nbytes, 1)
        )


def read_header(path: Path) -> GGUFHeader:
    """Parse a GGUF file of a supported architecture; a ValueError of one sentence says what else it is."""
    file_bytes = path.stat().st_size
    if file_bytes < 24:
        raise ValueError(f"{path} is not a GGUF file: it has only {file_bytes} bytes")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
        try:
            header = _parse(path, _Cursor(data))
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: its GGUF header does not parse; download it again") from error
    if header.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path} holds the architecture {header.architecture!r}; GGUF files are read for {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in header.tensors:
        raise ValueError(f"{path} has no token_embd.weight, so it is not a whole language model")
    for tensor in header.tensors.values():
        if tensor.start + tensor.nbytes > file_bytes:
            raise ValueError(f"{path} is cut short: tensor {tensor.name!r} ends after the file; download it again")
    return header


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalars(self, fmt: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{fmt}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{fmt}")
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at = self.data, self.at
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + _LENGTH.unpack_from(data, at)[0]
            found.append(data[start:at].decode("utf-8"))
            if at > len(data):
                raise struct.error("string ends after the file")
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalars(_SCALARS[kind])[0]
        element, count = self.scalars("I")[0], self.scalars("Q")[0]
        if element == _STRING:
            return self.strings(count)
        if element == _ARRAY:
            return [self.value(element) for _ in range(count)]
        return list(self.scalars(_SCALARS[element], count))


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    cursor.at = 4
    (version,) = cursor.scalars("I")
    if version not in (2, 3):
        raise ValueError(f"{path} is GGUF version {version} (or big-endian); versions 2 and 3, little-endian, are read")
    num_tensors, num_fields = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalars("I")[0])
    infos = []
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalars("I")[0]
        dims = cursor.scalars("Q", num_dims)
        infos.append((name, dims[::-1], *cursor.scalars("I"), *cursor.scalars("Q")))
    align = metadata.get("general.alignment", 32)
    first = -(-cursor.at // align) * align
    tensors = {name: _tensor(path, name, shape, kind, first + offset) for name, shape, kind, offset in infos}
    return GGUFHeader(path, metadata, tensors)


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
    if (type_ := decodable_type(kind)) is None:
        raise ValueError(f"tensor {name!r} in {path} has GGML type {kind}, which the gguf package cannot decode")
    block_size, block_bytes = GGML_QUANT_SIZES[type_]
    if shape and shape[-1] % block_size:
        raise ValueError(f"tensor {name!r} in {path} has rows of {shape[-1]}, not a multiple of {block_size}")
    return GGUFTensor(name, type_, shape, start, math.prod(shape) // block_size * block_bytes)


class GGUFSource:
    """The tensors of a GGUF file, dequantised, under Hugging Face's names.

    llama.cpp interleaves the rows of each llama head of q and k for its own rotary embedding; here they are
    put back. `rope_freqs.weight` is no tensor of the model: `hf_config` turns it into `rope_scaling`.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.bytes_read = 0
        self._header = header
        tied = header.ties_embeddings()
        self._tensors = {
            _hf_name(header.path, tensor.name): tensor
            for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.start)
            if tensor.name != "rope_freqs.weight" and not (tied and tensor.name == "output.weight")
        }

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read_into(self, name: str, out: np.ndarray, region: Region | None = None) -> None:
        if region is not None:  # blocks run along rows, and rows may be permuted: a tensor is read whole
            assign(out, slice(None), self.read(name)[region])
            return
        tensor, order = self._tensors[name], self._row_order(name)
        out = as_rows(out) if order is None or out.ndim > 1 else out[:, np.newaxis]
        in_place = order is None and out.dtype == np.float32 and out.flags.c_contiguous
        row_bytes = tensor.nbytes // out.shape[0]
        for rows in row_chunks(out.shape[0], row_bytes, _CHUNK_BYTES):
            num_rows = rows.stop - rows.start
            data = read_exactly(self._header.path, tensor.start + rows.start * row_bytes, num_rows * row_bytes)
            self.bytes_read += data.nbytes
            values = out[rows] if in_place else np.empty((num_rows, *out.shape[1:]), np.float32)
            dequantize(data, tensor.type, values.reshape(-1))
            if not in_place:
                assign(out, rows if order is None else order[rows], values)

    def read(self, name: str) -> np.ndarray:
        out = np.empty(self.shape(name), np.float32)
        self.read_into(name, out)
        return out

    def _row_order(self, name: str) -> np.ndarray | None:
        """order[i] is the row of Hugging Face's tensor that row i of the file holds; None where they agree.

        The permutation is `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.
        """
        if self._header.architecture != "llama" or not (match := _PERMUTED.search(name)):
            return None
        num_heads = self._header.get("attention.head_count")
        if match[1] == "k":
            num_heads = self._header.get("attention.head_count_kv", num_heads)
        num_rows = self.shape(name)[0]
        return np.arange(num_rows).reshape(num_heads, 2, -1).swapaxes(1, 2).ravel()


def _hf_name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        module = _IN_LAYER.get(match[2])
        module = module and f"model.layers.{match[1]}.{module}"
    else:
        module = _TOP_LEVEL.get(stem)
    if module is None or kind not in ("weight", "bias"):
        raise ValueError(f"{path} holds tensor {name!r}, which no supported model has")
    return f"{module}.{kind}"
