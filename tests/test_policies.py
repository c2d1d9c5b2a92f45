"""The policies as literal traces: "A16 B5" is a step of 16 tokens of A and 5 of B."""

from typing import Any

import pytest
from tiny import tiny_engine
from traces import A, B, C, D, add, both_loops, make_scheduler, num_free, run, sample, show, step, tokens_of

from fastgen_jax import EngineConfig, SamplingParams
from fastgen_jax.scheduler.policies import get_policy
from fastgen_jax.types import POLICIES

SAME_WORK = {
    "splitfuse": ["A9 B3", "A1 B5 C6", "A1 B1 C4", "B1 C1", "C1"],
    "prefill_first": ["A9", "B8", "C10", "A1 B1 C1", "A1 B1 C1"],
    "orca": ["A9", "A1 B8", "A1 B1 C10", "B1 C1", "C1"],
}
baselines = pytest.mark.parametrize("policy", [name for name in POLICIES if name != "splitfuse"])


def test_every_name_has_its_policy() -> None:
    assert [get_policy(name).name for name in POLICIES] == list(SAME_WORK)


@both_loops
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_work_under_each_policy(policy: str, overlap: bool) -> None:
    """Prompts of 9, 8 and 10 tokens for three tokens each, 12 a step."""
    scheduler = make_scheduler(budget=12, policy=policy)
    seqs = [add(scheduler, seq_id, length, 3) for seq_id, length in ((A, 9), (B, 8), (C, 10))]
    assert run(scheduler, overlap) == SAME_WORK[policy]
    assert [seq.output_token_ids for seq in seqs] == [tokens_of(seq) for seq in seqs]
    assert num_free(scheduler) == 999


@pytest.mark.parametrize(("policy", "trace"), [("prefill_first", ["B4 C4", "A1 B1 C1"]), ("orca", ["A1 B4 C4"])])
def test_prompts_share_a_step_with_decodes_or_only_with_each_other(policy: str, trace: list[str]) -> None:
    scheduler = make_scheduler(budget=12, policy=policy)
    add(scheduler, A, 4, 9)
    assert step(scheduler) == "A4"
    add(scheduler, B, 4, 9)
    add(scheduler, C, 4, 9)
    assert [step(scheduler) for _ in trace] == trace


@baselines
def test_nobody_passes_a_whole_prompt_that_does_not_fit(policy: str) -> None:
    """C would fit beside A, by tokens and by blocks; but the queue is strict."""
    scheduler = make_scheduler(budget=12, policy=policy)
    add(scheduler, A, 4, 2)
    add(scheduler, B, 9, 1)
    c = add(scheduler, C, 2, 1)
    assert step(scheduler) == "A4"
    assert c.slot is None and c.num_bypassed == 0


@baselines
def test_decodes_go_on_while_no_prompt_fits(policy: str) -> None:
    """B's three blocks are there when A has ended; one of the two left beside A is kept for it."""
    scheduler = make_scheduler(num_blocks=5, block_size=4, policy=policy)
    add(scheduler, A, 4, 6)
    add(scheduler, B, 9, 1)
    assert run(scheduler) == ["A4", "A1", "A1", "A1", "A1", "A1", "B9"]


@baselines
def test_no_more_sequences_run_than_the_cap(policy: str) -> None:
    scheduler = make_scheduler(budget=12, seqs=2, policy=policy)
    for seq_id in (A, B, C):
        add(scheduler, seq_id, 2, 2)
    assert run(scheduler) == ["A2 B2", "A1 B1", "C2", "C1"]


@both_loops
@baselines
def test_a_preempted_sequence_is_computed_whole(policy: str, overlap: bool) -> None:
    """In the overlapped loop C must not be admitted for a token that it still has in flight."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, policy=policy)
    a, b = add(scheduler, A, 2, 9), add(scheduler, B, 2, 6)
    trace = run(scheduler, overlap)
    assert b.num_preemptions > 0
    assert "B5" in trace
    assert (a.output_token_ids, b.output_token_ids) == (tokens_of(a), tokens_of(b))
    assert num_free(scheduler) == 5


@baselines
def test_what_may_not_fit_a_step_whole_is_refused(policy: str) -> None:
    """Of 8 + 6 tokens, the last one is never computed."""
    scheduler = make_scheduler(budget=12, policy=policy)
    sentence = (
        f"may grow to 14 tokens, all but the last of which policy='{policy}' must be able to compute in one step: "
        "raise max_num_batched_tokens=12 to 13, or use policy='splitfuse'"
    )
    with pytest.raises(ValueError, match=sentence):
        add(scheduler, A, 8, 6)
    assert not scheduler.has_work
    add(scheduler, A, 8, 5)


@baselines
def test_a_prompt_may_be_longer_than_the_rest_of_the_budget_by_what_is_cached(policy: str) -> None:
    scheduler = make_scheduler(budget=16, policy=policy, caching=True)
    add(scheduler, A, 9, 1)
    assert run(scheduler) == ["A9"]
    add(scheduler, D, 1, 1, prompt=[1])
    add(scheduler, B, 16, 1)
    assert run(scheduler) == ["D1 B8"]


def test_an_unknown_policy_is_refused() -> None:
    sentence = "policy='fifo' is not known; choose splitfuse, prefill_first, orca"
    with pytest.raises(ValueError, match=sentence):
        make_scheduler(policy="fifo")
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(policy="fifo")


def test_prefill_first_lets_the_decodes_wait_for_as_long_as_prompts_come() -> None:
    """What SplitFuse is there to end."""
    scheduler = make_scheduler(budget=12, policy="prefill_first")
    add(scheduler, A, 4, 9)
    add(scheduler, B, 9, 1)
    trace = []
    for seq_id in range(C, C + 4):
        plan = scheduler.schedule()
        add(scheduler, seq_id, 9, 1)
        scheduler.update(plan, sample(plan))
        trace.append(show(plan))
    assert trace == ["A4", "B9", "C9", "D9"]


PROMPTS = [[3 + (7 * i + j * j) % 120 for j in range(length)] for i, length in enumerate((20, 3, 25, 11, 24, 1))]
SIZES: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 4, "num_blocks": 17}


@pytest.mark.parametrize("overlap", [False, True])
def test_both_loops_give_the_same_tokens_under_every_policy(overlap: bool) -> None:
    found = {policy: tiny_engine(policy=policy, overlap=overlap, **SIZES) for policy in POLICIES}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    tokens = {policy: [r.token_ids for r in engine.generate(PROMPTS, params)] for policy, engine in found.items()}
    alone = tiny_engine(prefix_caching=False, overlap=False, **SIZES)
    expected = [alone.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    assert tokens == dict.fromkeys(POLICIES, expected)
    assert all(engine.stats().free_blocks == 16 for engine in found.values())
