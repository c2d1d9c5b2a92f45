"""The device's work lists: the host's plan, item for item, and every query of a prompt exactly once."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen_jax.kernels import work
from fastgen_jax.scheduler.split_plan import SplitPlanner, split_bounds, work_list

NUM_ROWS, NUM_TOKENS = 8, 96  # of every batch, padding included: few programs to compile
SHAPES = ((64, None), (64, 3000), (16, 100))  # block size and window
POLICIES = ("waves", "proportional", "fixed(3)", "none")
ROOM = 20  # splits beyond one a row

splits_of = jax.jit(work.splits, static_argnames=("max_items", "block_size", "window"))
tiles_of = jax.jit(work.tiles, static_argnums=2, static_argnames=("tile_tokens", "block_size", "window"))


class Batch(NamedTuple):
    """Rows of a step, padded: q_lens and kv_lens [NUM_ROWS]; padding rows are of no tokens."""

    q_lens: list[int]
    kv_lens: list[int]

    @property
    def cu_q_lens(self):
        return np.cumsum([0, *self.q_lens], dtype=np.int32)


@st.composite
def batches(draw):
    q_lens = draw(st.lists(st.one_of(st.just(1), st.integers(1, 40)), max_size=NUM_ROWS))
    while sum(q_lens) > NUM_TOKENS:
        q_lens.pop()
    contexts = st.one_of(st.integers(0, 200), st.integers(0, 20_000))
    kv_lens = [n + draw(contexts) for n in q_lens]
    padding = [0] * (NUM_ROWS - len(q_lens))
    return Batch(q_lens + padding, kv_lens + padding)


def first_key(position, block_size, window):
    """Of those a query at `position` reads: the first it sees, or one before that in its block."""
    return 0 if window is None else max(position - window + 1, 0) // block_size * block_size


def real_items(listed):
    return np.asarray(listed.items)[: int(listed.num_items[0])].tolist()


def device_splits(batch, num_splits, block_size, window):
    if num_splits is not None:
        num_splits = np.array(num_splits, np.int32)
    arguments = batch.cu_q_lens, np.array(batch.kv_lens, np.int32), num_splits
    return splits_of(*arguments, max_items=NUM_ROWS + ROOM, block_size=block_size, window=window)


def check_splits(batch, listed, expected):
    """Items are the `expected` (row, start, stop), the longest first, and the combine's rows name their slots."""
    items = real_items(listed.work)
    assert sorted((row, start, stop) for row, _, _, _, start, stop, _ in items) == sorted(expected)
    sizes = [stop - start for *_, start, stop, _ in items]
    assert sizes == sorted(sizes, reverse=True)
    for row, token, num_tokens, position, *_ in items:
        assert (token, num_tokens, position) == (batch.cu_q_lens[row], 1, batch.kv_lens[row] - 1)

    combined = np.asarray(listed.rows)[: int(listed.num_rows[0])].tolist()
    slots = {token: set(range(first, first + num)) for token, first, num in combined}
    assert len(slots) == len(combined)
    used = [slot for *_, slot in items if slot >= 0]
    assert len(used) == len(set(used))
    assert max(used, default=0) < NUM_ROWS + ROOM
    for row in {row for row, *_ in expected}:
        own = [item[work.SLOT] for item in items if item[work.ROW] == row]
        assert set(own) == slots.pop(int(batch.cu_q_lens[row]), {-1})
    assert not slots


@settings(deadline=None)  # the first batches compile
@given(batches(), st.sampled_from(SHAPES), st.sampled_from(POLICIES), st.sampled_from([1, 8]))
def test_the_device_lists_the_splits_that_the_host_planned(batch, shape, policy, num_kv_heads):
    block_size, window = shape
    planner = SplitPlanner(num_kv_heads, 132, block_size, policy=policy, max_extra=ROOM, window=window)
    rows = [row for row, n in enumerate(batch.q_lens) if n == 1]
    planned = planner.plan([batch.kv_lens[row] for row in rows])
    num_splits = [0] * NUM_ROWS
    for row, n in zip(rows, planned, strict=True):
        num_splits[row] = n

    first = [first_key(batch.kv_lens[row] - 1, block_size, window) for row in rows]
    read = [batch.kv_lens[row] - start for row, start in zip(rows, first, strict=True)]
    expected = [(rows[i], first[i] + start, first[i] + stop) for i, start, stop in work_list(read, planned, block_size)]
    check_splits(batch, device_splits(batch, num_splits, block_size, window), expected)


@settings(deadline=None)
@given(batches(), st.sampled_from(SHAPES), st.lists(st.integers(-1, 60), min_size=NUM_ROWS, max_size=NUM_ROWS))
def test_whatever_is_asked_for_each_row_is_read_once_within_the_room(batch, shape, num_splits):
    block_size, window = shape
    listed = device_splits(batch, num_splits, block_size, window)
    items = real_items(listed.work)
    counts = [sum(item[work.ROW] == row for item in items) for row in range(NUM_ROWS)]
    assert len(items) <= NUM_ROWS + ROOM
    expected = []
    for row, (n, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        if n == 1:
            start = first_key(kv_len - 1, block_size, window)
            read = kv_len - start
            assert 1 <= counts[row] <= max(1, min(num_splits[row], read // 512))
            expected += [(row, start + a, start + b) for a, b in split_bounds(read, counts[row], block_size)]
    check_splits(batch, listed, expected)


@pytest.mark.parametrize(
    ("kv_lens", "num_splits", "expected"),
    [
        ([1, 1023, 1024, 4096], None, [1, 1, 2, 8]),
        ([100_000], None, [16]),
        ([8192] * 8, None, [16, 1, 1, 1, 1, 1, 1, 1]),  # 15 of the room for 20 splits: too little is left for 15 more
        ([8192] * 8, [11, 11, 1, 1, 1, 1, 1, 1], [11, 11, 1, 1, 1, 1, 1, 1]),
        ([8192] * 8, [11, 12, 1, 1, 1, 1, 1, 1], [11, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_row_has_one_split_where_the_room_is_used_up(kv_lens, num_splits, expected):
    """Without a plan it has one for each 512 tokens, at most 16."""
    padding = [0] * (NUM_ROWS - len(kv_lens))
    batch = Batch([1] * len(kv_lens) + padding, kv_lens + padding)
    rows = [item[work.ROW] for item in real_items(device_splits(batch, num_splits, 64, None).work)]
    assert [rows.count(row) for row in range(len(kv_lens))] == expected


@settings(deadline=None)
@given(batches(), st.sampled_from([(64, 64, None), (9, 64, 100), (1, 16, 3000)]))
@example(Batch([65] + [2] * 7, [65] + [2] * 7), (64, 64, None))  # as many tiles as there can be
def test_tiles_cover_every_query_of_a_prompt_and_every_padding_token_once(batch, shape):
    tile_tokens, block_size, window = shape
    arguments = batch.cu_q_lens, np.array(batch.kv_lens, np.int32), NUM_TOKENS
    listed = tiles_of(*arguments, tile_tokens=tile_tokens, block_size=block_size, window=window)
    items = real_items(listed)
    assert len(items) <= len(listed.items)
    num_used = int(batch.cu_q_lens[-1])
    covered = []
    for row, token, num_tokens, position, start, stop, slot in items:
        assert 1 <= num_tokens <= tile_tokens
        assert slot == -1
        covered += range(token, token + num_tokens)
        if token >= num_used:
            assert start == stop == 0
            continue
        assert position == batch.kv_lens[row] - batch.q_lens[row] + token - batch.cu_q_lens[row]
        assert token + num_tokens <= batch.cu_q_lens[row + 1]
        assert (start, stop) == (first_key(position, block_size, window), position + num_tokens)
    single = {int(batch.cu_q_lens[row]) for row, n in enumerate(batch.q_lens) if n == 1}
    assert sorted(covered) == [token for token in range(NUM_TOKENS) if token not in single]
    sizes = [stop - start for *_, start, stop, _ in items]
    assert sizes == sorted(sizes, reverse=True)
