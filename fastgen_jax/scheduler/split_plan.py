"""Dynamic SplitKV: into how many splits of its keys each decode row is cut, decided anew as the rows change.

A work item is one split of one row, and a unit is a work item for one KV head. Cutting long rows into several
items lets every SM of a GPU read, where whole rows would keep a few of them busy for long.
"""

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from fastgen_jax.scheduler.split_search import best_chunk

MAX_PROPORTIONAL_SPLITS = 16
STEPS_PER_SEARCH = 8  # in which a row grows by as many tokens, too few to change what chunk is best


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
        waves: the SMs' loads are evened out: of the plans tried, those within 5 % of the least time of the
            slowest SM, and of these the one of fewest splits. Time is as in `split_search`, never more than
            that of no splits. There is no cap.
        proportional: kv_len // min_split_tokens, at most 16, whatever else is in the batch.
        fixed(n): n splits a row, for instance "fixed(8)".
        none: no row is split.

    Raises TypeError for a number that is no int, ValueError for one out of range or an unknown policy.
    """
    _check_counts("kv_lens", kv_lens)
    planner = SplitPlanner(num_kv_heads, num_sms, block_size, min_split_tokens=min_split_tokens, policy=policy)
    return planner.plan(kv_lens)


class SplitPlanner:
    """`plan_splits` for one step after another: a search's result serves the steps that follow it.

    max_extra: how many splits beyond one a row a launch has room for; None is no limit.
    window: tokens that a row reads at most; None is all of them.
    The other arguments, and what is raised: as in `plan_splits`.
    """

    def __init__(
        self,
        num_kv_heads: int,
        num_sms: int,
        block_size: int,
        *,
        min_split_tokens: int = 512,
        policy: str = "waves",
        max_extra: int | None = None,
        window: int | None = None,
    ) -> None:
        for name, value in [
            ("num_kv_heads", num_kv_heads),
            ("num_sms", num_sms),
            ("min_split_tokens", min_split_tokens),
            ("block_size", block_size),
            ("window", 1 if window is None else window),
        ]:
            _check_positive(name, value)
        _check_counts("max_extra", [max_extra or 0])
        self._num_kv_heads, self._num_sms, self._block_size = num_kv_heads, num_sms, block_size
        self._min_chunk = -(-min_split_tokens // block_size) * block_size
        self._cap = _cap(policy)
        self._max_extra = sys.maxsize if max_extra is None else max_extra
        self._window = window
        self._searches = policy == "waves"
        self._chunk = self._min_chunk  # tokens of a split at most; only a search changes it
        self._searched_rows = 0
        self._steps_left = 0  # until the next search

    def plan(self, kv_lens: Sequence[int]) -> list[int]:
        """The number of splits of each decode row of a step; kv_lens: ints from 0, which is not checked.

        Policy `waves` searches anew every 8th call, and when the number of rows has changed by more than 1/8
        since; in between, rows are cut at the length found last. Where the launch has no room for all splits,
        those of all rows are halved until it has.
        """
        if self._window is not None:
            window = self._window
            kv_lens = [n if n < window else window for n in kv_lens]
        if self._searches and any(kv_lens):
            self._search_if_due(kv_lens)
        splits = self._cut(kv_lens)
        while sum(splits) - len(splits) + splits.count(0) > self._max_extra:
            splits = [(n + 1) // 2 for n in splits]
        return splits

    def _search_if_due(self, kv_lens: Sequence[int]) -> None:
        if self._steps_left == 0 or abs(len(kv_lens) - self._searched_rows) * 8 > self._searched_rows:
            self._chunk = best_chunk(
                kv_lens,
                self._num_kv_heads,
                self._num_sms,
                block_size=self._block_size,
                min_chunk=self._min_chunk,
                max_extra=self._max_extra,
            )
            self._searched_rows = len(kv_lens)
            self._steps_left = STEPS_PER_SEARCH
        self._steps_left -= 1

    def _cut(self, kv_lens: Sequence[int]) -> list[int]:
        chunk, min_chunk, cap = self._chunk, self._min_chunk, self._cap
        splits = []
        for n in kv_lens:
            num = -(-n // chunk)
            if num > 1 and num > (most := n // min_chunk or 1):
                num = most
            splits.append(num if num < cap else cap)
        return splits


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
    """Every split of every row, those of the most tokens first; of as many, by row and start.

    Raises ValueError if a row has fewer blocks than splits, or tokens and no split.
    """
    _check_counts("kv_lens", kv_lens)
    _check_counts("splits", splits)
    _check_positive("block_size", block_size)
    if len(splits) != len(kv_lens):
        raise ValueError(f"splits has {len(splits)} entries for {len(kv_lens)} rows; it must have one for each")
    items = [
        WorkItem(row, start, stop)
        for row, (kv_len, num_splits) in enumerate(zip(kv_lens, splits, strict=True))
        for start, stop in _bounds(kv_len, num_splits, block_size)
    ]
    return sorted(items, key=lambda item: item.start - item.stop)


class Simulation(NamedTuple):
    """What a launch costs. waves: units of an SM at most. bytes_per_sm: what each SM reads."""

    waves: int
    bytes_per_sm: list[int]

    @property
    def slowest_share(self) -> float:
        """Of all bytes, the part that the slowest SM reads; 1 / SMs at best, 0 where there is nothing to read."""
        return max(self.bytes_per_sm) / (sum(self.bytes_per_sm) or 1)


def simulate(item_bytes: Sequence[int], num_sms: int) -> Simulation:
    """Hand out units of so many bytes as the kernel does: back and forth over the SMs, in the order given.

    The first `num_sms` units go to SM 0, 1, .., the next ones to the last SM, the one before it, .., and so on:
    fixed beforehand, whichever SM is free first. With the longest units first nobody gets the longer one of every
    round. The kernel's order is that of `work_list`, the KV heads of an item following one another. SMs read
    equally fast, so what the slowest SM reads is what a launch takes.
    """
    _check_counts("item_bytes", item_bytes)
    _check_positive("num_sms", num_sms)
    loads = [0] * num_sms
    waves = range(0, len(item_bytes), num_sms)
    for wave, start in enumerate(waves):
        for sm, size in enumerate(item_bytes[start : start + num_sms]):
            loads[~sm if wave % 2 else sm] += size
    return Simulation(len(waves), loads)


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


def _cap(policy: str) -> int:
    """The most splits of a row under `policy`, whatever its length and the rest of the batch."""
    if policy == "waves":
        return sys.maxsize
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
