"""GGML's quantised blocks to float32, as ggml-quants.c of https://github.com/ggml-org/ggml defines them.

The gguf package decodes every type. Those written out here are common ones, to the same bits in a fraction of the time:
no value is cast twice, and none is copied.
"""

import functools
from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import dequantize as decode_any


@functools.cache
def decodable_type(kind: int) -> GGMLQuantizationType | None:
    """The type that a GGUF file numbers `kind`; None if it cannot be decoded."""
    try:
        type_ = GGMLQuantizationType(kind)
        decode_any(np.zeros((1, GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return type_


def dequantize(data: np.ndarray, type_: GGMLQuantizationType, out: np.ndarray) -> None:
    """Decode blocks, `data` uint8 [bytes], into `out` float32 [values], C-contiguous."""
    if type_ not in _DECODERS:
        # One long row: the package works through 16 rows at a time, too few when rows are short.
        out[...] = decode_any(data.reshape(1, -1), type_).reshape(-1)
        return
    block_values, block_bytes = GGML_QUANT_SIZES[type_]
    _DECODERS[type_](data.reshape(-1, block_bytes), out.reshape(-1, block_values))


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _halves(blocks, 0), out=out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(blocks[:, 4:]), _halves(blocks, 0), out=out)
    out += _halves(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=out)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """float32 [blocks, 1]: the float16 at byte `start` of each block."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 16] -> [blocks, 32]: the low halves of all bytes, then the high ones."""
    values = np.empty((len(packed), 2, packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, 0])
    np.right_shift(packed, 4, out=values[:, 1])
    return values.reshape(len(packed), -1)


_DECODERS: dict[GGMLQuantizationType, Callable[[np.ndarray, np.ndarray], None]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
