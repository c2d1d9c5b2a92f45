"""For a cluster that starts and stops replicas by itself: which of them there are, and how many there should be."""

import math
import time
from collections.abc import Sequence
from typing import Any

BEAT_S = 1.0
"""How often a replica says that it is there."""

SILENT_S = 5 * BEAT_S
"""A replica that has not said so for so long is not."""

METRIC = "outstanding_tokens"
"""What replicas report to be scaled by."""


class Registry:
    """Which replicas there are, by address (host:port)."""

    def __init__(self) -> None:
        self._last_beats: dict[str, float] = {}

    def beat(self, address: str) -> None:
        """A replica is there."""
        self._last_beats[address] = time.monotonic()

    def leave(self, address: str) -> None:
        """A replica takes no more requests."""
        self._last_beats.pop(address, None)

    def addresses(self) -> Sequence[str]:
        """In order."""
        now = time.monotonic()
        self._last_beats = {each: moment for each, moment in self._last_beats.items() if now - moment < SILENT_S}
        return sorted(self._last_beats)


class OutstandingTokens:
    """An autoscaling policy of Ray Serve's: a replica for every `per_replica` tokens that are outstanding."""

    def __init__(self, per_replica: int) -> None:
        self._per_replica = per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, by Ray's `AutoscalingContext`; and what to remember, which is nothing."""
        by_replica = (context.aggregated_metrics or {}).get(METRIC, {})
        wanted = math.ceil(sum(by_replica.values()) / self._per_replica)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, low), high), {}
