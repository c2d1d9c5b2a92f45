"""Dynamic SplitKV: into how many splits of its keys each decode row is cut, decided anew for every step.

A work item is one split of one row for one KV head, and costs the tokens it reads. Cutting long rows into
several items lets every SM of a GPU read, where whole rows would keep a few of them busy for long.
"""

import heapq
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

MAX_PROPORTIONAL_SPLITS = 16
SLACK = 0.05  # of the slowest SM's tokens: what a plan of fewer splits may cost, as every split costs a combine


def plan_splits(
    kv_lens: Sequence[int],
    num_kv_heads: int,
    num_sms: int,
    *,
    min_split_tokens: int = 512,
    policy: str = "waves",
    block_size: int = 64,
) -> list[int]:
    """The number of KV splits of each decode row: 1 is a row left whole, 0 a row of no tokens.

    kv_lens: tokens each row attends to. num_kv_heads: of one device. num_sms: of that device.
    min_split_tokens: no split of `split_bounds` is shorter; a row under twice that is left whole.
    policy: all keep `min_split_tokens`.
        waves: the SMs' loads are evened out: of the plans tried, those within 5 % of the fewest tokens for the
            slowest SM, and of these the one of fewest splits. Launched in the order of `work_list`, it is never
            worse than no splits. There is no cap.
        proportional: kv_len // min_split_tokens, at most 16, whatever else is in the batch.
        fixed(n): n splits a row, for instance "fixed(8)".
        none: no row is split.

    Raises TypeError for a number that is no int, ValueError for one out of range or an unknown policy.
    """
    _check_counts("kv_lens", kv_lens)
    for name, value in [
        ("num_kv_heads", num_kv_heads),
        ("num_sms", num_sms),
        ("min_split_tokens", min_split_tokens),
        ("block_size", block_size),
    ]:
        _check_positive(name, value)
    cap = _cap(policy)
    whole_chunk = -(-min_split_tokens // block_size) * block_size
    if not any(kv_lens):
        return [0] * len(kv_lens)
    if cap is None:
        chunk = _best_chunk(kv_lens, num_kv_heads, num_sms, whole_chunk, block_size)
        wanted = {n: -(-n // chunk) for n in set(kv_lens)}
    else:
        wanted = dict.fromkeys(kv_lens, cap)
    splits = {n: want if want * whole_chunk <= n else n // whole_chunk or 1 for n, want in wanted.items()}
    splits[0] = 0
    return [splits[n] for n in kv_lens]


def split_bounds(kv_len: int, num_splits: int, block_size: int) -> list[tuple[int, int]]:
    """Tokens [start, stop) of each split of a row: in order, none empty, together exactly [0, kv_len).

    Every start is a multiple of `block_size`. Splits differ by at most one block, and the last, which ends in
    the row's unfinished block, is never one of fewer.

    Raises ValueError if the row has fewer blocks than `num_splits`.
    """
    _check_counts("kv_len", [kv_len])
    _check_counts("num_splits", [num_splits])
    _check_positive("block_size", block_size)
    return _bounds(kv_len, num_splits, block_size)


class WorkItem(NamedTuple):
    """Tokens [start, stop) of the row `row`, to be read once for each KV head."""

    row: int
    start: int
    stop: int


def work_list(kv_lens: Sequence[int], splits: Sequence[int], block_size: int) -> list[WorkItem]:
    """Every split of every row, the rows of the longest splits first, as counted in blocks.

    Short items launched last even out the SMs' loads. A row's splits follow one another.

    Raises ValueError if a row has fewer blocks than splits, or tokens and no split.
    """
    _check_counts("kv_lens", kv_lens)
    _check_counts("splits", splits)
    _check_positive("block_size", block_size)
    if len(splits) != len(kv_lens):
        raise ValueError(f"splits has {len(splits)} entries for {len(kv_lens)} rows; it must have one for each")

    def longest_split(row: int) -> int:
        return -(kv_lens[row] // -block_size // (splits[row] or 1))

    rows = sorted(range(len(kv_lens)), key=longest_split, reverse=True)
    return [WorkItem(row, *bounds) for row in rows for bounds in _bounds(kv_lens[row], splits[row], block_size)]


class Simulation(NamedTuple):
    """What a launch costs. waves: items per SM, rounded up. bytes_per_sm: what each SM reads, in any order."""

    waves: int
    bytes_per_sm: list[int]

    @property
    def slowest_share(self) -> float:
        """Of all bytes, the part that the slowest SM reads; 1 / SMs at best, 0 where there is nothing to read."""
        return max(self.bytes_per_sm) / (sum(self.bytes_per_sm) or 1)


def simulate(item_bytes: Sequence[int], num_sms: int) -> Simulation:
    """Launch items of so many bytes as a GPU does: in order, each on the SM that is free first, one at a time.

    SMs read equally fast, so an SM's time is its bytes.
    """
    _check_counts("item_bytes", item_bytes)
    _check_positive("num_sms", num_sms)
    loads = [0] * num_sms
    for size in item_bytes:
        heapq.heapreplace(loads, loads[0] + size)
    return Simulation(-(-len(item_bytes) // num_sms), loads)


def _bounds(kv_len: int, num_splits: int, block_size: int) -> list[tuple[int, int]]:
    """`split_bounds` of numbers known to be whole."""
    if num_splits == 1 and kv_len:  # most rows of most steps
        return [(0, kv_len)]
    num_blocks = -(-kv_len // block_size)
    if not min(num_blocks, 1) <= num_splits <= num_blocks:
        valid = f"from 1 to {num_blocks}" if num_blocks else "0"
        raise ValueError(f"num_splits={num_splits} does not suit a row of {num_blocks} blocks; it must be {valid}")
    starts = [i * num_blocks // num_splits * block_size for i in range(num_splits)]
    return list(pairwise([*starts, kv_len]))


def _best_chunk(kv_lens: Sequence[int], num_kv_heads: int, num_sms: int, min_chunk: int, block_size: int) -> int:
    """The most tokens of a split, in whole blocks, of the plan that policy `waves` makes.

    For a number of waves one chunk is worth a try, the shortest whose items fit into them. They are tried with
    ever more waves, so ever more splits, until none can be better by SLACK. No splits are scored by the least
    that any order of the items can make the slowest SM read, splits by the most that `work_list` can: where
    splits win, they cannot lose to no splits.
    """
    even = sum(kv_lens) * num_kv_heads / num_sms
    longest = -(-max(kv_lens) // block_size)
    options = [(_least_unsplit(kv_lens, num_kv_heads, num_sms, even), longest)]
    good_enough = (1 + SLACK) * even
    if options[0][0] <= good_enough:
        return longest * block_size
    rows = Counter((-(-n // block_size), n // min_chunk or 1) for n in kv_lens if n)
    shortest = min(min_chunk // block_size, longest)
    rows_above = _rows_above(rows, longest)

    def num_waves(chunk: int) -> int:
        return -(-num_kv_heads * sum(rows_above[::chunk]) // num_sms)

    waves, chunk = num_waves(longest), longest
    while options[-1][0] > good_enough and chunk > shortest:
        chunk = shortest + bisect_left(range(shortest, chunk), True, key=lambda c: num_waves(c) <= waves)
        options.append((_most_split(rows, chunk, num_kv_heads, num_sms, even, block_size), chunk))
        # The more kinds of rows there are, the more they even out, and the more a try costs: fewer tries.
        waves = max(num_waves(max(chunk - 1, shortest)), waves + waves * len(rows) // 64)
    best = min(options)[0]
    limit = good_enough if best <= good_enough else (1 + SLACK) * best
    return block_size * next(chunk for score, chunk in options if score <= limit)


def _rows_above(rows: Mapping[tuple[int, int], int], longest: int) -> list[int]:
    """At x: the rows of more than x blocks. So its sum at 0, c, 2 c, ... counts the chunks of c blocks."""
    rows_of = [0] * longest
    for (blocks, _), count in rows.items():
        rows_of[blocks - 1] += count
    return list(accumulate(reversed(rows_of)))[::-1]


def _most_split(
    rows: Mapping[tuple[int, int], int], chunk: int, num_kv_heads: int, num_sms: int, even: float, block_size: int
) -> float:
    """Tokens that the slowest SM reads at most, if rows are split into chunks and launched longest first.

    rows: how many there are of so many blocks that allow so many splits. chunk: blocks of a split at most, where
    the row allows as many. An item starts on the SM that is free first, so no later than when the SMs would have
    read all the earlier items evenly, or as many longest ones as it has whole waves before it. This runs
    several times a step over every kind of row, so it spells out min() and max().
    """
    sizes = []
    for (blocks, limit), count in rows.items():
        splits = -(-blocks // chunk)
        if splits > limit:
            splits = limit
        sizes.append((-(-blocks // splits), splits * count, blocks * count))
    sizes.sort(reverse=True)
    longest, even_blocks = sizes[0][0], even / block_size
    most = 0.0
    items = blocks_read = 0
    for size, num_splits, num_blocks in sizes:
        items += num_splits * num_kv_heads
        blocks_read += num_blocks * num_kv_heads
        start = blocks_read / num_sms
        if start > even_blocks:  # blocks that are not full
            start = even_blocks
        if start > (by_waves := (items - 1) // num_sms * longest):
            start = by_waves
        if start + size > most:
            most = start + size
    return most * block_size


def _least_unsplit(kv_lens: Sequence[int], num_kv_heads: int, num_sms: int, even: float) -> float:
    """Tokens that the slowest SM reads at least, if no row is split: of k SMs + 1 items, some SM gets k + 1."""
    falling = sorted(kv_lens, reverse=True)
    items = range(0, len(falling) * num_kv_heads, num_sms)
    return max(even, *((k + 1) * falling[item // num_kv_heads] for k, item in enumerate(items)))


def _cap(policy: str) -> int | None:
    """The most splits of a row under `policy`; None if it depends on the batch."""
    if policy == "waves":
        return None
    if policy == "proportional":
        return MAX_PROPORTIONAL_SPLITS
    if policy == "none":
        return 1
    if isinstance(policy, str) and (fixed := re.fullmatch(r"fixed\(([1-9][0-9]*)\)", policy)):
        return int(fixed[1])
    raise ValueError(f"policy={policy!r} is unknown; choose waves, proportional, none or fixed(n) with n at least 1")


def _check_positive(name: str, value: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be a whole number from 1")
    if value < 1:
        raise ValueError(f"{name}={value} is out of range; it must be a whole number from 1")


def _check_counts(name: str, values: Sequence[int]) -> None:
    """Raise unless all are ints from 0."""
    if not set(map(type, values)) <= {int}:
        value = next(v for v in values if type(v) is not int)
        raise TypeError(f"{name} holds {value!r}, {type(value).__name__}; it must hold whole numbers from 0")
    if min(values, default=0) < 0:
        raise ValueError(f"{name} holds {min(values)}; it must hold whole numbers from 0")
