"""The scheduler in short: add prompts, run it, write down its steps: "A16 B5" is one of 16 tokens of A and 5 of B."""

import pytest

from fastgen_jax.scheduler import BlockPool, Scheduler, Sequence, StepPlan

A, B, C, D, E = range(5)
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


def make_scheduler(
    num_blocks: int = 1000,
    block_size: int = 4,
    budget: int = 16,
    seqs: int = 8,
    length: int = 500,
    bypass: int = 16,
    policy: str = "splitfuse",
    caching: bool = False,
    window: int | None = None,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        max_model_len=length,
        max_bypass=bypass,
        policy=policy,
        prefix_caching=caching,
        window=window,
    )


def add(
    scheduler: Scheduler,
    seq_id: int,
    num_prompt: int,
    max_tokens: int,
    prompt: list[int] | None = None,
    **fields: object,
) -> Sequence:
    """Prompts are all alike unless given."""
    seq = Sequence(seq_id, prompt or [7] * num_prompt, max_tokens, **fields)  # type: ignore[arg-type]
    scheduler.add(seq)
    return seq


def token(seq_id: int, position: int) -> int:
    """What the model says comes at `position`: a sequence's text does not depend on the steps it came in."""
    return 1000 * seq_id + position


def sample(plan: StepPlan) -> list[int]:
    """One token per row; noise where the row does not sample."""
    return [token(row.seq.seq_id, row.start + row.num_new_tokens) if row.samples else -1 for row in plan.rows]


def show(plan: StepPlan) -> str:
    return " ".join(f"{chr(ord('A') + row.seq.seq_id)}{row.num_new_tokens}" for row in plan.rows)


def step(scheduler: Scheduler) -> str:
    plan = scheduler.schedule()
    scheduler.update(plan, sample(plan))
    return show(plan)


def run(scheduler: Scheduler, overlap: bool = False) -> list[str]:
    """Run until all have ended; every step's trace."""
    trace, dispatched = [], StepPlan([])
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan.rows or dispatched.rows, "stuck"
        trace += [show(plan)] if plan.rows else []
        if overlap:
            dispatched, plan = plan, dispatched
        scheduler.update(plan, sample(plan))
    return trace


def num_free(scheduler: Scheduler) -> int:
    return scheduler.block_pool.num_free


def tokens_of(seq: Sequence) -> list[int]:
    """The output that `seq` should have, as long as it is."""
    start = len(seq.prompt_token_ids)
    return [token(seq.seq_id, start + i) for i in range(len(seq.output_token_ids))]
