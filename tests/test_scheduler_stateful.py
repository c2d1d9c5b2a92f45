"""The scheduler under random adds, steps, aborts and priorities, in both loops and mixed.

The device is a fake one that reads and writes KV memory as a real one would: the token it samples is a
hash of the tokens it finds in the sequence's blocks. So a block or a slot given away too early, a chunk
left out or a token lost shows as a text that differs from the one the sequence has when it runs alone.
"""

from collections import Counter, deque
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastgen_jax.scheduler import BlockPool, Scheduler, Sequence, StepPlan

MAX_EXAMPLES, STEPS_PER_EXAMPLE = 500, 50
NUM_TOKENS = 1009
STOP_TOKEN_IDS = frozenset(range(NUM_TOKENS // 12))


def next_token(token_ids: list[int]) -> int:
    return hash(tuple(token_ids)) % NUM_TOKENS


def solo_output(seq: Sequence, max_model_len: int) -> list[int]:
    """What `seq` generates when it runs alone."""
    token_ids, output = list(seq.prompt_token_ids), list[int]()
    while len(output) < seq.max_tokens and len(token_ids) < max_model_len:
        token_ids.append(next_token(token_ids))
        output.append(token_ids[-1])
        if output[-1] in seq.stop_token_ids and len(output) >= seq.min_tokens:
            break
    return output


class FakeDevice:
    """Runs plans in the order they come.

    `kv_pool[block][offset]` and `token_pool[slot][position]` hold token ids.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.kv_pool: dict[int, list[int]] = {}
        self.token_pool: dict[int, dict[int, int]] = {}

    def run(self, plan: StepPlan) -> list[int]:
        for seq, start, num_new_tokens, _ in plan.rows:
            assert seq.slot is not None
            if start == 0:
                self.token_pool[seq.slot] = dict(enumerate(seq.prompt_token_ids + seq.output_token_ids))
            for position in range(start, start + num_new_tokens):
                block, offset = self._address(seq, position)
                self.kv_pool.setdefault(block, [-1] * self.block_size)[offset] = self.token_pool[seq.slot][position]
        return [self._sample(row.seq, row.start + row.num_new_tokens) if row.samples else -1 for row in plan.rows]

    def _sample(self, seq: Sequence, position: int) -> int:
        addresses = (self._address(seq, i) for i in range(position))
        token_id = next_token([self.kv_pool[block][offset] for block, offset in addresses])
        assert seq.slot is not None
        self.token_pool[seq.slot][position] = token_id
        return token_id

    def _address(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size


class SchedulerMachine(RuleBasedStateMachine):
    happened: ClassVar[Counter[str]] = Counter()  # in all examples together

    @initialize(
        num_blocks=st.sampled_from([9, 13, 17, 6, 30, 3]),
        block_size=st.sampled_from([1, 2, 3, 4]),
        budget=st.sampled_from([64, 16, 8, 5, 3, 1]),
        max_num_seqs=st.sampled_from([8, 5, 3, 1]),
        max_model_len=st.sampled_from([60, 30, 10]),
        max_bypass=st.sampled_from([3, 1, 0]),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        max_model_len: int,
        max_bypass: int,
    ) -> None:
        self.budget, self.max_num_seqs = budget, min(max_num_seqs, budget)
        self.max_model_len, self.max_bypass = max_model_len, max_bypass
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            max_bypass=max_bypass,
        )
        self.device = FakeDevice(block_size)
        self.dispatched: deque[tuple[StepPlan, list[int]]] = deque()
        self.live: dict[int, Sequence] = {}
        self.num_added = 0
        self.num_passes: Counter[int] = Counter()

    @rule(
        requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5),
        min_tokens=st.integers(0, 3),
        stops=st.booleans(),
        priority=st.sampled_from([0, 0, 1, -1]),
    )
    def add(self, requests: list[tuple[int, int]], min_tokens: int, stops: bool, priority: int) -> None:
        """Add a sequence for each pair of prompt length and max_tokens."""
        self.happened["rule"] += 1
        stop_token_ids = STOP_TOKEN_IDS if stops else frozenset()
        for num_prompt, max_tokens in requests:
            prompt = [self.num_added, *range(num_prompt - 1)]
            self.add_one(Sequence(self.num_added, prompt, max_tokens, stop_token_ids, min_tokens, priority))

    def add_one(self, seq: Sequence) -> None:
        num_prompt = len(seq.prompt_token_ids)
        num_kv = min(num_prompt + seq.max_tokens, self.max_model_len) - 1
        if num_prompt < self.max_model_len and num_kv <= (self.pool.num_blocks - 1) * self.pool.block_size:
            self.scheduler.add(seq)
            self.live[seq.seq_id] = seq
            self.num_added += 1
        else:
            self.happened["refused"] += 1
            with pytest.raises(ValueError):
                self.scheduler.add(seq)

    @rule()
    def step_plain(self) -> None:
        self.happened["rule"] += 1
        self.step(depth=0)

    @rule()
    def step_overlapped(self) -> None:
        self.happened["rule"] += 1
        self.step(depth=1)

    @rule(times=st.integers(2, 4), depth=st.integers(0, 2))
    def steps(self, times: int, depth: int) -> None:
        self.happened["rule"] += 1
        for _ in range(times):
            self.step(depth)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.happened["rule"] += 1
        seq_id = data.draw(st.sampled_from([*self.live, self.num_added]))
        seq = self.live.pop(seq_id, None)
        assert self.scheduler.abort(seq_id) is seq
        if seq is not None:
            self.happened["aborted"] += 1
            assert (seq.finish_reason, seq.block_table, seq.slot) == ("abort", [], None)
            self.check_text(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def find_stop_string(self, data: st.DataObject) -> None:
        self.happened["rule"] += 1
        seq = self.live.pop(data.draw(st.sampled_from(list(self.live))))
        self.scheduler.finish(seq, "stop")
        self.happened["ended by caller"] += 1
        assert (seq.finish_reason, seq.block_table, seq.slot) == ("stop", [], None)

    def step(self, depth: int) -> None:
        """Schedule and dispatch a step, then bring back all but the `depth` latest steps."""
        waiting = [seq for seq in self.live.values() if seq.slot is None]
        plan = self.scheduler.schedule()
        self.check_plan(plan, waiting)
        self.dispatched.append((plan, self.device.run(plan)))
        while len(self.dispatched) > depth:
            plan, token_ids = self.dispatched.popleft()
            received = [row.seq for row in plan.rows if row.samples and not row.seq.is_finished]
            self.happened["dead row"] += sum(row.seq.finish_reason == "stop" for row in plan.rows)
            assert self.scheduler.update(plan, token_ids) == received
            for seq in received:
                if seq.is_finished:
                    del self.live[seq.seq_id]
                    self.happened[f"ended by {seq.finish_reason}"] += 1
                    assert (seq.block_table, seq.slot) == ([], None)
                    assert seq.output_token_ids == solo_output(seq, self.max_model_len)

    def check_plan(self, plan: StepPlan, waiting: list[Sequence]) -> None:
        """The plan keeps within its limits, does something if it can, and starves nobody."""
        assert plan.num_tokens <= self.budget
        assert len(plan.rows) <= self.max_num_seqs
        assert len({row.seq.seq_id for row in plan.rows}) == len(plan.rows)
        assert all(row.num_new_tokens > 0 and not row.seq.is_finished for row in plan.rows)
        assert not {seq.seq_id for seq in plan.preempted} & {row.seq.seq_id for row in plan.rows}
        if not plan.rows and self.live:
            self.happened["empty plan"] += 1
            assert any(seq.num_in_flight for seq in self.live.values())
        assert all(row.samples for row in plan.rows[:-1])
        self.happened["preempted"] += len(plan.preempted)
        admitted = [row.seq for row in plan.rows if row.start == 0]
        assert not (admitted and plan.preempted)
        for seq in waiting:
            if seq.slot is None:
                num_passes = sum(queue_order(seq) < queue_order(other) for other in admitted)
                self.num_passes[seq.seq_id] += num_passes
                self.happened["passed"] += num_passes
                assert seq.num_bypassed == self.num_passes[seq.seq_id] <= self.max_bypass

    def check_text(self, seq: Sequence) -> None:
        output = solo_output(seq, self.max_model_len)
        assert seq.output_token_ids == output[: len(seq.output_token_ids)]

    @invariant()
    def every_block_has_one_owner(self) -> None:
        blocks = [block for seq in self.live.values() for block in seq.block_table]
        assert len(blocks) == len(set(blocks)) == self.pool.num_used
        assert 0 not in blocks
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks - 1

    @invariant()
    def every_running_sequence_has_a_slot_and_just_the_blocks_it_needs(self) -> None:
        slots = [seq.slot for seq in self.live.values() if seq.slot is not None]
        assert len(slots) == len(set(slots)) == self.scheduler.num_running
        assert set(slots) <= set(range(self.max_num_seqs))
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_work == bool(self.live)
        for seq in self.live.values():
            assert len(seq.block_table) == self.pool.blocks_needed(seq.num_computed_tokens)
            assert (seq.slot is None) == (seq.num_computed_tokens == 0)
            assert seq.num_computed_tokens < seq.num_tokens <= self.max_model_len
            assert seq.num_output_tokens <= seq.max_tokens

    def teardown(self) -> None:
        """Every request ends."""
        for seq in self.live.values():
            self.check_text(seq)
        num_left = sum(seq.max_tokens for seq in self.live.values())
        for _ in range(100 * (num_left + len(self.dispatched))):
            if not self.live:
                break
            self.step(depth=1)
        assert not self.live
        assert self.pool.num_used == 0


def queue_order(seq: Sequence) -> tuple[int, bool, int]:
    """Priority, then those that once ran, then arrival."""
    return -seq.priority, seq.num_preemptions == 0, seq.arrival


@pytest.mark.slow
def test_every_sequence_ends_with_the_text_it_has_alone() -> None:
    happened = SchedulerMachine.happened
    happened.clear()
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=MAX_EXAMPLES,
            stateful_step_count=STEPS_PER_EXAMPLE,
            derandomize=True,
            database=None,
            deadline=None,
        ),
    )
    assert happened["rule"] >= 20_000
    ends = ["ended by stop", "ended by length", "ended by caller", "aborted", "refused"]
    events = ["preempted", "passed", "dead row", "empty plan"]
    assert [event for event in ends + events if happened[event] < 100] == []
