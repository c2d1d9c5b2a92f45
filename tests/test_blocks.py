"""The block pool: what is handed out, shared, taken back, and found again."""

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


def registered(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Fresh blocks under these keys, in use."""
    blocks = pool.allocate(len(keys))
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    return blocks


def test_a_block_is_found_by_its_key_in_use_and_free() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    a, b = registered(pool, [b"a", b"b"])
    assert (pool.find(b"a"), pool.find(b"b"), pool.find(b"c")) == (a, b, None)
    pool.free([a, b])
    assert (pool.find(b"a"), pool.find(b"b")) == (a, b)
    assert (pool.num_free, pool.num_used) == (3, 0)
    assert pool.is_free(a)


def test_a_free_block_with_a_key_can_be_used_again() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = registered(pool, [b"a", b"b"])
    pool.free(blocks)
    pool.share(blocks[:1])
    assert (pool.num_free, pool.num_used, pool.is_free(blocks[0])) == (1, 1, False)
    assert pool.allocate(2) is None
    assert pool.allocate(1) == blocks[1:]
    assert (pool.find(b"a"), pool.find(b"b")) == (blocks[0], None)


def test_blocks_are_handed_out_empty_ones_first_then_the_longest_free_and_of_one_sequence_the_tail() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    first, second = registered(pool, [b"a", b"b"]), registered(pool, [b"c", b"d"])
    pool.free(second)
    pool.free(first)
    (empty,) = {1, 2, 3, 4, 5} - {*first, *second}
    expected = [empty, second[1], second[0], first[1], first[0]]
    assert [pool.allocate(1) for _ in expected] == [[block] for block in expected]
    assert [pool.find(key) for key in (b"a", b"b", b"c", b"d")] == [None] * 4


def test_a_key_finds_one_block_and_a_block_has_one_key() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    a, b = registered(pool, [b"a", b"a"])
    assert pool.find(b"a") == a
    pool.register(a, b"c")
    assert pool.find(b"c") is None
    pool.free([b, a])
    assert pool.num_free == 3
    with pytest.raises(ValueError, match=f"block {b} is not in use"):
        pool.share([b])
    with pytest.raises(ValueError, match=f"block {b} is not in use"):
        pool.register(b, b"d")


def test_a_pool_that_forgets_finds_nothing_and_keeps_what_is_in_use() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    a, b = registered(pool, [b"a", b"b"])
    pool.free([b])
    pool.forget()
    assert (pool.find(b"a"), pool.find(b"b")) == (None, None)
    assert (pool.num_free, pool.num_used) == (2, 1)
    pool.free([a])
    assert sorted(pool.allocate(3) or ()) == [1, 2, 3]


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_needed_rounds_up(num_tokens: int, blocks: int) -> None:
    assert BlockPool(num_blocks=2, block_size=4).blocks_needed(num_tokens) == blocks


def test_a_pool_without_blocks_or_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=1 "):
        BlockPool(num_blocks=1, block_size=4)
    with pytest.raises(ValueError, match="block_size=0 "):
        BlockPool(num_blocks=2, block_size=0)
