"""`PrefixCache`: finds the blocks that already hold the K/V of a sequence's first tokens."""

import hashlib
from array import array

from fastgen_jax.scheduler.blocks import NULL_BLOCK, BlockPool
from fastgen_jax.scheduler.sequence import Sequence
from fastgen_jax.scheduler.window import Window

KEY_SIZE = 16  # bytes; with 2**32 blocks, two different ones get the same key with probability 2**-65


class PrefixCache:
    """Names full blocks by their contents, so that sequences which begin alike share them.

    A block's key is a hash of its token ids and the key of the block before it, and so stands for every token
    up to its end; before the first block's comes the sequence's `cache_salt`. Keys are made once a sequence,
    block by block, when they are first needed.

    A block can be found as soon as its tokens are planned, not only when they are computed: the device runs
    steps in order, and in each layer of a step all K/V are written before any are read. So a row may read what
    a row before it in the same step writes. What is found is never written to: it is full, a sequence computes
    the tokens after it only, and these lie in blocks of its own.

    The same holds for the dead row of a sequence that has ended while the step after was already dispatched. The
    block it writes to has been freed. If nobody can find it, whoever is given it writes to it in a later step. If
    it can be found, then because the row's token, the one that ended the sequence, is its last one: the row writes
    just what the key says, before any later step reads it.
    """

    def __init__(self, block_pool: BlockPool, window: Window, *, enabled: bool) -> None:
        """`enabled`: otherwise it finds nothing and costs nothing."""
        self._block_pool = block_pool
        self._window = window
        self._enabled = enabled

    def find(self, seq: Sequence) -> list[int]:
        """The blocks, some of them free perhaps, that hold `seq`'s first tokens: never the last one, whose logits
        are to be computed, nor more than `seq.max_cached_tokens`. The longest such beginning that there is.

        Of those that no token behind them sees, none is looked for and the null block stands for each.
        """
        if not self._enabled:
            return []
        block_size = self._block_pool.block_size
        stop = min(seq.num_tokens - 1, seq.max_cached_tokens) // block_size
        while True:
            num_past = self._window.num_past(stop * block_size)
            blocks = self._run(seq, num_past, stop)
            if num_past + len(blocks) == stop:
                return [NULL_BLOCK] * num_past + blocks
            stop = num_past + len(blocks)  # any beginning longer than that needs the block that is missing

    def _run(self, seq: Sequence, first: int, stop: int) -> list[int]:
        """The blocks for `seq`'s [first, stop), up to the first that is nowhere."""
        blocks: list[int] = []
        for index in range(first, stop):
            block = self._block_pool.find(self._key(seq, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, seq: Sequence) -> None:
        """Have `find` find the blocks of `seq` that are full of tokens known to the host and planned to be computed."""
        if not (self._enabled and seq.fills_cache):
            return
        num_known = len(seq.prompt_token_ids) + len(seq.output_token_ids)
        num_full = min(num_known, seq.num_computed_tokens) // self._block_pool.block_size
        for i in range(seq.num_registered_blocks, num_full):
            self._block_pool.register(seq.block_table[i], self._key(seq, i))
            seq.num_registered_blocks = i + 1

    def _key(self, seq: Sequence, index: int) -> bytes:
        """The key of the sequence's block number `index`, all of whose tokens are known."""
        keys, block_size = seq.block_keys, self._block_pool.block_size
        while len(keys) <= index:
            before = keys[-1] if keys else seq.cache_salt.to_bytes(8)  # shorter than a key, and so never taken for one
            start = len(keys) * block_size
            token_ids = array("q", seq.token_ids(start, start + block_size))
            keys.append(hashlib.blake2b(before + token_ids.tobytes(), digest_size=KEY_SIZE).digest())
        return keys[index]
