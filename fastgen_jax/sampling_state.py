"""What sampling has to know: each slot's rows on the device, each step's rows, and the host's way to both.

Letters: S rows of a step, M longest sequence, V vocabulary, W = ceil(V / 32) words of a bit mask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastgen_jax.types import MAX_LOGIT_BIAS, SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """What sampling needs of each slot, a running sequence's row in the device's per-sequence arrays.

    token_pool: int32 [slots, M], prompt and output tokens by position; past the sequence's end, anything.
    allowed_bits: uint32 [slots, W], the tokens that may be generated: bit v % 32 of word v // 32.
    stop_bits: uint32 [slots, W], the tokens that may not be generated before `min_tokens`.
    bias_ids: int32 [slots, MAX_LOGIT_BIAS], padded with V.
    bias_values: float32 [slots, MAX_LOGIT_BIAS].
    """

    token_pool: jax.Array
    allowed_bits: jax.Array
    stop_bits: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array

    @classmethod
    def allocate(cls, slots: int, max_model_len: int, vocab_size: int) -> "SamplingState":
        """No tokens, and in every slot what default `SamplingParams` ask for."""
        row = pack_row(SamplingParams(), (), vocab_size)
        arrays = {name: jnp.tile(value, (slots, 1)) for name, value in row._asdict().items()}
        return cls(token_pool=jnp.zeros((slots, max_model_len), jnp.int32), **arrays)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """How each of a step's S rows is sampled; the fields not described are those of `SamplingParams`.

    slot: int32 [S], the row of `SamplingState`.
    num_tokens, num_prompt_tokens: int32 [S], tokens in token_pool before the one being sampled, and how many
        of them are the prompt. Their difference is the output index.
    top_k, min_tokens: int32 [S]. temperature and the other floats: float32 [S].
    seed: uint32 [S, 2], `seed_words` of the request's seed.
    has_bias, has_allowed: bool [S], whether logit_bias and allowed_token_ids were given.
    """

    slot: jax.Array
    num_tokens: jax.Array
    num_prompt_tokens: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    top_k: jax.Array
    min_tokens: jax.Array
    seed: jax.Array
    has_bias: jax.Array
    has_allowed: jax.Array

    @property
    def output_index(self) -> jax.Array:
        return self.num_tokens - self.num_prompt_tokens


class SlotRow(NamedTuple):
    """One slot's rows of `SamplingState`, in the order `set_row` takes them."""

    allowed_bits: np.ndarray
    stop_bits: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray


def seed_words(seed: int) -> np.ndarray:
    """uint32 [2]: the high and the low word of a seed below 2**64."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def pack_row(params: SamplingParams, stop_token_ids: Iterable[int], vocab_size: int) -> SlotRow:
    """What a request puts in its slot, on the host.

    stop_token_ids: every token that ends it, the model's EOS and its own stop tokens; ids outside the
        vocabulary can never be generated and are left out.

    Raises ValueError for a token id of `params` outside the vocabulary.
    """
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        if (largest := max(getattr(params, name) or (), default=0)) >= vocab_size:
            raise ValueError(f"{name} names token {largest}; the vocabulary has tokens 0 to {vocab_size - 1}")
    bias_ids = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(params.logit_bias)] = list(params.logit_bias.keys())
    bias_values[: len(params.logit_bias)] = list(params.logit_bias.values())
    allowed = np.arange(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    stops = [token_id for token_id in stop_token_ids if token_id < vocab_size]
    return SlotRow(_pack_bits(allowed, vocab_size), _pack_bits(stops, vocab_size), bias_ids, bias_values)


def _pack_bits(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def set_row(
    state: SamplingState,
    slot: jax.Array | int,
    allowed_bits: jax.Array,
    stop_bits: jax.Array,
    bias_ids: jax.Array,
    bias_values: jax.Array,
) -> SamplingState:
    """`state` with `pack_row`'s arrays in `slot`; token_pool is as it was. Jit it and donate `state`."""
    return replace(
        state,
        allowed_bits=state.allowed_bits.at[slot].set(allowed_bits),
        stop_bits=state.stop_bits.at[slot].set(stop_bits),
        bias_ids=state.bias_ids.at[slot].set(bias_ids),
        bias_values=state.bias_values.at[slot].set(bias_values),
    )
