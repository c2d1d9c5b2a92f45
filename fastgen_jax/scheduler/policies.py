"""Policies: what a step is filled with, decodes or prompts, and in which order.

`SplitFuse` is the engine's. The others are the ones it is measured against, on the same scheduler, blocks and
preemption: baselines, not recommendations.
"""

from typing import TYPE_CHECKING, Protocol

from fastgen_jax.scheduler.sequence import Step
from fastgen_jax.types import POLICIES

if TYPE_CHECKING:
    from fastgen_jax.scheduler.splitfuse import Scheduler


class Policy(Protocol):
    """Fills a step by calling the scheduler's `plan_decodes`, `plan_begun` and `admit`.

    splits_prompts: whether a prompt's tokens may be computed in several steps.
    """

    name: str
    splits_prompts: bool

    def fill(self, step: Step, scheduler: "Scheduler") -> None: ...


class SplitFuse:
    """Dynamic SplitFuse (arXiv 2401.08671): all decodes, then prompts, split wherever the budget ends."""

    name = "splitfuse"
    splits_prompts = True

    def fill(self, step: Step, scheduler: "Scheduler") -> None:
        begun = scheduler.plan_decodes(step)
        if begun is not None:
            scheduler.plan_begun(begun, step)
        if not step.preempted:
            scheduler.admit(step)


class PrefillFirst:
    """As vLLM 0.2: as long as a waiting prompt fits, whole prompts only, and the decodes wait; else all decodes."""

    name = "prefill_first"
    splits_prompts = False

    def fill(self, step: Step, scheduler: "Scheduler") -> None:
        step.reserve = scheduler.decode_reserve()
        scheduler.admit(step)
        if not step.rows:
            scheduler.plan_decodes(step)


class Orca:
    """Iteration-level batching (Orca, OSDI 2022): all decodes, and whole prompts beside them."""

    name = "orca"
    splits_prompts = False

    def fill(self, step: Step, scheduler: "Scheduler") -> None:
        scheduler.plan_decodes(step)
        if not step.preempted:
            scheduler.admit(step)


_ALL: tuple[Policy, ...] = (SplitFuse(), PrefillFirst(), Orca())


def get_policy(name: str) -> Policy:
    """The policy called `name`, one of `POLICIES`; a ValueError for another."""
    for policy in _ALL:
        if policy.name == name:
            return policy
    raise ValueError(f"policy={name!r} is not known; choose {', '.join(POLICIES)}")
