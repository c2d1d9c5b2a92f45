"""`Sequence`, one generation in flight, and `StepPlan`, the host's decision for one step, built in a `Step`."""

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from fastgen_jax.types import FinishReason


@dataclass(eq=False, slots=True)
class Sequence:
    """One generation in flight. Progress is `num_computed_tokens` against `num_tokens`; there are no phases.

    seq_id: names it for `Scheduler.abort`.
    max_tokens: output tokens at most.
    stop_token_ids: token ids that end it once `min_tokens` output tokens exist, itself included.
    priority: the higher is served first.
    num_computed_tokens: tokens whose K/V are in the pool once every dispatched step has run.
    num_in_flight: sampled tokens that dispatched steps have yet to bring back; 2 at most, between `schedule` of
        a step and `update` of the one before.
    block_table: ids of its KV blocks; token i lives in block_table[i // block_size].
    num_past_blocks: at the start of its table, those it has given back, for no token to come sees them; each entry
        is the null block.
    slot: its row in the device's per-sequence arrays while it is running, else None.
    max_cached_tokens: as many of its first tokens may be found in the prefix cache instead of being computed.
    cache_salt: sequences share blocks only if theirs is the same, from 0 to 2**64 - 1: it stands for what
        their K/V depend on beside their tokens.
    num_cached_tokens: prompt tokens that were found in the prefix cache when it first ran.
    block_keys, num_registered_blocks, fills_cache: the prefix cache's own notes. Keys of its first full blocks;
        how many blocks at the start of its table others can find; whether more of them may be.
    """

    seq_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    priority: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    block_table: list[int] = field(default_factory=list)
    num_past_blocks: int = 0
    slot: int | None = None
    finish_reason: FinishReason | None = None
    arrival: int = 0
    num_preemptions: int = 0
    num_bypassed: int = 0
    max_cached_tokens: int = sys.maxsize
    cache_salt: int = 0
    num_cached_tokens: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    fills_cache: bool = True

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, those in flight included."""
        return len(self.output_token_ids) + self.num_in_flight

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, those in flight included."""
        return len(self.prompt_token_ids) + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def blocks(self) -> list[int]:
        """The KV blocks that it holds: those of its table which it has not given back."""
        return self.block_table[self.num_past_blocks :]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt + output; tokens in flight are not there yet."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]


def rank(seq: Sequence) -> tuple[int, int]:
    """Orders running sequences, the best first: by priority, then arrival."""
    return -seq.priority, seq.arrival


class Row(NamedTuple):
    """One sequence's part of a step: tokens [start, start + num_new_tokens).

    `samples` says whether they reach the sequence's last token, so that the row's sample is its next
    one; the sample of an unfinished prompt chunk is noise.
    """

    seq: Sequence
    start: int
    num_new_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, decodes first. `preempted` gave up their blocks to make it possible."""

    rows: list[Row]
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new_tokens for row in self.rows)


@dataclass(slots=True)
class Step:
    """A plan being built. `budget` tokens are left; `reserve` blocks stay free for the decodes that will want them."""

    budget: int
    reserve: int = 0
    rows: list[Row] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
