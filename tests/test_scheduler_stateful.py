"""The scheduler under random adds, steps, aborts, failures and priorities, in both loops and mixed.

The device is a fake one that reads and writes KV memory as a real one would. What it writes for a token says which
tokens came before it, and what it samples follows from the K/V that it finds in the sequence's blocks. So a block
or a slot given away too early, shared with a sequence that begins otherwise, or found before it is filled, a chunk
left out or a token lost shows as a text that differs from the one the sequence has when it runs alone.
"""

from collections import Counter, deque
from typing import ClassVar, NamedTuple

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
from fastgen_jax.scheduler.blocks import NULL_BLOCK
from fastgen_jax.types import POLICIES

MAX_EXAMPLES, STEPS_PER_EXAMPLE = 500, 50
PROMPT_LENGTHS = st.one_of(st.sampled_from([9, 6, 13]), st.integers(1, 20))
NUM_TOKENS = 1009
STOP_TOKEN_IDS = frozenset(range(NUM_TOKENS // 12))


class KV(NamedTuple):
    """What the memory of a token holds: the token, a hash of all up to it, and the weights that computed it."""

    token_id: int
    context: int
    version: int


def extend(context: int, token_id: int) -> int:
    return hash((context, token_id))


def next_token(salt: int, token_ids: list[int]) -> int:
    context = salt
    for token_id in token_ids:
        context = extend(context, token_id)
    return context % NUM_TOKENS


def solo_output(seq: Sequence, max_model_len: int) -> list[int]:
    """What `seq` generates when it runs alone."""
    token_ids, output = list(seq.prompt_token_ids), list[int]()
    while len(output) < seq.max_tokens and len(token_ids) < max_model_len:
        token_ids.append(next_token(seq.cache_salt, token_ids))
        output.append(token_ids[-1])
        if output[-1] in seq.stop_token_ids and len(output) >= seq.min_tokens:
            break
    return output


class FakeDevice:
    """Runs plans in the order they come. Of a plan, all rows' K/V are written before any sample reads.

    `kv_pool[block][offset]` is a token's K/V, and `token_pool[slot][position]` its id. window: how many tokens one
    sees, itself included; None is all, and of 1 the K/V would not say what came before.
    """

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size, self.window = block_size, window
        self.version = 0
        self.reset()

    def reset(self) -> None:
        self.kv_pool: dict[int, dict[int, KV]] = {}
        self.token_pool: dict[int, dict[int, int]] = {}

    def run(self, plan: StepPlan) -> list[int]:
        for row in plan.rows:
            self._write(*row)
        return [self._sample(*row) for row in plan.rows]

    def _write(self, seq: Sequence, start: int, num_new_tokens: int, samples: bool) -> None:
        assert seq.slot is not None
        token_pool, stop = self.token_pool.setdefault(seq.slot, {}), start + num_new_tokens
        known = seq.token_ids(start, stop)
        token_pool.update(zip(range(start, stop), known, strict=False))
        context = self._kv(seq, start - 1).context if start else seq.cache_salt
        for position in range(start, stop):
            token_id = token_pool[position]
            context = extend(context, token_id)
            block, offset = self._address(seq, position)
            self.kv_pool.setdefault(block, {})[offset] = KV(token_id, context, self.version)

    def _sample(self, seq: Sequence, start: int, num_new_tokens: int, samples: bool) -> int:
        """The next token, by all that the row attends to: every position's K/V must be the sequence's own.

        Of what lies before the first that the row sees, the K/V of that one speak.
        """
        stop = start + num_new_tokens
        first = 0 if self.window is None else max(0, start - self.window + 1)
        known = seq.token_ids(0, stop)
        context = seq.cache_salt
        for token_id in known[:first]:
            context = extend(context, token_id)
        if len(known) < first:
            context = self._kv(seq, first - 1).context if self._is_there(seq, first - 1) else None
        for position in range(first, stop):
            kv = self._kv(seq, position)
            context = kv.context if context is None else extend(context, kv.token_id)
            assert kv.context == context
            assert position >= len(known) or kv.token_id == known[position]
        assert context is not None and seq.slot is not None
        token_id = context % NUM_TOKENS if samples else -1
        self.token_pool[seq.slot][stop] = token_id
        return token_id

    def _is_there(self, seq: Sequence, position: int) -> bool:
        return seq.block_table[position // self.block_size] != NULL_BLOCK

    def _kv(self, seq: Sequence, position: int) -> KV:
        block, offset = self._address(seq, position)
        assert block != NULL_BLOCK
        return self.kv_pool[block][offset]

    def _address(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size

    def oldest(self, seq: Sequence) -> int:
        """The version of the oldest K/V that a running sequence holds."""
        first = seq.num_past_blocks * self.block_size
        return min(self._kv(seq, position).version for position in range(first, seq.num_computed_tokens))


class SchedulerMachine(RuleBasedStateMachine):
    happened: ClassVar[Counter[str]] = Counter()  # in all examples together

    @initialize(
        num_blocks=st.sampled_from([9, 13, 17, 6, 30, 3]),
        block_size=st.sampled_from([1, 2, 3, 4]),
        budget=st.sampled_from([64, 16, 8, 5, 3, 1]),
        max_num_seqs=st.sampled_from([8, 5, 3, 1]),
        max_model_len=st.sampled_from([60, 30, 10]),
        max_bypass=st.sampled_from([3, 1, 0]),
        policy=st.sampled_from([*POLICIES[:1] * 3, *POLICIES]),
        caching=st.sampled_from([True, True, True, False]),
        window=st.sampled_from([None, None, 5, 3, 2, 9]),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        max_model_len: int,
        max_bypass: int,
        policy: str,
        caching: bool,
        window: int | None,
    ) -> None:
        self.policy, self.window = policy, window
        self.budget, self.max_num_seqs = budget, min(max_num_seqs, budget)
        self.max_model_len, self.max_bypass = max_model_len, max_bypass
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            max_bypass=max_bypass,
            policy=policy,
            prefix_caching=caching,
            window=window,
        )
        self.device = FakeDevice(block_size, window)
        self.dispatched: deque[tuple[StepPlan, list[int]]] = deque()
        self.live: dict[int, Sequence] = {}
        self.num_added = 0
        self.num_passes: Counter[int] = Counter()
        self.version_at_start: dict[int, int] = {}
        self.added: list[Sequence] = []
        self.num_learned: Counter[int] = Counter()
        self.contents: dict[bytes, list[int]] = {}  # by key: the context at each of the block's tokens
        self.found_before: dict[bytes, int] = {}

    @rule(
        requests=st.lists(st.tuples(PROMPT_LENGTHS, st.integers(1, 20)), min_size=1, max_size=5),
        min_tokens=st.integers(0, 3),
        stops=st.booleans(),
        priority=st.sampled_from([0, 0, 1, -1]),
        num_common=st.sampled_from([20, 20, 20, 8, 3, 0]),
        salt=st.sampled_from([0, 0, 0, 0, 1]),
        max_cached=st.sampled_from([20, 20, 20, 20, 5, 0]),
    )
    def add(
        self,
        requests: list[tuple[int, int]],
        min_tokens: int,
        stops: bool,
        priority: int,
        num_common: int,
        salt: int,
        max_cached: int,
    ) -> None:
        """Add a sequence for each pair of prompt length and max_tokens.

        The first `num_common` tokens are those of all other prompts, the rest its own.
        """
        self.happened["rule"] += 1
        stop_token_ids = STOP_TOKEN_IDS if stops else frozenset()
        for num_prompt, max_tokens in requests:
            prompt = [i if i < num_common else 100 + self.num_added for i in range(num_prompt)]
            seq = Sequence(self.num_added, prompt, max_tokens, stop_token_ids, min_tokens, priority)
            seq.cache_salt, seq.max_cached_tokens = salt, max_cached
            self.add_one(seq)

    @rule(count=st.integers(2, 4), num_common=st.integers(4, 9), max_tokens=st.integers(1, 12))
    def add_alike(self, count: int, num_common: int, max_tokens: int) -> None:
        """Add sequences that differ from each other, and from all others, in their last prompt token."""
        self.happened["rule"] += 1
        for _ in range(count):
            self.add_one(Sequence(self.num_added, [*range(num_common), 100 + self.num_added], max_tokens))

    def add_one(self, seq: Sequence) -> None:
        num_prompt = len(seq.prompt_token_ids)
        num_kv = min(num_prompt + seq.max_tokens, self.max_model_len) - 1
        num_blocks, block_size = self.pool.num_blocks - 1, self.pool.block_size
        room = num_blocks * block_size
        if self.policy != "splitfuse":
            room = min(room, self.budget)
        elif self.window is not None and num_blocks >= -(-(self.window - 1) // block_size) + 1:
            room = self.max_model_len
        if num_prompt < self.max_model_len and num_kv <= room:
            self.scheduler.add(seq)
            self.live[seq.seq_id] = seq
            self.added.append(seq)
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

    @rule()
    def new_weights(self) -> None:
        self.happened["rule"] += 1
        self.device.version += 1
        self.scheduler.forget_cache()

    @precondition(lambda self: self.live)
    @rule(resets=st.booleans(), happens=st.sampled_from([False] * 3 + [True]))
    def fail(self, resets: bool, happens: bool) -> None:
        """A step that is planned and does not run, and the end of all that did. Rare, for it ends every story."""
        self.happened["rule"] += 1
        if not happens:
            return
        self.happened["failed"] += bool(self.scheduler.schedule().rows)
        self.scheduler.forget_cache()
        for seq in self.live.values():
            self.scheduler.finish(seq, "abort")
        self.live.clear()
        self.dispatched.clear()
        if resets:
            self.device.reset()

    def step(self, depth: int) -> None:
        """Schedule and dispatch a step, then bring back all but the `depth` latest steps."""
        waiting = [seq for seq in self.live.values() if seq.slot is None]
        plan = self.scheduler.schedule()
        self.check_plan(plan, waiting)
        self.dispatched.append((plan, self.device.run(plan)))
        self.check_versions()
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
        assert self.policy == "splitfuse" or all(row.samples for row in plan.rows)
        admitted = [row.seq for row in plan.rows if row.seq in waiting]
        self.check_found(plan, admitted)
        assert not (admitted and plan.preempted)
        for seq in waiting:
            if seq.slot is None:
                num_passes = sum(queue_order(seq) < queue_order(other) for other in admitted)
                self.num_passes[seq.seq_id] += num_passes
                self.happened["passed"] += num_passes
                assert seq.num_bypassed == self.num_passes[seq.seq_id] <= self.max_bypass

    def check_found(self, plan: StepPlan, admitted: list[Sequence]) -> None:
        """No more is taken from the cache than may be; some of it was put there by a row of the same step."""
        filled: set[int] = set()
        for seq, start, num_new_tokens, _ in plan.rows:
            found = seq.block_table[: start // self.pool.block_size]
            self.happened["slid past"] += bool(seq.num_past_blocks)
            if seq in admitted:
                self.happened["found the end only"] += bool(seq.num_past_blocks)
                self.version_at_start[seq.seq_id] = self.device.version
                assert start == len(found) * self.pool.block_size <= seq.max_cached_tokens
                assert start == 0 or self.scheduler._cache._enabled
                self.happened["found"] += bool(found)
                self.happened["found in the same step"] += not filled.isdisjoint(found)
                self.happened["found again"] += bool(found and seq.num_preemptions)
            else:
                assert seq.seq_id in self.version_at_start
            filled.update(seq.block_table[len(found) :] if num_new_tokens > 1 else ())

    def check_versions(self) -> None:
        """No sequence has found K/V of weights that were replaced before it began."""
        for seq in self.live.values():
            if seq.slot is not None:
                assert self.device.oldest(seq) >= self.version_at_start[seq.seq_id]

    def check_text(self, seq: Sequence) -> None:
        output = solo_output(seq, self.max_model_len)
        assert seq.output_token_ids == output[: len(seq.output_token_ids)]

    @invariant()
    def reference_counts_are_what_the_tables_say(self) -> None:
        holders = Counter(block for seq in self.live.values() for block in seq.blocks)
        assert holders == Counter({b: n for b, n in enumerate(self.pool._refcounts) if n})
        free = [*self.pool._empty, *self.pool._cached]
        assert sorted([*free, *holders]) == list(range(1, self.pool.num_blocks))  # each one free or used, none both
        assert (self.pool.num_free, self.pool.num_used) == (len(free), len(holders))
        self.happened["shared"] += any(n > 1 for n in holders.values())

    def learn_keys(self, seq: Sequence) -> None:
        """Note what the keys that `seq` has got since the last time mean; a key means but one thing."""
        block_size = self.pool.block_size
        for i in range(self.num_learned[seq.seq_id], len(seq.block_keys)):
            context = self.contents[seq.block_keys[i - 1]][-1] if i else seq.cache_salt
            contexts = []
            for token_id in seq.token_ids(i * block_size, (i + 1) * block_size):
                contexts.append(context := extend(context, token_id))
            assert self.contents.setdefault(seq.block_keys[i], contexts) == contexts
            assert len(contexts) == block_size
        self.num_learned[seq.seq_id] = len(seq.block_keys)

    @invariant()
    def blocks_hold_what_their_keys_say(self) -> None:
        pool, block_size = self.pool, self.pool.block_size
        for seq in self.added:
            self.learn_keys(seq)
        assert {key: block for block, key in enumerate(pool._keys) if key is not None} == pool._blocks
        assert set(pool._cached) <= set(pool._blocks.values())
        assert set(pool._empty).isdisjoint(pool._blocks.values())
        for key, block in pool._blocks.items():
            held = self.device.kv_pool[block]
            assert [held[offset].context for offset in range(block_size)] == self.contents[key]
        self.happened["evicted"] += any(pool._blocks.get(key) != block for key, block in self.found_before.items())
        self.found_before = dict(pool._blocks)

    @invariant()
    def every_running_sequence_has_a_slot_and_just_the_blocks_it_needs(self) -> None:
        slots = [seq.slot for seq in self.live.values() if seq.slot is not None]
        assert len(slots) == len(set(slots)) == self.scheduler.num_running
        assert set(slots) <= set(range(self.max_num_seqs))
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_work == bool(self.live)
        for seq in self.live.values():
            assert len(seq.block_table) == self.pool.blocks_needed(seq.num_computed_tokens)
            assert seq.block_table[: seq.num_past_blocks] == [NULL_BLOCK] * seq.num_past_blocks
            self.happened["outgrew the pool"] += len(seq.block_table) >= self.pool.num_blocks
            if self.window is None or self.policy != "splitfuse":
                assert seq.num_past_blocks == 0
            else:
                assert len(seq.blocks) <= -(-(self.window + self.budget - 2) // self.pool.block_size) + 1
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
    events = ["preempted", "passed", "dead row", "empty plan", "failed"]
    events += ["shared", "found", "found in the same step", "found again", "evicted"]
    events += ["slid past", "found the end only", "outgrew the pool"]
    # Hypothesis draws on constants of whatever modules are loaded, so the counts differ with what ran before.
    assert {event: happened[event] for event in ends + events if happened[event] < 20} == {}
