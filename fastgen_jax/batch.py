"""`RaggedBatch`, the packed device inputs of one step, and the only door to it from the host's ints.

The host sends one int32 buffer a step. For a bucket of T tokens, with S = min(T, max_num_seqs) rows:

    token_ids     [T]       the step's tokens, row after row; -1: sampled by the step before, in the token pool
    cu_q_lens     [S + 1]   row s owns tokens cu_q_lens[s]:cu_q_lens[s + 1]; padding repeats the last value
    kv_lens       [S]       tokens of the sequence once this step's are written; 0 for padding rows
    slots         [S]       the sequence's row in the device's per-sequence arrays
    num_splits    [S]       into how many splits a GPU kernel cuts the row's keys; 0 where nobody asks
    samples       [S]       1 where the row's sample is the sequence's next token
    settings      [S, F]    how it is sampled, float32 bits among the ints
    block_tables  [S, P]    its KV blocks; 0, the null block, beyond its end and where it has slid past them

Three rows of 4, 1 and 3 tokens are cu_q_lens [0, 4, 5, 8]; the device derives each token's row
[0, 0, 0, 0, 1, 2, 2, 2], its position, and the slot of the KV pool it is written to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fastgen_jax.scheduler import Sequence, StepPlan
from fastgen_jax.scheduler.blocks import NULL_BLOCK

MIN_BUCKET = 16
"""A step of fewer tokens saves next to nothing: it reads the same weights."""

FEW_TOKENS = (1, 2, 4, 8)
"""Buckets below that, for a device that computes no faster than it reads: a CPU."""

SettingsOf = Callable[[Sequence], "Settings"]
SplitsOf = Callable[[list[int]], list[int]]
"""From the tokens that each row of one query attends to, to the splits of its keys."""


def bucket_ladder(largest: int, few: tuple[int, ...] = ()) -> list[int]:
    """`few`, then powers of two from 16, up to `largest`, which closes the ladder whatever it is."""
    ladder = [*few, *(MIN_BUCKET << i for i in range(largest.bit_length()))]
    return [*(bucket for bucket in ladder if bucket < largest), largest]


def bucket_for(ladder: list[int], size: int) -> int:
    """The smallest bucket that holds `size`."""
    return next(bucket for bucket in ladder if bucket >= size)


@partial(jax.tree_util.register_dataclass, data_fields=[
    "token_ids", "positions", "context_lens", "slot_mapping", "cu_q_lens", "kv_lens", "block_tables",
    "num_splits",
], meta_fields=[])  # fmt: skip
@dataclass(frozen=True)
class RaggedBatch:
    """One step's tokens for a model, all int32. T tokens, S rows (sequences), P blocks a sequence.

    token_ids, positions: [T].
    context_lens: [T], max(prompt length, position + 1) of the token's sequence.
    slot_mapping: [T], where a token's K/V go: block * block_size + offset; -1 for padding, which goes nowhere.
    cu_q_lens: [S + 1]. kv_lens: [S]. block_tables: [S, P]. num_splits: [S], a hint for GPU kernels.
    """

    token_ids: Array
    positions: Array
    context_lens: Array
    slot_mapping: Array
    cu_q_lens: Array
    kv_lens: Array
    block_tables: Array
    num_splits: Array

    @classmethod
    def empty(cls, num_tokens: int, num_rows: int, blocks_per_seq: int) -> "RaggedBatch":
        """All padding."""
        tokens, rows = jnp.zeros(num_tokens, jnp.int32), jnp.zeros(num_rows, jnp.int32)
        tables = jnp.zeros((num_rows, blocks_per_seq), jnp.int32)
        return cls(tokens, tokens, tokens, tokens - 1, jnp.zeros(num_rows + 1, jnp.int32), rows, tables, rows)


class Settings(NamedTuple):
    """A sequence's row of `settings`: what sampling needs to know of it, as plain numbers.

    The field order is the column order; float fields travel as their float32 bits.
    """

    num_prompt_tokens: int = 0
    min_tokens: int = 0
    top_k: int = 0
    seed_low: int = 0
    seed_high: int = 0
    has_bias: int = 0
    has_allowed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def to_row(self) -> np.ndarray:
        """int32 [F]."""
        ints = np.array(self[:NUM_INTS], np.uint32).view(np.int32)
        return np.concatenate((ints, np.array(self[NUM_INTS:], np.float32).view(np.int32)))


NUM_INTS = Settings._fields.index("temperature")
NUM_SETTINGS = len(Settings._fields)


@dataclass(frozen=True)
class Layout:
    """The shapes of an engine's steps, and where each array lies in a bucket's buffer."""

    max_num_seqs: int
    blocks_per_seq: int
    block_size: int

    def num_rows(self, bucket: int) -> int:
        """S: a step never has more sequences than tokens."""
        return min(bucket, self.max_num_seqs)

    def shapes(self, bucket: int) -> dict[str, tuple[int, ...]]:
        s = self.num_rows(bucket)
        return {
            "token_ids": (bucket,),
            "cu_q_lens": (s + 1,),
            "kv_lens": (s,),
            "slots": (s,),
            "num_splits": (s,),
            "samples": (s,),
            "settings": (s, NUM_SETTINGS),
            "block_tables": (s, self.blocks_per_seq),
        }

    def buffer_size(self, bucket: int) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes(bucket).values())

    def split(self, buffer: np.ndarray | Array, bucket: int) -> dict:
        """The arrays in a buffer: views of a numpy one, slices of a JAX one."""
        arrays, start = {}, 0
        for name, shape in self.shapes(bucket).items():
            stop = start + int(np.prod(shape))
            arrays[name] = buffer[start:stop].reshape(shape)
            start = stop
        return arrays

    def unpack(self, arrays: dict[str, Array], token_pool: Array) -> tuple[RaggedBatch, Array]:
        """On the device: derive the batch, trading tokens with `token_pool` int32 [max_num_seqs, max_model_len].

        Tokens the host does not know are read from the pool, those it does are written to it.
        """
        (num_tokens,) = arrays["token_ids"].shape
        cu_q_lens, kv_lens, block_tables = arrays["cu_q_lens"], arrays["kv_lens"], arrays["block_tables"]
        index = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.sum(index[:, None] >= cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)
        real = row < kv_lens.shape[0]
        row = jnp.where(real, row, 0)
        position = jnp.where(real, kv_lens[row] - cu_q_lens[row + 1] + index, 0)
        slot = arrays["slots"][row]
        token_ids = jnp.where(arrays["token_ids"] < 0, token_pool[slot, position], arrays["token_ids"])
        token_pool = token_pool.at[jnp.where(real, slot, self.max_num_seqs), position].set(token_ids, mode="drop")
        slots = block_tables[row, position // self.block_size] * self.block_size + position % self.block_size
        num_prompt = arrays["settings"][row, Settings._fields.index("num_prompt_tokens")]
        batch = RaggedBatch(
            token_ids=token_ids,
            positions=position,
            context_lens=jnp.maximum(num_prompt, position + 1),
            slot_mapping=jnp.where(real, slots, -1),
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            block_tables=block_tables,
            num_splits=arrays["num_splits"],
        )
        return batch, token_pool


class Packer:
    """Packs step plans. Keeps each slot's block table and settings between steps, so that a step costs its rows.

    plan_splits: Dynamic SplitKV for a backend whose kernels take it; None is not to ask.
    """

    def __init__(self, layout: Layout, buckets: list[int], plan_splits: SplitsOf | None = None):
        self.layout, self.buckets = layout, buckets
        self._plan_splits = plan_splits
        self._tables = np.zeros((layout.max_num_seqs, layout.blocks_per_seq), np.int32)
        self._settings = np.tile(Settings().to_row(), (layout.max_num_seqs, 1))
        self._num_blocks = [0] * layout.max_num_seqs
        self._tenant: list[tuple[int, int] | None] = [None] * layout.max_num_seqs

    def pack(self, plan: StepPlan, settings_of: SettingsOf) -> tuple[np.ndarray, int]:
        """The buffer of a plan, int32, and its bucket.

        settings_of: a sequence's settings, asked once for each stay of a sequence in a slot.
        """
        token_ids: list[int] = []
        for seq, start, num_new, _ in plan.rows:
            self._settle(seq, settings_of)
            known = seq.token_ids(start, start + num_new)
            token_ids += known
            token_ids += [-1] * (num_new - len(known))
        bucket = bucket_for(self.buckets, len(token_ids))
        buffer = np.zeros(self.layout.buffer_size(bucket), np.int32)
        arrays = self.layout.split(buffer, bucket)
        num_rows = len(plan.rows)
        arrays["token_ids"][: len(token_ids)] = token_ids
        q_lens = np.array([row.num_new_tokens for row in plan.rows], np.int32)
        np.cumsum(q_lens, out=arrays["cu_q_lens"][1 : num_rows + 1])
        arrays["cu_q_lens"][num_rows + 1 :] = len(token_ids)
        arrays["kv_lens"][:num_rows] = [row.start for row in plan.rows]
        arrays["kv_lens"][:num_rows] += q_lens
        if self._plan_splits is not None:
            (decodes,) = np.nonzero(q_lens == 1)
            arrays["num_splits"][decodes] = self._plan_splits(arrays["kv_lens"][decodes].tolist())
        slots = np.array([row.seq.slot for row in plan.rows], np.int32)
        arrays["slots"][:num_rows] = slots
        arrays["samples"][:num_rows] = [row.samples for row in plan.rows]
        arrays["settings"][:num_rows] = self._settings[slots]
        arrays["block_tables"][:num_rows] = self._tables[slots]
        return buffer, bucket

    def _settle(self, seq: Sequence, settings_of: SettingsOf) -> None:
        """Bring the slot's settings and block table up to date."""
        slot, tenant = seq.slot, (seq.seq_id, seq.num_preemptions)
        assert slot is not None
        if self._tenant[slot] != tenant:
            self._tenant[slot] = tenant
            self._settings[slot] = settings_of(seq).to_row()
            self._tables[slot] = 0
            self._num_blocks[slot] = 0
        have, want = self._num_blocks[slot], len(seq.block_table)
        if have < want:
            self._tables[slot, have:want] = seq.block_table[have:]
            self._tables[slot, : seq.num_past_blocks] = NULL_BLOCK
            self._num_blocks[slot] = want
