"""`Limits`: how large a step and a sequence may be, and which sequences could never run within them."""

from dataclasses import dataclass

from fastgen_jax.scheduler.policies import Policy
from fastgen_jax.scheduler.sequence import Sequence
from fastgen_jax.scheduler.window import Window


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_batched_tokens, max_num_seqs: tokens and sequences of a step. max_model_len: prompt and output tokens.

    max_bypass: how many sequences may pass a waiting one that does not fit.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_bypass: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} must be between 1 and max_num_batched_tokens="
                f"{self.max_num_batched_tokens}: a step has a token for every running sequence"
            )
        if self.max_bypass < 0:
            raise ValueError(f"max_bypass={self.max_bypass} is negative; it must be 0 (nothing passes) or more")

    def max_num_tokens(self, seq: Sequence) -> int:
        """Prompt and output tokens at which `seq` ends at the latest."""
        num_tokens = len(seq.prompt_token_ids) + seq.max_tokens
        return num_tokens if num_tokens < self.max_model_len else self.max_model_len

    def needs_another_block(self, seq: Sequence, block_size: int) -> bool:
        """Whether `seq` may come to need a block that it does not have yet."""
        return len(seq.block_table) * block_size < self.max_num_tokens(seq) - 1

    def check(self, seq: Sequence, num_blocks: int, window: Window, policy: Policy) -> None:
        """ValueError, naming the numbers, if `seq` could never run. num_blocks: those that a pool can hand out."""
        if seq.is_finished:
            raise ValueError(f"sequence {seq.seq_id} has ended ({seq.finish_reason}); add a new Sequence")
        num_prompt = len(seq.prompt_token_ids)
        if not num_prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; "
                f"max_model_len={self.max_model_len} allows at most {self.max_model_len - 1}"
            )
        if seq.max_tokens < 1:
            raise ValueError(f"max_tokens={seq.max_tokens} is out of range; it must be at least 1")
        num_tokens = self.max_num_tokens(seq)
        if num_tokens > (longest := window.longest(num_blocks)):
            needed = window.most_blocks(num_tokens - 1)
            raise ValueError(
                f"prompt and output may grow to {num_tokens} tokens, which take {needed} blocks of "
                f"{window.block_size}, but the pool has {num_blocks}: raise num_blocks to {needed + 1}, "
                f"or keep prompt + max_tokens within {longest}"
            )
        # A preempted sequence is computed anew, its output included.
        if not policy.splits_prompts and num_tokens - 1 > self.max_num_batched_tokens:
            raise ValueError(
                f"prompt and output may grow to {num_tokens} tokens, all but the last of which policy={policy.name!r} "
                f"must be able to compute in one step: raise max_num_batched_tokens={self.max_num_batched_tokens} "
                f"to {num_tokens - 1}, or use policy='splitfuse'"
            )
