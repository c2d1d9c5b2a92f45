"""`BlockPool`, the host's allocator of KV blocks."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""What unused entries of a block table name."""


class BlockPool:
    """Which of `num_blocks` blocks of `block_size` tokens are free, and how often each other one is used.

    The null block is never handed out and counts neither as free nor as used. Every method costs time proportional
    to the blocks it is given.

    A block may be registered under a key that says what it holds. Once free, it keeps that, and can be found and
    used again, until it is handed out for something else: blocks that hold nothing go first, then those that have
    been free the longest.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} is only the null block; it must be at least 2")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} holds no token; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty = list(range(num_blocks - 1, 0, -1))  # free and without a key: a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and with a key: the longest free first
        self._refcounts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}  # by key

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, whether they hold something or not."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def is_free(self, block: int) -> bool:
        return self._refcounts[block] == 0

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` free blocks, each used once; None, and none taken, if there are not as many."""
        if num_blocks > self.num_free:
            return None
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Use each of `blocks` once more. A ValueError if one is free and has no key."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
            else:
                self._check_used(block)
            self._refcounts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Use each of `blocks` once less; at zero it is free again. A ValueError if one already is.

        The last is freed first: of one sequence's blocks, in order, those that fewest others can share are gone
        before those that most can, without which the later ones are not found.
        """
        for block in reversed(blocks):
            self._check_used(block)
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                if self._keys[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Let `find` find a block that is in use, unless it finds another by that key; it keeps its first key."""
        self._check_used(block)
        if key not in self._blocks and self._keys[block] is None:
            self._blocks[key] = block
            self._keys[block] = key

    def find(self, key: bytes) -> int | None:
        """The block registered under `key`, in use or free; None if there is none."""
        return self._blocks.get(key)

    def forget(self) -> None:
        """Drop every key: nothing is found any more. What is used stays so."""
        self._blocks.clear()
        self._keys = [None] * self.num_blocks
        self._empty += self._cached
        self._cached.clear()

    def _evict(self) -> int:
        """Take the block that has been free the longest, and drop its key."""
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        del self._blocks[key]
        return block

    def _check_used(self, block: int) -> None:
        if not 0 < block < self.num_blocks or self._refcounts[block] == 0:
            raise ValueError(f"block {block} is not in use; share() and free() take allocated blocks")
