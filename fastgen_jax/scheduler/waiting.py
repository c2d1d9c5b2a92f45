"""`WaitingQueue`: the sequences that wait for their turn, best first."""

import heapq

from fastgen_jax.scheduler.sequence import Sequence

MAX_STALE = 64  # ended sequences that the heap may hold beyond as many as there are live ones


class WaitingQueue:
    """Orders by priority, then those that ran before being preempted, then arrival.

    A sequence may end while it is here: `pop` skips it, and `forget_ended` keeps such from piling up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, Sequence]] = []

    def __len__(self) -> int:
        """Ended ones included."""
        return len(self._heap)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (-seq.priority, seq.num_preemptions == 0, seq.arrival, seq))

    def pop(self) -> Sequence | None:
        """Take the best one out; None if there is none."""
        while self._heap:
            seq = heapq.heappop(self._heap)[-1]
            if not seq.is_finished:
                return seq
        return None

    def forget_ended(self, num_live: int) -> None:
        """Drop the ended ones if they are many more than the `num_live` others: at a constant cost for each."""
        if len(self._heap) > 2 * num_live + MAX_STALE:
            self._heap = [entry for entry in self._heap if not entry[-1].is_finished]
            heapq.heapify(self._heap)
