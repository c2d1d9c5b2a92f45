"""Traces of requests: read from a file, or made up as a busy service may see them."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from fastgen_jax.bench.load import Request, check_mean

FIELDS = {"arrival": True, "prompt_tokens": True, "output_tokens": True, "prefix": False, "prefix_tokens": False}
"""Of a line of a trace, and whether it must be there."""

PREFIXES = 64
PREFIX_TOKENS = 512
PREFIX_SHARE = 0.5
SIGMA = 0.8
"""Of the logarithm of the lengths: the longest 5 % are 3.7 times the median or more."""

BURSTS_PER_PERIOD = 0.25
BURST_RATE = 2.5
BURST_PERIOD_S = 60.0
"""Each minute begins with a burst: a quarter of it at 2.5 times the mean rate, and the rest at half of it."""

ID_SPACE = 1 << 32
"""Token ids kept apart for each prompt and each prefix, so that none has another's tokens."""


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. prefix: its first `prefix_tokens` are those of every other with the same one."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.arrival < math.inf:
            raise ValueError(f"arrival={self.arrival} is no time; it must be at least 0")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens} and output_tokens={self.output_tokens} must both be at least 1"
            )
        if (self.prefix is None) != (self.prefix_tokens == 0) or not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(
                f"prefix={self.prefix!r} with prefix_tokens={self.prefix_tokens} must be both there or neither, "
                f"and of at most prompt_tokens={self.prompt_tokens}"
            )


class Trace(Sequence[Request]):
    """The requests of a trace, each made when it is asked for: its prompt alone may take as much memory as the rest.

    The last one asked for is kept, since a loop looks at it until it is due.
    """

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        if not arrivals:
            raise ValueError("the trace is empty; it takes at least one request")
        self._arrivals = arrivals
        names = dict.fromkeys(a.prefix for a in arrivals if a.prefix is not None)
        self._prefix_ids = {name: -(i + 1) * ID_SPACE for i, name in enumerate(names)}
        self._last: tuple[int, Request] | None = None

    def __len__(self) -> int:
        return len(self._arrivals)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        if isinstance(index, slice):
            return Trace(self._arrivals[index])
        index = range(len(self))[index]
        if self._last is None or self._last[0] != index:
            self._last = index, self._make(index)
        return self._last[1]

    def _make(self, index: int) -> Request:
        a = self._arrivals[index]
        prompt: list[int] = []
        if a.prefix is not None:
            first = self._prefix_ids[a.prefix]
            prompt += range(first, first + a.prefix_tokens)
        prompt += range(index * ID_SPACE, index * ID_SPACE + a.prompt_tokens - a.prefix_tokens)
        return Request(prompt, a.output_tokens, a.arrival)


def read_trace(path: Path) -> Trace:
    """A trace of one JSON object a line: arrival in seconds, prompt_tokens, output_tokens, and for a prompt that begins
    like others prefix, its name, and prefix_tokens.

    ValueError naming the first line that is not one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the trace {path} cannot be read: {error}") from error
    arrivals = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                arrivals.append(_parse(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not arrivals:
        raise ValueError(f"the trace {path} is empty; it takes at least one request")
    return Trace(arrivals)


def _parse(line: str) -> Arrival:
    try:
        fields: Any = json.loads(line)
    except ValueError:
        raise ValueError(f"{line[:60]!r} is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{line[:60]!r} is not a JSON object")
    if unknown := set(fields) - set(FIELDS):
        raise ValueError(f"the field {min(unknown)!r} is not known; the fields are {', '.join(FIELDS)}")
    if missing := [name for name, needed in FIELDS.items() if needed and name not in fields]:
        raise ValueError(f"the field {missing[0]!r} is missing; the fields are {', '.join(FIELDS)}")
    for name in ("prompt_tokens", "output_tokens", "prefix_tokens"):
        if type(fields.get(name, 0)) is not int:
            raise ValueError(f"{name}={fields[name]!r} must be a whole number")
    if type(fields["arrival"]) not in (int, float):
        raise ValueError(f"arrival={fields['arrival']!r} must be a number of seconds")
    if fields.get("prefix") is not None:
        fields["prefix"] = str(fields["prefix"])
    return Arrival(**fields)


def synthetic_trace(
    num_requests: int,
    rate: float,
    *,
    prompt_mean: float,
    output_mean: float,
    max_model_len: int,
    seed: int = 0,
) -> Trace:
    """Bursts of requests with lognormal lengths, half of the prompts behind one of 64 prefixes of 512 tokens.

    rate: requests/s, on average. Means are those of the whole prompts and outputs, before lengths are clipped to what
    a model of `max_model_len` holds. ValueError if a prefix does not fit, or a figure is out of range.
    """
    if num_requests < 1:
        raise ValueError(f"{num_requests} requests are too few; it takes at least 1")
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate} requests/s is impossible; it must be above 0")
    check_mean(prompt_mean)
    check_mean(output_mean)
    if max_model_len < 2 * PREFIX_TOKENS:
        raise ValueError(
            f"max_model_len={max_model_len} is too short for the trace; it must be at least {2 * PREFIX_TOKENS}"
        )
    rng = random.Random(seed)
    arrivals = []
    for arrival in _bursty(num_requests, rate, rng):
        output = min(_lognormal(output_mean, rng), max_model_len // 2)
        prompt = min(_lognormal(prompt_mean, rng), max_model_len - output)
        shares = rng.random() < PREFIX_SHARE and prompt > PREFIX_TOKENS
        prefix = str(rng.randrange(PREFIXES)) if shares else None
        arrivals.append(Arrival(arrival, prompt, output, prefix, PREFIX_TOKENS if shares else 0))
    return Trace(arrivals)


def _bursty(num_requests: int, rate: float, rng: random.Random) -> Iterator[float]:
    """Arrivals of a Poisson process whose rate changes at the beginning and the end of each burst."""
    burst_s = BURSTS_PER_PERIOD * BURST_PERIOD_S
    quiet_rate = (1 - BURSTS_PER_PERIOD * BURST_RATE) / (1 - BURSTS_PER_PERIOD)
    now = 0.0
    for _ in range(num_requests):
        yield now
        work = rng.expovariate(rate)  # seconds at the mean rate until the next one
        while True:
            phase = now % BURST_PERIOD_S
            speed, end = (BURST_RATE, burst_s) if phase < burst_s else (quiet_rate, BURST_PERIOD_S)
            room = (end - phase) * speed
            if work <= room:
                break
            work -= room
            now += end - phase
        now += work / speed


def _lognormal(mean: float, rng: random.Random) -> int:
    return max(round(rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)), 1)
