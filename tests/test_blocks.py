"""The block pool: what is handed out, shared and taken back."""

import pytest

from fastgen_jax.scheduler import BlockPool


def test_blocks_are_handed_out_once_and_never_the_null_block() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    assert (pool.num_free, pool.num_used) == (5, 0)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None and second is not None
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


def test_a_shared_block_is_free_after_its_last_user() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.share(blocks[:1])
    pool.free(blocks)
    assert pool.num_used == 1
    pool.free(blocks[:1])
    assert pool.num_used == 0
    assert sorted(pool.allocate(2) or ()) == [1, 2]


def test_what_is_not_in_use_can_be_neither_freed_nor_shared() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    for method in (pool.free, pool.share):
        with pytest.raises(ValueError, match=f"block {blocks[0]} is not in use"):
            method(blocks)
        for outside in (0, -1, 3):
            with pytest.raises(ValueError, match=f"block {outside} is not in use"):
                method([outside])
    assert pool.num_free == 2


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_needed_rounds_up(num_tokens: int, blocks: int) -> None:
    assert BlockPool(num_blocks=2, block_size=4).blocks_needed(num_tokens) == blocks


def test_a_pool_without_blocks_or_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=1 "):
        BlockPool(num_blocks=1, block_size=4)
    with pytest.raises(ValueError, match="block_size=0 "):
        BlockPool(num_blocks=2, block_size=0)
