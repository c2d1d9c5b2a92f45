"""Closed and open loops in virtual time: every moment by hand."""

import pytest

from fastgen_jax.bench.drive import CLOCK_ERROR, LOST_ERROR, closed_loop, open_loop
from fastgen_jax.bench.load import Request
from fastgen_jax.bench.metrics import Record
from fastgen_jax.bench.workload import Load, Point, run_point


class Ticking:
    """Each step takes 1 s and gives every request in flight a token. jumps: seconds the clock jumps in a step."""

    def __init__(self, jumps=None):
        self.time = 100.0
        self.steps = 0
        self.jumps = jumps or {}
        self.flights = {}
        self.most = 0

    def now(self):
        return self.time

    def add(self, request):
        number = 1000 + len(self.flights)
        self.flights[number] = (request, self.time, [])
        return number

    def step(self):
        self.time += 1 + self.jumps.get(self.steps, 0)
        self.steps += 1
        live = {n: f for n, f in self.flights.items() if len(f[2]) < f[0].max_tokens}
        self.most = max(self.most, len(live))
        for _, _, times in live.values():
            times.append(self.time)
        return [
            (number, Record(sent, len(request.prompt_token_ids), tuple(times)))
            for number, (request, sent, times) in live.items()
            if len(times) == request.max_tokens
        ]

    @property
    def has_work(self):
        return any(len(times) < request.max_tokens for request, _, times in self.flights.values())

    def wait(self, until):
        assert until > self.time
        self.time = until


def requests(*lengths, arrivals=None):
    arrivals = arrivals or [0.0] * len(lengths)
    return [Request([1, 2, 3], n, arrival) for n, arrival in zip(lengths, arrivals, strict=True)]


def test_a_closed_loop_sends_when_a_client_is_free():
    done = []
    assert closed_loop(Ticking(), requests(2, 1, 2), 2, done.append) == [
        Record(100, 3, (101, 102)),
        Record(100, 3, (101,)),
        Record(101, 3, (102, 103)),
    ]
    assert done == [1, 1, 1]


@pytest.mark.parametrize(("clients", "most"), [(1, 1), (3, 3), (99, 5)])
def test_no_more_requests_are_in_flight_than_clients(clients, most):
    target = Ticking()
    records = closed_loop(target, requests(2, 2, 2, 2, 2), clients)
    assert (len(records), target.most) == (5, most)


def test_an_open_loop_sends_on_time_or_as_soon_as_the_target_lets_it():
    # The second is due within the first step: it waits until that is over, and the wait counts.
    assert open_loop(Ticking(), requests(2, 1, 1, arrivals=[0, 0.5, 5])) == [
        Record(100, 3, (101, 102)),
        Record(100.5, 3, (102,)),
        Record(105, 3, (106,)),
    ]


def test_records_are_in_the_order_of_the_requests_not_of_their_arrival():
    records = open_loop(Ticking(), requests(1, 1, arrivals=[3, 0]))
    assert [record.sent for record in records] == [103, 100]


def test_nothing_to_send_is_nothing_to_do():
    assert closed_loop(Ticking(), [], 4) == open_loop(Ticking(), []) == []


def test_no_clients_are_refused():
    with pytest.raises(ValueError, match="0 clients are too few; it takes at least 1"):
        closed_loop(Ticking(), requests(1), 0)


def test_a_request_the_target_forgets_is_marked():
    class Forgetful(Ticking):
        has_work = False

    assert closed_loop(Forgetful(), requests(1, 1), 2) == [Record(100, 3, (), LOST_ERROR)] * 2


def test_a_long_prompt_comes_a_third_into_the_decodes():
    *decodes, long = requests(6, 6, 1)
    records = run_point(Ticking(), Point(Load("long_prompt", clients=2), requests(1), [*decodes, long]), lambda _: None)
    # A warm-up of 1 s, the decodes alone for 6; then again, the long prompt 2 s after their start.
    assert [record.sent for record in records] == [107, 107, 109]
    assert records[2].token_times == (110,)


# A clock that falls back by 50 s in the second step, which the first two requests are in.


def test_a_closed_loop_survives_a_clock_that_falls_back():
    records = closed_loop(Ticking({1: -50}), requests(3, 2, 2), 2)
    assert [record.error for record in records] == [CLOCK_ERROR, CLOCK_ERROR, None]
    assert records[0].token_times == (101, 101, 101)
    assert all(gap >= 0 for record in records for gap in record.gaps)
    # The third is sent after the fall, when the steady clock still says 101, and lasts 2 s.
    assert records[2] == Record(101, 3, (102, 103))


def test_an_open_loop_survives_a_clock_that_falls_back():
    records = open_loop(Ticking({1: -50}), requests(3, 1, arrivals=[0, 6]))
    assert [record.error for record in records] == [CLOCK_ERROR, None]
    assert records[1] == Record(106, 3, (107,))


def test_a_clock_that_always_falls_back_while_waiting_ends_all_the_same():
    class Falling(Ticking):
        def wait(self, until):
            self.time -= 10

    records = open_loop(Falling(), requests(1, 1, arrivals=[0, 6]))
    assert len(records) == 2
    assert all(record.latency >= 0 for record in records)


def test_a_fall_that_a_record_does_not_show_marks_it_all_the_same():
    class Slow(Ticking):
        def step(self):
            if self.steps:
                return super().step()
            self.steps, self.time = 1, self.time + 1
            return []

    (record,) = closed_loop(Slow({1: -1.5}), requests(1), 1)
    assert record == Record(100, 3, (100.5,), CLOCK_ERROR)
