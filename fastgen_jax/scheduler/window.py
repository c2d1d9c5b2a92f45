"""`Window`: how far back the layers of a model see, and which blocks of a sequence that spares."""

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastgen_jax.scheduler.blocks import NULL_BLOCK, BlockPool
from fastgen_jax.scheduler.policies import get_policy
from fastgen_jax.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Window:
    """A token at position p attends to the keys at p - num_tokens + 1 to p, in every layer at most.

    num_tokens: None is all of them. block_size: tokens of a block.

    A block that no token still to be computed sees has been slid past, and is given back when its sequence next
    asks for blocks. The step planned then may use it for another sequence: steps run in order on the device, so
    those already dispatched have read it by the time that one writes.
    """

    num_tokens: int | None
    block_size: int

    @classmethod
    def under(cls, policy: str, num_tokens: int | None, block_size: int) -> "Window":
        """That by which blocks are counted under a policy: none under one that computes prompts whole.

        All of a prompt is written before any of it is read, and a preempted sequence is computed anew.
        """
        return cls(num_tokens if get_policy(policy).splits_prompts else None, block_size)

    def num_past(self, position: int) -> int:
        """Blocks at the start of a sequence that no token from `position` on sees."""
        if self.num_tokens is None or position < self.num_tokens:
            return 0
        return (position - self.num_tokens + 1) // self.block_size

    def most_blocks(self, num_tokens: int, chunk: int = 1) -> int:
        """Blocks that a sequence which grows to `num_tokens` needs at a time, by `chunk` tokens a step at most."""
        whole = -(-num_tokens // self.block_size)
        if self.num_tokens is None:
            return whole
        # A step's tokens and the keys that they see are a run of tokens, which may begin anywhere in a block.
        return min(whole, -(-(self.num_tokens + chunk - 2) // self.block_size) + 1)

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that can be computed within `num_blocks` blocks, a token a step if need be.

        The last token's K/V are never written.
        """
        if self.num_tokens is not None and self.most_blocks(sys.maxsize) <= num_blocks:
            return sys.maxsize
        return num_blocks * self.block_size + 1

    def give_back(self, seq: Sequence, block_pool: BlockPool) -> None:
        """Give back the blocks that `seq` has slid past; in its table the null block stands for them."""
        first, past = seq.num_past_blocks, self.num_past(seq.num_computed_tokens)
        if past > first:
            block_pool.free(seq.block_table[first:past])
            seq.block_table[first:past] = [NULL_BLOCK] * (past - first)
            seq.num_past_blocks = past


def widest(windows: Seq[int | None]) -> int | None:
    """The window of a model with such layers, of which None sees all: the blocks are those of all layers together."""
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None
