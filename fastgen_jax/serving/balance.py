"""Which replica a request goes to: outstanding tokens, and what its prompt would find in a prefix cache. No I/O."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

CHUNK_TOKENS = 64
"""Prompts are compared in chunks of so many tokens."""

CHARACTERS_PER_TOKEN = 4
"""Of English text, about; a replica counts exactly, and says so when it takes a request in."""

REMEMBERED_CHUNKS = 1 << 16
"""How many chunks a replica is thought to have cached, at most: 4 million tokens."""

USUAL_OUTPUT = 128
"""Tokens that an output is expected to have before any has ended."""

_SMOOTHING = 0.05
"""What the latest output counts in the expectation."""


@dataclass(eq=False)
class Ticket:
    """A request on its way: what it still costs its replica, as far as one can know, in tokens.

    prompt_tokens: left to compute. max_tokens: of output, of each sample; None is no limit.
    """

    prompt_tokens: int
    max_tokens: int | None
    num_samples: int = 1
    num_generated: int = 0

    def outstanding(self, expected_output: int) -> int:
        """A sample that has outlived what was expected is taken to be about to end."""
        expected = expected_output if self.max_tokens is None else min(expected_output, self.max_tokens)
        return self.prompt_tokens + max(expected * self.num_samples - self.num_generated, self.num_samples)


class Load:
    """What one replica has been sent and not yet given back, and which prompts it has seen.

    outstanding: tokens, of prompts not yet computed and of outputs not yet here; each ticket counts as it was when
        `update` last saw it.
    """

    def __init__(self) -> None:
        self.outstanding = 0
        self.expected_output = float(USUAL_OUTPUT)
        self.last_chosen = 0
        self._costs: dict[Ticket, int] = {}
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """How many tickets it has."""
        return len(self._costs)

    def update(self, ticket: Ticket) -> None:
        """Count a ticket that is new or has changed."""
        self.remove(ticket)
        self._costs[ticket] = ticket.outstanding(round(self.expected_output))
        self.outstanding += self._costs[ticket]

    def remove(self, ticket: Ticket) -> None:
        self.outstanding -= self._costs.pop(ticket, 0)

    def ended(self, ticket: Ticket) -> None:
        """A request ended as it should: its length says what to expect of others."""
        length = ticket.num_generated / ticket.num_samples
        self.expected_output += _SMOOTHING * (length - self.expected_output)

    def cached_tokens(self, chunks: Sequence[int]) -> int:
        """How many of a prompt's first tokens this replica has probably computed before."""
        known = itertools.takewhile(lambda chunk: chunk in self._seen, chunks)
        return CHUNK_TOKENS * sum(1 for _ in known)

    def remember(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._seen[chunk] = None
            self._seen.move_to_end(chunk)
        while len(self._seen) > REMEMBERED_CHUNKS:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        """The replica has been restarted: its cache is empty."""
        self._seen.clear()


class Balancer:
    """Chooses the replica that would be done with a request soonest, as far as tokens say.

    The tokens that a replica has outstanding, less those of the prompt that it has cached. So a prompt goes where its
    prefix is unless waiting there costs more than computing it elsewhere. Equals take turns.
    """

    def __init__(self) -> None:
        self._turns = itertools.count(1)

    def choose[Key](self, loads: dict[Key, Load], chunks: Sequence[int]) -> Key:
        """One of `loads`, which may not be empty, for a prompt of these chunks (`prompt_chunks`)."""

        def cost(key: Key) -> tuple[int, int]:
            load = loads[key]
            return load.outstanding - load.cached_tokens(chunks), load.last_chosen

        chosen = min(loads, key=cost)
        loads[chosen].last_chosen = next(self._turns)
        loads[chosen].remember(chunks)
        return chosen


def prompt_chunks(prompt: str | Sequence[int]) -> list[int]:
    """A name for each full chunk of a text or of token ids, which stands for all up to its end."""
    size = CHUNK_TOKENS * CHARACTERS_PER_TOKEN if isinstance(prompt, str) else CHUNK_TOKENS
    return list(_chain(prompt, size))


def _chain(prompt: str | Sequence[int], size: int) -> Iterator[int]:
    name = 0
    for start in range(0, len(prompt) - size + 1, size):
        part = prompt[start : start + size]
        name = hash((name, part if isinstance(part, str) else tuple(part)))
        yield name


def estimated_tokens(prompt: str | Sequence[int]) -> int:
    """How long a prompt is, before a tokenizer has seen it."""
    return 1 + len(prompt) // CHARACTERS_PER_TOKEN if isinstance(prompt, str) else len(prompt)
