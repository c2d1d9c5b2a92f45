"""How the tensors of a family's checkpoints differ from what its modules would have: names, sharing, orientation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Rows(NamedTuple):
    """`total` rows of a tensor, in runs of `run` rows that begin at row `start` and every `step` rows from there on."""

    total: int
    start: int
    run: int
    step: int

    def spans(self, wanted: slice) -> Iterator[tuple[slice, slice]]:
        """For rows `wanted` of the module, run by run: where they go, from 0 on, and where they lie in the tensor."""
        row = wanted.start
        while row < wanted.stop:
            turn, done = divmod(row, self.run)
            count, first = min(self.run - done, wanted.stop - row), self.start + turn * self.step + done
            yield slice(row - wanted.start, row - wanted.start + count), slice(first, first + count)
            row += count


def in_turn(*, times: int = 1, **runs: int) -> dict[str, Rows]:
    """Modules that lie one after the other in a tensor, each with its number of rows, `times` times."""
    sizes = list(runs.values())
    return {name: Rows(times * run, sum(sizes[:i]), run, sum(sizes)) for i, (name, run) in enumerate(runs.items())}


@dataclass(frozen=True)
class Layout:
    """What a family's checkpoints do otherwise.

    names: regular expressions and what they are replaced with, one after the other, in the checkpoint's names.
    shared: the module (named as the model would) of a tensor -> the modules of the model whose rows lie in it.
    transposed: modules whose weight lies [in, out].
    unread: a regular expression; the tensors it is found in say nothing that the model reads.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, Mapping[str, Rows]] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    unread: str | None = None
