"""`put` and `flush`, FastGen's low-level seam: append tokens to sequences by hand, get logits back."""

import itertools
from collections.abc import Hashable
from collections.abc import Sequence as Seq

import numpy as np

from fastgen_jax.runner import ModelRunner
from fastgen_jax.scheduler import BlockPool, Row, Sequence, StepPlan


class LowLevel:
    """Sequences that the caller names and feeds. They live beside no scheduler, so it must be idle."""

    def __init__(
        self,
        runner: ModelRunner,
        block_pool: BlockPool,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
    ):
        self._runner, self._block_pool = runner, block_pool
        self._max_num_tokens, self._max_model_len = max_num_tokens, max_model_len
        self._sequences: dict[Hashable, Sequence] = {}
        self._free_slots = list(range(max_num_seqs))
        self._seq_ids = itertools.count(-1, -1)  # the scheduler's are 0 and up

    @property
    def is_in_use(self) -> bool:
        return bool(self._sequences)

    def put(self, ids: Seq[Hashable], tokens: Seq[Seq[int]]) -> np.ndarray:
        """One step of `tokens[i]` appended to sequence `ids[i]` -> float32 logits [len(ids), V].

        ValueError, with nothing changed, for what does not fit into one step, the pool or the context. If the
        step itself fails, every sequence is forgotten: whether its K/V are in the pool is not known.
        """
        self._check(ids, tokens)
        rows = []
        for name, new in zip(ids, tokens, strict=True):
            seq = self._sequences.get(name)
            if seq is None:
                seq = self._sequences[name] = Sequence(next(self._seq_ids), [], max_tokens=1)
                seq.slot = self._free_slots.pop()
            seq.prompt_token_ids.extend(int(token_id) for token_id in new)
            self._runner.window.give_back(seq, self._block_pool)
            rows.append(Row(seq, seq.num_computed_tokens, len(new), False))
        for seq, *_ in rows:
            missing = self._block_pool.blocks_needed(seq.num_tokens) - len(seq.block_table)
            seq.block_table += self._block_pool.allocate(missing) or []
            seq.num_computed_tokens = seq.num_tokens
        try:
            return self._runner.logits(StepPlan(rows))
        except BaseException:
            self.flush(list(self._sequences))
            self._block_pool.forget()
            if self._runner.is_broken:
                self._runner.reset()
            raise

    def flush(self, ids: Seq[Hashable]) -> None:
        """Forget sequences and free their blocks; ValueError naming an id there is none of."""
        for name in ids:
            if name not in self._sequences:
                raise ValueError(f"there is no sequence {name!r}; put has made {sorted(map(repr, self._sequences))}")
        for name in dict.fromkeys(ids):
            seq = self._sequences.pop(name)
            self._block_pool.free(seq.blocks)
            assert seq.slot is not None
            self._free_slots.append(seq.slot)

    def _check(self, ids: Seq[Hashable], tokens: Seq[Seq[int]]) -> None:
        if len(ids) != len(tokens):
            raise ValueError(f"put has {len(ids)} ids and {len(tokens)} lists of tokens; it takes one for each")
        if repeated := [name for name in ids if list(ids).count(name) > 1]:
            raise ValueError(f"put has the id {repeated[0]!r} more than once; give all its tokens in one list")
        vocab_size = self._runner.model.config.vocab_size
        for name, new in zip(ids, tokens, strict=True):
            if not len(new):
                raise ValueError(f"put has no tokens for the id {name!r}; it takes at least one")
            for token_id in new:
                if not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
                    raise ValueError(f"put has {token_id!r} for the id {name!r}; token ids are 0 to {vocab_size - 1}")
        if (total := sum(map(len, tokens))) > self._max_num_tokens:
            raise ValueError(f"{total} tokens in one put; max_num_batched_tokens={self._max_num_tokens} allows no more")
        new_ids = [name for name in ids if name not in self._sequences]
        if len(new_ids) > len(self._free_slots):
            raise ValueError(
                f"{len(new_ids)} new sequences and {len(self._free_slots)} of max_num_seqs left; flush some"
            )
        num_blocks = 0
        for name, new in zip(ids, tokens, strict=True):
            seq = self._sequences.get(name)
            num_tokens = len(new) + (seq.num_tokens if seq else 0)
            if num_tokens > self._max_model_len:
                raise ValueError(f"sequence {name!r} would have {num_tokens} tokens; at most {self._max_model_len} fit")
            num_blocks += self._block_pool.blocks_needed(num_tokens)
            if seq:
                slid_past = self._runner.window.num_past(seq.num_computed_tokens) - seq.num_past_blocks
                num_blocks -= len(seq.block_table) + slid_past
        if num_blocks > self._block_pool.num_free:
            raise ValueError(f"put needs {num_blocks} blocks and {self._block_pool.num_free} are free; flush some")
