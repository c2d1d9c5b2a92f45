"""Sends requests to a target, as a number of clients or at given times, and gathers what became of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from fastgen_jax.bench.load import Request
from fastgen_jax.bench.metrics import Record
from fastgen_jax.progress import Advance

CLOCK_ERROR = "the clock went backwards while this request ran: its times are not to be trusted"
LOST_ERROR = "the target has no work left, and has not answered this request"


class Target(Protocol):
    """What requests are sent to, in real or in virtual time."""

    def now(self) -> float:
        """Seconds on the target's clock."""
        ...

    def add(self, request: Request) -> int:
        """Send a request; a number that no other request of the target has."""
        ...

    def step(self) -> list[tuple[int, Record]]:
        """Let time pass, a moment only; the requests that have ended since the last call, by number."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has a request to go on with or to return."""
        ...

    def wait(self, until: float) -> None:
        """Idle until then, by the target's clock."""
        ...


def _ignore(_: int) -> None:
    pass


def closed_loop(
    target: Target, requests: Sequence[Request], num_clients: int, advance: Advance = _ignore
) -> list[Record]:
    """`num_clients` clients at once, each sending the next request when its last has ended.

    Records are in the order of the requests. advance: told how many more requests have ended.
    """
    if num_clients < 1:
        raise ValueError(f"{num_clients} clients are too few; it takes at least 1")
    run = _Run(target, requests, advance)
    while run.unsent or run.in_flight:
        while run.unsent and len(run.in_flight) < num_clients:
            run.send()
        run.collect()
    return run.records()


def open_loop(target: Target, requests: Sequence[Request], advance: Advance = _ignore) -> list[Record]:
    """Each request sent `arrival` seconds after the start, whatever has become of those before it.

    A record's `sent` is when its request was due, though the target may have been busy then: the wait counts.
    Records are in the order of the requests. advance: told how many more requests have ended.
    """
    run = _Run(target, requests, advance)
    run.unsent.sort(key=lambda i: requests[i].arrival, reverse=True)
    start = run.clock.now()
    while run.unsent or run.in_flight:
        due = start + requests[run.unsent[-1]].arrival if run.unsent else None
        if due is None:
            run.collect()
        elif due <= run.clock.now():
            run.send(due)
        elif run.in_flight:
            run.collect()
        else:
            target.wait(run.clock.on_target(due))
            run.send(due)  # whatever the clock says now: one that falls back must not hold the run up
    return run.records()


class _Clock:
    """The target's clock, made steady: where it falls back, time goes on from the last reading."""

    def __init__(self, read: Callable[[], float]):
        self._read = read
        self._last = read()
        self.fallen = 0.0

    def now(self) -> float:
        reading = self._read()
        self.fallen += max(self._last - reading, 0.0)
        self._last = reading
        return reading + self.fallen

    def on_target(self, steady: float) -> float:
        """The same moment on the target's own clock."""
        return steady - self.fallen


class _Run:
    """Requests not yet sent, those in flight, and the records of those that have ended.

    unsent: numbers of requests, the next one last.
    """

    def __init__(self, target: Target, requests: Sequence[Request], advance: Advance):
        self.clock = _Clock(target.now)
        self.unsent = list(range(len(requests)))[::-1]
        self.in_flight: dict[int, _Flight] = {}
        self._target = target
        self._requests = requests
        self._records: dict[int, Record] = {}
        self._advance = advance

    def send(self, due: float | None = None) -> None:
        """Send the next request."""
        index = self.unsent.pop()
        self._note_clock()
        sent = self.clock.now()
        self.in_flight[self._target.add(self._requests[index])] = _Flight(index, sent, due, self.clock.fallen)

    def collect(self) -> None:
        """Let the target work, and take in the requests that have ended."""
        if not self._target.has_work:
            ended = [(i, self._lost(flight)) for i, flight in self.in_flight.items()]
        else:
            ended = self._target.step()
        self._note_clock()
        for number, record in ended:
            flight = self.in_flight.pop(number)
            self._records[flight.index] = flight.settle(record)
        if ended:
            self._advance(len(ended))

    def records(self) -> list[Record]:
        return [self._records[index] for index in sorted(self._records)]

    def _lost(self, flight: "_Flight") -> Record:
        sent = self.clock.on_target(flight.sent)
        return Record(sent, len(self._requests[flight.index].prompt_token_ids), (), LOST_ERROR)

    def _note_clock(self) -> None:
        before = self.clock.fallen
        self.clock.now()
        if self.clock.fallen > before:
            for flight in self.in_flight.values():
                flight.is_doubtful = True


class _Flight:
    """A request on its way.

    sent, due: on the steady clock. fallen: what the target's clock had fallen back by when it was sent.
    """

    def __init__(self, index: int, sent: float, due: float | None, fallen: float):
        self.index = index
        self.sent = sent
        self.due = due
        self.is_doubtful = False
        self._fallen = fallen

    def settle(self, record: Record) -> Record:
        """The record on the steady clock, its times in order; marked where the target's clock fell back."""
        sent = record.sent + self._fallen
        sent = sent if self.due is None else min(sent, self.due)
        times: list[float] = []
        for time in record.token_times:
            times.append(max(time + self._fallen, times[-1] if times else sent))
        is_doubtful = self.is_doubtful or times != [time + self._fallen for time in record.token_times]
        error = record.error or (CLOCK_ERROR if is_doubtful else None)
        return replace(record, sent=sent, token_times=tuple(times), error=error)
