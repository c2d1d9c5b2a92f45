"""The points of a benchmark: which requests are sent, and by how many clients or at what rate.

Every prompt of a benchmark is another one, those of different points and the warm-ups included, so that no target
can have it in a cache unless a shared prefix is asked for; every system gets the same points.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fastgen_jax.bench.drive import Target, closed_loop, open_loop
from fastgen_jax.bench.load import Lengths, Request, check_mean, make_prompts, make_requests, poisson
from fastgen_jax.bench.metrics import Record, duration
from fastgen_jax.progress import Advance

CLOSED, OPEN, LONG_PROMPT = "closed", "open", "long_prompt"
CAP_OF_MEAN = 3
ARRIVES_AFTER = 1 / 3
"""When the long prompt arrives, as a share of the time that the decodes take without it."""


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens; a cap of None is 3 times the mean. num_requests: of a point; None is 4 x clients + 32."""

    prompt_mean: float = 320
    output_mean: float = 30
    prompt_cap: int | None = None
    output_cap: int | None = None
    num_requests: int | None = None
    seed: int = 0
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        _ = self.prompt, self.output
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"{self.num_requests} requests are too few; it takes at least 1")

    @property
    def prompt(self) -> Lengths:
        return _lengths(self.prompt_mean, self.prompt_cap)

    @property
    def output(self) -> Lengths:
        return _lengths(self.output_mean, self.output_cap)

    def requests_of(self, clients: int) -> int:
        return self.num_requests or 4 * clients + 32

    def make(self, num_requests: int, corpus: Sequence[int]) -> list[Request]:
        return make_requests(
            num_requests, self.prompt, self.output, corpus, seed=self.seed, shared_prefix=self.shared_prefix
        )


def _lengths(mean: float, cap: int | None) -> Lengths:
    check_mean(mean)
    return Lengths(mean, int(CAP_OF_MEAN * mean) if cap is None else cap)


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    kind: "closed", by `clients` at once; "open", as a Poisson process of `rate` requests/s; "long_prompt", the
        last request arriving while the others, `clients` of them, decode.
    """

    kind: str
    clients: int = 0
    rate: float | None = None

    @property
    def title(self) -> str:
        if self.kind == CLOSED:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return f"{self.rate:g} requests/s" if self.kind == OPEN else f"{self.clients} decodes"


@dataclass(frozen=True)
class Point:
    """One measurement. warm_up: requests sent before the clock starts, all at once."""

    load: Load
    warm_up: list[Request]
    requests: list[Request]

    @property
    def num_to_run(self) -> int:
        """Requests that `run_point` sends after the warm-up."""
        return len(self.requests) + (self.load.clients if self.load.kind == LONG_PROMPT else 0)


def point_requests(points: Iterable[Point]) -> list[Request]:
    """Everything that the points will send."""
    return [request for point in points for request in (*point.warm_up, *point.requests)]


def closed_points(workload: Workload, clients: Sequence[int], corpus: Sequence[int]) -> list[Point]:
    """A closed loop for each number of clients, with one warm-up request a client."""
    for number in clients:
        if number < 1:
            raise ValueError(f"{number} clients are too few; it takes at least 1")
    sizes = [workload.requests_of(number) for number in clients]
    stream = iter(workload.make(sum(sizes) + sum(clients), corpus))
    return [
        Point(Load(CLOSED, clients=number), _take(stream, number), _take(stream, size))
        for number, size in zip(clients, sizes, strict=True)
    ]


def open_points(workload: Workload, rates: Sequence[float], corpus: Sequence[int]) -> list[Point]:
    """Poisson arrivals at each rate, with one warm-up request."""
    size = workload.requests_of(0)
    stream = iter(workload.make(len(rates) * (size + 1), corpus))
    return [
        Point(Load(OPEN, rate=rate), _take(stream, 1), poisson(_take(stream, size), rate, seed=workload.seed))
        for rate in rates
    ]


def long_prompt_points(
    workload: Workload, long_prompt: int, decodes: Sequence[int], corpus: Sequence[int]
) -> list[Point]:
    """One prompt of `long_prompt` tokens among each number of decodes, which all have the mean lengths."""
    if long_prompt < 1:
        raise ValueError(f"a long prompt of {long_prompt} tokens is too short; it must be at least 1")
    prompt, output = max(int(workload.prompt_mean), 1), max(int(workload.output_mean), 1)
    for number in decodes:
        if number < 1:
            raise ValueError(f"{number} decodes are too few; it takes at least 1")
    lengths = [length for number in decodes for length in [*[prompt] * 2 * number, long_prompt]]
    prompts = iter(make_prompts(lengths, corpus, seed=workload.seed, shared_prefix=workload.shared_prefix))
    stream = (Request(token_ids, output) for token_ids in prompts)
    return [
        Point(Load(LONG_PROMPT, clients=number), _take(stream, number), _take(stream, number + 1)) for number in decodes
    ]


def run_point(target: Target, point: Point, advance: Advance) -> list[Record]:
    """Warm up, then run; records in the order of the requests.

    ValueError if a warm-up request fails: the target does not answer as it should.
    """
    for record in closed_loop(target, point.warm_up, len(point.warm_up)):
        if record.error is not None:
            raise ValueError(record.error)
    if point.load.kind == CLOSED:
        return closed_loop(target, point.requests, point.load.clients, advance)
    if point.load.kind == OPEN:
        return open_loop(target, point.requests, advance)
    *decodes, long = point.requests
    alone = duration(open_loop(target, decodes, advance))
    return open_loop(target, [*decodes, replace(long, arrival=alone * ARRIVES_AFTER)], advance)


def _take(stream: Iterator[Request], number: int) -> list[Request]:
    return list(itertools.islice(stream, number))
