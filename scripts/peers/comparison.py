"""The comparison itself: who runs what when, and whether the tokens are right."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peers import workload
from peers.process import CONTESTANTS, Answer, Process, Unavailable, cores
from peers.report import Result
from peers.workload import CASES, Case

REFERENCE = "hf_generate"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Plan:
    """What to compare, checked."""

    dtypes: tuple[str, ...]
    cases: tuple[str, ...]
    contestants: tuple[str, ...]
    repeats: int
    threads: int

    def __post_init__(self) -> None:
        valid = {"dtype": DTYPES, "case": tuple(CASES), "contestant": tuple(CONTESTANTS)}
        given = {"dtype": self.dtypes, "case": self.cases, "contestant": self.contestants}
        for what, names in given.items():
            if unknown := [name for name in names if name not in valid[what]]:
                raise ValueError(f"there is no {what} {unknown[0]!r}; choose from {', '.join(valid[what])}")
        if self.repeats < 1:
            raise ValueError(f"{self.repeats} repetitions give no figures; ask for at least 1")
        if not 1 <= self.threads <= len(cores()):
            raise ValueError(f"{self.threads} threads cannot have a core each; choose from 1 to {len(cores())}")


@dataclass
class Comparison:
    """A comparison as far as it has got.

    text: token ids that prompts are cut from. results: by dtype, case and contestant. versions: by contestant.
    notes: what a reader of the results must know.
    """

    plan: Plan
    text: Sequence[int]
    results: dict[tuple[str, str, str], Result] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _expected: dict[str, list[list[int]]] = field(default_factory=dict)

    def run(self, save: Callable[[], None]) -> None:
        """Run everything, and `save` whenever there is more to keep."""
        for dtype in self.plan.dtypes:
            with contextlib.ExitStack() as stack:
                live = self._load(dtype, stack)
                self._warm_up(dtype, live)
                save()
                for repetition in range(1, self.plan.repeats + 1):
                    for name in self.plan.cases:
                        self._repeat(dtype, CASES[name], repetition, live)
                    save()

    def _load(self, dtype: str, stack: contextlib.ExitStack) -> dict[str, Process]:
        live = {}
        for name in self.plan.contestants:
            try:
                live[name] = stack.enter_context(Process(name, dtype, self.plan.threads))
            except Unavailable as error:
                self._note(str(error))
                continue
            say(f"{dtype}: {name} loaded in {live[name].load_seconds:.0f} s")
            self.versions[name] = live[name].versions
        return live

    def _warm_up(self, dtype: str, live: dict[str, Process]) -> None:
        """Run every case once on prompts of its own, and compare the tokens with the reference's."""
        with Process(REFERENCE, "float32", self.plan.threads) as reference:
            for case in (CASES[name] for name in self.plan.cases):
                prompts = workload.prompts(case, self.text, 0)
                if case.name not in self._expected:
                    say(f"case {case.name}: what transformers generates")
                    self._expected[case.name] = reference.run(prompts, list(case.max_tokens)).outputs
                answers = self._turns(live, list(live), dtype, case, prompts)
                if dtype == "float32":
                    self._settle(reference, case, prompts, answers)
                for name, answer in answers.items():
                    self._check(dtype, case, name, answer.outputs)

    def _settle(self, reference: Process, case: Case, prompts: list[list[int]], answers: dict[str, Answer]) -> None:
        """Have the reference run alone whatever is in dispute: its own padding may be what changed the tokens."""
        expected = self._expected[case.name]
        for i in sorted({i for answer in answers.values() for i in workload.differing(answer.outputs, expected)}):
            (expected[i],) = reference.run([prompts[i]], [case.max_tokens[i]]).outputs

    def _check(self, dtype: str, case: Case, name: str, outputs: list[list[int]]) -> None:
        different = workload.differing(outputs, self._expected[case.name])
        num_equal = len(outputs) - len(different)
        self.results[dtype, case.name, name] = Result(dtype, case.name, name, num_equal, len(outputs))
        if dtype == "float32" and different:
            where = ", ".join(f"prompt {i} from token {at} on" for i, at in different.items())
            self._note(f"{name} (float32), case {case.name}: other tokens than transformers for {where}")

    def _repeat(self, dtype: str, case: Case, repetition: int, live: dict[str, Process]) -> None:
        prompts = workload.prompts(case, self.text, repetition)
        for name, answer in self._turns(live, rotated(list(live), repetition), dtype, case, prompts).items():
            self.results[dtype, case.name, name].seconds.append(answer.seconds)

    def _turns(
        self, live: dict[str, Process], names: list[str], dtype: str, case: Case, prompts: list[list[int]]
    ) -> dict[str, Answer]:
        """The answer of each of `names`, in turn; who fails is noted and leaves `live`."""
        answers = {}
        for name in names:
            try:
                answer = live[name].run(prompts, list(case.max_tokens))
                workload.check_lengths(case, answer.outputs)
            except (Unavailable, ValueError) as error:
                self._note(f"{name} ({dtype}) is out from case {case.name} on: {error}")
                live.pop(name).close()
                continue
            say(f"{dtype}, case {case.name}: {name} {answer.seconds:.2f} s")
            answers[name] = answer
            for note in answer.notes:
                if (line := f"{name} ({dtype}): {note}") not in self.notes:
                    self._note(line)
        return answers

    def _note(self, note: str) -> None:
        say(note)
        self.notes.append(note)


def rotated(names: list[str], by: int) -> list[str]:
    """The same names in the same cycle, the one at `by` first."""
    start = by % len(names) if names else 0
    return names[start:] + names[:start]


def say(line: str) -> None:
    """Tell who waits on standard error."""
    print(line, file=sys.stderr, flush=True)
