"""What the contestants run: the cases, their prompts cut from English text, and how outputs are compared."""

import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A batch of requests handed over at once: tokens of each prompt, and tokens to generate for each."""

    name: str
    title: str
    prompt_lengths: tuple[int, ...]
    max_tokens: tuple[int, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


def _equal(name: str, num_prompts: int, prompt_length: int, max_tokens: int) -> Case:
    title = f"{num_prompts} x {prompt_length} + {max_tokens}"
    return Case(name, title, (prompt_length,) * num_prompts, (max_tokens,) * num_prompts)


def _mixed(name: str, num_prompts: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> Case:
    rng = random.Random(name)
    title = f"{num_prompts} x ({prompts[0]} to {prompts[1]}) + ({outputs[0]} to {outputs[1]})"
    lengths = tuple(rng.randint(*prompts) for _ in range(num_prompts))
    return Case(name, title, lengths, tuple(rng.randint(*outputs) for _ in range(num_prompts)))


CASES = {
    case.name: case
    for case in (
        _equal("A", 32, 128, 64),
        _equal("B", 8, 1024, 32),
        _mixed("C", 64, (16, 900), (16, 128)),
        _equal("D", 1, 128, 256),
    )
}


def english() -> str:
    """Half a megabyte of prose about a programming language, which every Python carries."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def prompts(case: Case, text: Sequence[int], repetition: int) -> list[list[int]]:
    """The prompts of a repetition (0 warms up), cut from `text`, token ids; no two begin with the same token.

    So a prefix cache gains nothing. The same arguments give the same prompts. Raises ValueError if the text has
    not enough different tokens, or is no longer than the longest prompt.
    """
    last = len(text) - max(case.prompt_lengths)
    if last < 0 or len(set(text[: last + 1])) < len(case.prompt_lengths):
        raise ValueError(f"a text of {len(text)} tokens is too short or too uniform for case {case.name}")
    rng = random.Random(f"{case.name}{repetition}")
    begun: set[int] = set()
    found = []
    for length in case.prompt_lengths:
        start = rng.randint(0, last)
        while text[start] in begun:
            start = rng.randint(0, last)
        begun.add(text[start])
        found.append(list(text[start : start + length]))
    return found


def check_lengths(case: Case, outputs: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless every output has exactly the tokens asked for."""
    if len(outputs) != len(case.max_tokens):
        raise ValueError(f"{len(outputs)} outputs came for the {len(case.max_tokens)} prompts of case {case.name}")
    for i, (output, wanted) in enumerate(zip(outputs, case.max_tokens, strict=True)):
        if len(output) != wanted:
            raise ValueError(f"output {i} of case {case.name} has {len(output)} tokens, not {wanted}")


def differing(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[int, int]:
    """Index of each output that is not the expected one -> where it first differs."""
    return {
        i: next(at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        for i, (found, wanted) in enumerate(zip(outputs, expected, strict=True))
        if list(found) != list(wanted)
    }
