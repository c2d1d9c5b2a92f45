"""The scheduler's contract, as literal traces: "A16 B5" is a step of 16 tokens of A and 5 of B."""

from typing import Any

import pytest
from traces import A, B, C, D, E, add, both_loops, make_scheduler, num_free, run, sample, show, step, token, tokens_of

from fastgen_jax.scheduler import StepPlan
from fastgen_jax.scheduler.splitfuse import LOOKAHEAD

# Dynamic SplitFuse


@both_loops
def test_prompts_fill_what_the_decodes_leave_of_the_budget(overlap: bool) -> None:
    scheduler = make_scheduler(budget=16)
    seqs = [add(scheduler, A, 20, 4), add(scheduler, B, 5, 4), add(scheduler, C, 30, 4)]
    trace = ["A16", "A4 B5 C7", "A1 B1 C14", "A1 B1 C9", "A1 B1 C1", "C1", "C1"]
    assert run(scheduler, overlap) == trace
    assert [seq.output_token_ids for seq in seqs] == [tokens_of(seq) for seq in seqs]
    assert [seq.num_output_tokens for seq in seqs] == [4, 4, 4]
    assert num_free(scheduler) == 999


def test_a_plan_says_where_each_row_starts_and_whether_it_samples() -> None:
    scheduler = make_scheduler(budget=16)
    a, b = add(scheduler, A, 20, 4), add(scheduler, B, 14, 4)
    assert scheduler.schedule().rows == [(a, 0, 16, False)]
    assert scheduler.schedule().rows == [(a, 16, 4, True), (b, 0, 12, False)]
    plan = scheduler.schedule()
    assert plan.rows == [(a, 20, 1, True), (b, 12, 2, True)]
    assert plan.num_tokens == 3
    assert (a.num_in_flight, b.num_in_flight) == (2, 1)


def test_update_ignores_unfinished_prompts_and_returns_who_got_a_token() -> None:
    scheduler = make_scheduler(budget=16)
    a, b = add(scheduler, A, 5, 4), add(scheduler, B, 14, 4)
    plan = scheduler.schedule()
    assert show(plan) == "A5 B11"
    assert scheduler.update(plan, [42, 43]) == [a]
    assert (a.output_token_ids, b.output_token_ids) == ([42], [])
    assert (a.num_in_flight, b.num_in_flight) == (0, 0)


def test_update_wants_one_token_per_row() -> None:
    scheduler = make_scheduler()
    add(scheduler, A, 5, 4)
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="2 token ids for 1 rows"):
        scheduler.update(plan, [1, 2])


def test_a_prompt_need_not_fit_the_budget_whole() -> None:
    """FastGen admits a prompt only if all that remains of it fits the step."""
    scheduler = make_scheduler(budget=8)
    add(scheduler, A, 6, 2)
    add(scheduler, B, 15, 1)
    assert run(scheduler) == ["A6 B2", "A1 B7", "B6"]


def test_running_decodes_at_the_cap_leave_begun_prompts_their_tokens() -> None:
    scheduler = make_scheduler(budget=4, seqs=4)
    for seq_id in (A, B, C):
        add(scheduler, seq_id, 1, 9)
    add(scheduler, D, 4, 1)
    assert [step(scheduler) for _ in range(5)] == ["A1 B1 C1 D1"] + ["A1 B1 C1 D1"] * 3 + ["A1 B1 C1"]


def test_no_more_sequences_run_than_the_cap() -> None:
    scheduler = make_scheduler(budget=16, seqs=2)
    for seq_id in (A, B, C):
        add(scheduler, seq_id, 2, 2)
    assert run(scheduler) == ["A2 B2", "A1 B1", "C2", "C1"]


def test_higher_priority_goes_first_then_earlier_arrival() -> None:
    scheduler = make_scheduler(budget=4, seqs=4)
    add(scheduler, A, 3, 1)
    add(scheduler, B, 3, 1, priority=1)
    add(scheduler, C, 3, 1, priority=1)
    assert run(scheduler) == ["B3 C1", "C2 A2", "A1"]


def test_running_sequences_have_slots_of_their_own() -> None:
    scheduler = make_scheduler(budget=16, seqs=3)
    seqs = [add(scheduler, seq_id, 1, 9) for seq_id in (A, B, C, D)]
    step(scheduler)
    assert sorted(seq.slot for seq in seqs[:3] if seq.slot is not None) == [0, 1, 2]
    assert seqs[3].slot is None
    slot = seqs[1].slot
    scheduler.abort(B)
    step(scheduler)
    assert (seqs[1].slot, seqs[3].slot) == (None, slot)


# How sequences end


@both_loops
def test_a_stop_token_ends_a_sequence_and_counts_as_output(overlap: bool) -> None:
    """In the overlapped loop it leaves one dead row, whose sample is dropped."""
    scheduler = make_scheduler()
    a = add(scheduler, A, 3, 9, stop_token_ids=frozenset([token(A, 4)]))
    assert run(scheduler, overlap) == ["A3", "A1"] + ["A1"] * overlap
    assert (a.output_token_ids, a.finish_reason) == ([token(A, 3), token(A, 4)], "stop")
    assert (a.num_output_tokens, a.block_table, a.slot) == (2, [], None)
    assert num_free(scheduler) == 999


@pytest.mark.parametrize(("min_tokens", "reason", "num_output"), [(0, "stop", 2), (2, "stop", 2), (3, "length", 4)])
def test_a_stop_token_counts_from_min_tokens_on(min_tokens: int, reason: str, num_output: int) -> None:
    scheduler = make_scheduler()
    a = add(scheduler, A, 3, 4, stop_token_ids=frozenset([token(A, 4)]), min_tokens=min_tokens)
    run(scheduler)
    assert (a.finish_reason, len(a.output_token_ids)) == (reason, num_output)


def test_a_stop_token_in_last_place_is_a_stop() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, A, 3, 2, stop_token_ids=frozenset([token(A, 4)]))
    run(scheduler)
    assert a.finish_reason == "stop"


@both_loops
def test_nothing_is_scheduled_beyond_max_tokens_or_max_model_len(overlap: bool) -> None:
    scheduler = make_scheduler(length=8)
    a, b = add(scheduler, A, 3, 3), add(scheduler, B, 6, 9)
    assert run(scheduler, overlap) == ["A3 B6", "A1 B1", "A1"]
    assert (a.finish_reason, len(a.output_token_ids)) == ("length", 3)
    assert (b.finish_reason, len(b.output_token_ids)) == ("length", 2)


@both_loops
def test_a_finished_sequence_makes_room_at_once(overlap: bool) -> None:
    """Its blocks serve the very next plan, though the overlapped loop has a dead row under way in them."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, seqs=2)
    a = add(scheduler, A, 8, 5, stop_token_ids=frozenset([token(A, 9)]))  # all three blocks, in the end
    b = add(scheduler, B, 8, 1)
    assert run(scheduler, overlap) == ["A8", "A1"] + ["A1"] * overlap + ["B8"]
    assert (a.finish_reason, b.finish_reason) == ("stop", "length")


def test_finish_ends_a_sequence_for_a_reason_of_the_callers() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, A, 3, 9), add(scheduler, B, 3, 1)
    dispatched = scheduler.schedule()
    scheduler.update(dispatched, sample(dispatched))
    dead = scheduler.schedule()
    scheduler.finish(a, "stop")
    assert (a.finish_reason, a.block_table, a.slot, num_free(scheduler)) == ("stop", [], None, 999)
    assert scheduler.update(dead, sample(dead)) == []
    assert a.output_token_ids == [token(A, 3)]
    assert not scheduler.has_work
    scheduler.finish(b, "stop")  # a stop string in the token that was the last one anyway
    assert b.finish_reason == "stop"


def test_abort_ends_running_and_waiting_sequences_and_knows_no_others() -> None:
    scheduler = make_scheduler(seqs=1)
    a, b = add(scheduler, A, 3, 9), add(scheduler, B, 3, 9)
    dispatched = scheduler.schedule()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.abort(A) is a and scheduler.abort(B) is b
    assert (a.finish_reason, b.finish_reason, num_free(scheduler)) == ("abort", "abort", 999)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.has_work) == (0, 0, False)
    assert scheduler.update(dispatched, sample(dispatched)) == []
    assert scheduler.abort(A) is None and scheduler.abort(C) is None
    add(scheduler, A, 3, 1)  # the id is free again
    assert run(scheduler) == ["A3"]


def test_aborted_sequences_do_not_pile_up_in_the_queue() -> None:
    scheduler = make_scheduler(seqs=1)
    add(scheduler, 0, 3, 9)
    step(scheduler)
    for seq_id in range(1, 2001):
        add(scheduler, seq_id, 3, 9)
        scheduler.abort(seq_id)
    assert len(scheduler._waiting) < 100


# What is refused


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "sentence"),
    [
        (0, 4, "the prompt is empty; it needs at least one token"),
        (4, 0, "max_tokens=0 is out of range; it must be at least 1"),
        (50, 1, "the prompt has 50 tokens; max_model_len=50 allows at most 49"),
        (
            30,
            12,
            "may grow to 42 tokens, which take 11 blocks of 4, but the pool has 10: raise num_blocks to 12, ",
        ),
        (
            49,
            99,
            "may grow to 50 tokens, which take 13 blocks of 4, .* keep prompt \\+ max_tokens within 41$",
        ),
    ],
)
def test_what_can_never_run_is_refused(num_prompt: int, max_tokens: int, sentence: str) -> None:
    """FastGen takes a prompt larger than its pool, and waits for ever."""
    scheduler = make_scheduler(num_blocks=11, block_size=4, length=50)
    with pytest.raises(ValueError, match=sentence):
        add(scheduler, A, num_prompt, max_tokens)
    assert not scheduler.has_work


def test_what_just_fits_runs_to_its_end() -> None:
    """The K/V of the last token is never written: ten blocks of 4 serve 41 tokens."""
    scheduler = make_scheduler(num_blocks=11, block_size=4, length=50)
    a = add(scheduler, A, 30, 11)
    run(scheduler)
    assert (len(a.output_token_ids), a.num_preemptions) == (11, 0)


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, A, 3, 1)
    with pytest.raises(ValueError, match="seq_id=0 is in use"):
        add(scheduler, A, 5, 1)


def test_a_sequence_that_has_ended_is_refused() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, A, 3, 1)
    run(scheduler)
    with pytest.raises(ValueError, match=r"sequence 0 has ended \(length\)"):
        scheduler.add(a)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"seqs": 17}, "max_num_seqs=17 must be between 1 and max_num_batched_tokens=16"),
        ({"seqs": 0}, "max_num_seqs=0 must be between 1 and max_num_batched_tokens=16"),
        ({"bypass": -1}, "max_bypass=-1 is negative"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_scheduler(budget=16, **limits)


# When blocks are short


@both_loops
def test_a_head_that_does_not_fit_beside_the_last_running_request_runs_after_it(overlap: bool) -> None:
    """FastGen raises when its last running request ends while the head of the queue did not fit."""
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    add(scheduler, A, 8, 4)  # three blocks of the four
    add(scheduler, B, 12, 2)
    assert run(scheduler, overlap) == ["A8", "A1", "A1", "A1", "B12", "B1"]


def test_prompts_leave_a_block_free_for_each_decode_that_will_need_one() -> None:
    """FastGen keeps none, and then has nobody who could go on."""
    for a_tokens, trace in ((5, "A1"), (4, "A1 B8")):  # A's fifth position needs a block of its own, or not
        scheduler = make_scheduler(num_blocks=4, block_size=4)
        add(scheduler, A, 1, a_tokens)
        assert step(scheduler) == "A1"
        add(scheduler, B, 8, 1)
        assert step(scheduler) == trace


def test_decodes_may_use_the_reserve() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    a = add(scheduler, A, 4, 5)
    add(scheduler, B, 4, 1)
    assert run(scheduler) == ["A4", "A1", "A1", "A1", "A1", "B4"]
    assert a.num_preemptions == 0


def test_a_begun_prompt_takes_the_blocks_there_are_or_waits() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, budget=8, seqs=4)
    add(scheduler, A, 4, 9)  # grows to three blocks
    b = add(scheduler, B, 20, 1)
    assert [step(scheduler) for _ in range(3)] == ["A4 B4", "A1 B7", "A1 B1"]
    assert (len(b.block_table), num_free(scheduler)) == (3, 1)
    assert run(scheduler) == ["A1"] * 6 + ["B8"]


@pytest.mark.parametrize(("a_priority", "b_priority", "victim"), [(0, 0, B), (1, 0, B), (0, 1, A)])
def test_a_decode_without_a_block_preempts_the_lowest_priority_then_the_latest(
    a_priority: int, b_priority: int, victim: int
) -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    seqs = [
        add(scheduler, A, 2, 7, priority=a_priority),
        add(scheduler, B, 2, 7, priority=b_priority),
    ]
    for _ in range(3):
        step(scheduler)
    plan = scheduler.schedule()
    assert plan.preempted == [seqs[victim]]
    assert plan.rows == [(seqs[1 - victim], 4, 1, True)]
    lost = seqs[victim]
    assert (lost.num_computed_tokens, lost.block_table, lost.slot) == (0, [], None)
    assert (lost.num_preemptions, lost.num_in_flight, lost.output_token_ids) == (1, 0, tokens_of(lost))


def test_a_decode_may_have_to_preempt_itself() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2)
    a, b = add(scheduler, A, 3, 6), add(scheduler, B, 2, 8)
    assert [step(scheduler) for _ in range(3)] == ["A3 B2", "A1 B1", "A1 B1"]
    plan = scheduler.schedule()
    assert (plan.rows, plan.preempted) == ([(a, 5, 1, True)], [b])
    assert num_free(scheduler) == 2


@both_loops
def test_preemption_keeps_text_and_counts_and_is_invisible(overlap: bool) -> None:
    """FastGen forgets the text of a request that it preempts."""
    scheduler = make_scheduler(num_blocks=6, block_size=2)
    a, b = add(scheduler, A, 2, 9), add(scheduler, B, 2, 6)
    run(scheduler, overlap)
    assert b.num_preemptions > 0
    assert (len(a.prompt_token_ids), len(b.prompt_token_ids)) == (2, 2)
    assert (a.output_token_ids, b.output_token_ids) == (tokens_of(a), tokens_of(b))
    assert (len(a.output_token_ids), len(b.output_token_ids)) == (9, 6)
    assert num_free(scheduler) == 5


def test_a_preempted_sequence_waits_in_front_of_those_of_its_priority() -> None:
    """C has passed B, which does not fit beside A; it stays in front of it when it has to make way for A.

    D would fit into the fourth step, but that one preempted.
    """
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, A, 2, 5)
    add(scheduler, B, 6, 1)
    c = add(scheduler, C, 2, 4)
    assert [step(scheduler) for _ in range(3)] == ["A2 C2", "A1 C1", "A1 C1"]
    add(scheduler, D, 1, 1, priority=1)
    assert run(scheduler) == ["A1", "A1 D1", "C5", "B6"]
    assert (c.num_preemptions, c.output_token_ids) == (1, tokens_of(c))


@pytest.mark.parametrize("stops", [False, True])
def test_a_preempted_sequence_first_gets_the_token_it_has_in_flight(stops: bool) -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, A, 2, 7)
    b = add(scheduler, B, 2, 7, stop_token_ids=frozenset([token(B, 4)] if stops else []))
    for _ in range(2):
        step(scheduler)
    dispatched = scheduler.schedule()
    assert show(dispatched) == "A1 B1"
    assert scheduler.schedule().preempted == [b]
    assert (b.num_in_flight, b.num_computed_tokens) == (1, 0)
    scheduler.abort(A)
    assert scheduler.schedule().rows == []  # though all blocks are free
    assert scheduler.update(dispatched, sample(dispatched)) == [b]
    assert b.output_token_ids == tokens_of(b)
    assert len(b.output_token_ids) == 3
    assert scheduler.schedule().rows == ([] if stops else [(b, 0, 5, True)])
    assert scheduler.has_work is not stops


def test_a_plan_is_empty_while_all_that_runs_waits_for_its_last_token() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    add(scheduler, A, 2, 1)
    add(scheduler, B, 4, 1)
    dispatched = scheduler.schedule()
    assert scheduler.schedule() == StepPlan([])
    scheduler.update(dispatched, sample(dispatched))
    assert run(scheduler) == ["B4"]


# Who may pass whom


def test_sequences_that_fit_pass_a_blocked_head_but_only_so_often() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, budget=32, bypass=2)
    add(scheduler, A, 12, 9)
    b = add(scheduler, B, 12, 1)  # three blocks, and A leaves two
    for seq_id in (C, D, E):
        add(scheduler, seq_id, 4, 1)
    assert run(scheduler) == ["A12 C4 D4"] + ["A1"] * 8 + ["B12 E4"]
    assert b.num_bypassed == 2


def test_every_sequence_that_is_passed_counts_it() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, budget=32, bypass=2)
    add(scheduler, A, 12, 9)
    b = add(scheduler, B, 12, 1)
    add(scheduler, C, 4, 1)
    d = add(scheduler, D, 12, 1)
    add(scheduler, E, 4, 1)
    assert step(scheduler) == "A12 C4 E4"
    assert (b.num_bypassed, d.num_bypassed) == (2, 1)


def test_without_bypass_the_queue_is_strict() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, budget=32, bypass=0)
    add(scheduler, A, 12, 2)
    add(scheduler, B, 24, 1)
    add(scheduler, C, 4, 1)
    assert run(scheduler) == ["A12", "A1", "B24", "C4"]


@pytest.mark.parametrize(("num_blocked", "passes"), [(LOOKAHEAD, True), (LOOKAHEAD + 1, False)])
def test_a_step_looks_only_so_far_down_the_queue(num_blocked: int, passes: bool) -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4, budget=32)
    add(scheduler, A, 12, 9)
    for seq_id in range(1, 1 + num_blocked):
        add(scheduler, seq_id, 12, 1)
    small = add(scheduler, 100, 4, 1)
    step(scheduler)
    assert bool(small.output_token_ids) is passes
