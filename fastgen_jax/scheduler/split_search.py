"""The search of policy `waves`: at how many tokens to cut rows so that the slowest SM of a GPU is soonest done.

Time is counted in tokens that an SM reads: an item costs those of its blocks, which are read whole, and
`UNIT_TOKENS`, for each KV head. The kernel hands them out as `split_plan.simulate` does.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add

SLACK = 0.05  # of the slowest SM's time: what a plan of fewer splits may cost, as every split costs a combine
UNIT_TOKENS = 64  # what an item costs beside its keys, for each KV head, as tokens read; assumed, not measured


def best_chunk(
    kv_lens: Sequence[int], num_kv_heads: int, num_sms: int, *, block_size: int, min_chunk: int, max_extra: int
) -> int:
    """The most tokens of a split, in whole blocks, of the plan that policy `waves` makes.

    kv_lens: at least one above 0. min_chunk: tokens, in whole blocks, of the shortest split there may be.
    max_extra: how many splits beyond one a row there may be.

    For a number of waves one chunk is worth a try, the shortest whose items fit into them. They are tried with
    ever more waves, so ever more splits, until none can be better by SLACK. Of those within SLACK of the best the
    longest is taken: no splits are the first, so there are splits only where they are better.
    """
    rows = Rows(kv_lens, min_chunk, block_size)
    even = rows.total_time * num_kv_heads / num_sms
    chunk = rows.longest
    if chunk * block_size + UNIT_TOKENS <= SLACK * even:  # the units being sorted, no two SMs differ by more than one
        return chunk * block_size

    def num_waves(chunk: int) -> int:
        return -(-num_kv_heads * rows.num_items(chunk) // num_sms)

    max_items = rows.num_items(chunk) + max_extra
    lengths = range(min(min_chunk // block_size, chunk), chunk)
    lengths = lengths[bisect_left(lengths, -max_items, key=lambda c: -rows.num_items(c)) :]
    options = [(rows.slowest_sm(chunk, num_kv_heads, num_sms), chunk)]
    waves = 0
    while options[-1][0] > (1 + SLACK) * even and lengths:
        # The more kinds of rows there are, the more they even out, and the more a try costs: fewer tries.
        waves = max(num_waves(lengths[-1]), waves + waves * len(rows.kinds) // 64)
        lengths = lengths[: bisect_left(lengths, -waves, key=lambda c: -num_waves(c)) + 1]
        chunk, lengths = lengths[-1], lengths[:-1]
        options.append((rows.slowest_sm(chunk, num_kv_heads, num_sms), chunk))
    best = min(options)[0]
    limit = (1 + SLACK) * (even if best <= (1 + SLACK) * even else best)  # not SLACK upon SLACK
    return block_size * next(chunk for slowest, chunk in options if slowest <= limit)


class Rows:
    """The rows of a step by kind: so many blocks, the last of them full or not.

    kinds: (blocks, full blocks, number of such rows). longest: the most blocks of a row. total_time: of all rows
    for one KV head, none of them split.
    """

    def __init__(self, kv_lens: Sequence[int], min_chunk: int, block_size: int) -> None:
        self._block_size = block_size
        self._min_blocks = min_chunk // block_size
        kinds = Counter([n // block_size - -n // block_size for n in kv_lens if n])  # full blocks + blocks
        self.kinds = [((both + 1) // 2, both // 2, num) for both, num in kinds.items()]
        self.longest = max(self.kinds)[0]
        rows_of = [0] * self.longest
        for blocks, _, num in self.kinds:
            rows_of[blocks - 1] += num
        # At x: the rows of more than x blocks. So its sum at 0, c, 2 c, ... counts the chunks of c blocks.
        self._rows_above = list(accumulate(reversed(rows_of)))[::-1]
        self.total_time = sum(self._rows_above) * block_size + self._rows_above[0] * UNIT_TOKENS

    def num_items(self, chunk: int) -> int:
        """How many chunks of so many blocks there are: a plan's items, or more, where rows allow fewer splits."""
        return sum(self._rows_above[::chunk])

    def slowest_sm(self, chunk: int, num_kv_heads: int, num_sms: int) -> int:
        """Time of the slowest SM if each row is cut into chunks of so many blocks, or as far as it allows.

        It runs several times a step over every kind of row, so it spells out min().
        """
        min_blocks = self._min_blocks
        sizes: dict[int, int] = {}  # blocks of an item -> number of such items
        for blocks, full_blocks, num in self.kinds:
            if blocks <= chunk or full_blocks < 2 * min_blocks:
                sizes[blocks] = sizes.get(blocks, 0) + num
                continue
            splits, most = -(-blocks // chunk), full_blocks // min_blocks
            if splits > most:
                splits = most
            size, num_longer = divmod(blocks, splits)
            sizes[size] = sizes.get(size, 0) + (splits - num_longer) * num
            if num_longer:
                sizes[size + 1] = sizes.get(size + 1, 0) + num_longer * num
        longest_first = sorted(sizes, reverse=True)
        groups = [(size * self._block_size + UNIT_TOKENS, sizes[size] * num_kv_heads) for size in longest_first]
        return slowest_load(groups, num_sms)


def slowest_load(groups: Iterable[tuple[int, int]], num_sms: int) -> int:
    """max(bytes_per_sm) of `simulate`, of groups of equal units in their order: (bytes of a unit, number of units)."""
    every = 0  # what all SMs have of the waves that one group fills
    # What each SM has more than the one before it, of the waves that go this way and of those that go the other.
    this_way, other_way = [0] * (num_sms + 1), [0] * (num_sms + 1)
    forth, back = this_way, other_way
    position = 0  # in the wave
    for size, num_units in groups:
        this_way[position] += size
        position += num_units
        if position >= num_sms:
            num_full, position = divmod(position - num_sms, num_sms)
            every += num_full * size
            if num_full % 2 == 0:
                this_way, other_way = other_way, this_way
            this_way[0] += size
        this_way[position] -= size
    loads = map(add, accumulate(forth[:num_sms]), reversed(list(accumulate(back[:num_sms]))))
    return every + max(loads)
