"""`Order`: what a runner's device is to do next, in plain values, so that processes which share a model do the same."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Order:
    """One call of a `ModelRunner`'s `execute`. kind: which; numbers and arrays: its arguments."""

    kind: str
    numbers: tuple[int, ...] = ()
    arrays: tuple[np.ndarray, ...] = ()

    def to_bytes(self) -> bytes:
        arrays = [np.ascontiguousarray(array) for array in self.arrays]
        head = json.dumps([self.kind, list(map(int, self.numbers)), [(a.dtype.str, a.shape) for a in arrays]])
        return b"".join((head.encode(), b"\n", *(array.tobytes() for array in arrays)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Order":
        head, _, rest = data.partition(b"\n")
        kind, numbers, shapes = json.loads(head)
        arrays, start = [], 0
        for dtype, shape in shapes:
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(rest, dtype, count, start).reshape(shape))
            start += arrays[-1].nbytes
        return cls(kind, tuple(numbers), tuple(arrays))


class Group(Protocol):
    """The processes that share a model, as their runners see them. leads: whether this is the one that schedules."""

    leads: bool

    def tell(self, order: Order) -> None:
        """Have the others execute `order`, in the order in which they are told."""

    def break_off(self) -> None:
        """After an exception between `tell` and the end of `execute`: tell no more, for they may be out of step."""

    def least(self, number: int) -> int:
        """The least of what all of them call this with."""

    def agree(self, facts: Mapping[str, str]) -> None:
        """ValueError in every one of them unless all call this with the same facts."""

    def settle(self) -> None:
        """After an error of the device: return if it is not that one of them is gone, which ends this process."""

    def close(self) -> None:
        """Part; the model cannot be used any more."""


class Alone:
    """A process that has the model to itself."""

    leads = True

    def tell(self, order: Order) -> None:
        """Nobody is there."""

    def break_off(self) -> None:
        """Nobody is out of step."""

    def least(self, number: int) -> int:
        """It is its own."""
        return number

    def agree(self, facts: Mapping[str, str]) -> None:
        """With itself."""

    def settle(self) -> None:
        """Nobody is missed."""

    def close(self) -> None:
        """There is nobody to part from."""
