"""`BlockPool`, the host's allocator of KV blocks."""

from collections.abc import Iterable


class BlockPool:
    """Which of `num_blocks` blocks of `block_size` tokens are free, and how often each other one is used.

    Block 0 is the null block, which unused entries of a block table name: it is never handed out and counts neither
    as free nor as used. Every method costs time proportional to the blocks it is given.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} is only the null block; it must be at least 2")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} holds no token; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack
        self._refcounts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` free blocks, each used once; None, and none taken, if there are not as many."""
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Use each of `blocks` once more. A ValueError if one is free."""
        for block in blocks:
            self._check_used(block)
            self._refcounts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Use each of `blocks` once less; at zero it is free again. A ValueError if one already is."""
        for block in blocks:
            self._check_used(block)
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                self._free.append(block)

    def _check_used(self, block: int) -> None:
        if not 0 < block < self.num_blocks or self._refcounts[block] == 0:
            raise ValueError(f"block {block} is not in use; share() and free() take allocated blocks")
