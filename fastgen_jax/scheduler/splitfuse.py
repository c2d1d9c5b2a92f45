"""`Scheduler`: which tokens of which sequences each step computes (Dynamic SplitFuse, arXiv 2401.08671)."""

from bisect import bisect_left, insort
from collections.abc import Collection

from fastgen_jax.scheduler.blocks import BlockPool
from fastgen_jax.scheduler.limits import Limits
from fastgen_jax.scheduler.policies import get_policy
from fastgen_jax.scheduler.prefix_cache import PrefixCache
from fastgen_jax.scheduler.sequence import Row, Sequence, Step, StepPlan, rank
from fastgen_jax.scheduler.waiting import WaitingQueue
from fastgen_jax.scheduler.window import Window
from fastgen_jax.types import FinishReason

LOOKAHEAD = 8  # sequences behind a blocked one that a step looks at: its cost may not grow with the queue


class Scheduler:
    """Fills each step to its token budget: decodes first, then prompts already begun, then new ones.

    Two loops use it alike. Plain: `plan = schedule()`, run it, `update(plan, token_ids)`. Overlapped:
    `schedule` and dispatch step n + 1 before `update` of step n; `schedule` counts what it has planned as
    done, and the device runs steps in order. So a sequence found ended leaves one dead row in the step
    already dispatched, and its blocks and its slot can be given away at once: the dead row writes to them
    before any later step can. Pack a plan before calling anything else: later calls change its sequences.
    A plan that is not run leaves tokens that count as computed and are not: `abort` all, and `forget_cache`.

    That is policy "splitfuse"; `fastgen_jax.scheduler.policies` has others, which fill steps differently. With
    prefix_caching, sequences that begin alike share blocks (`PrefixCache`). With a window, the most that any layer
    sees, a sequence gives back the blocks that it has slid past, when it next asks for some (`Window`).

    Rank: higher priority first, then earlier arrival.

    Memory: the pool is the scheduler's alone while it has work. Blocks are claimed chunk by chunk. Prompts
    leave one block free for each decode that will need another; a begun prompt takes what is left, or
    waits. A decode that finds no block preempts the worst-ranked running sequence, possibly itself: that
    one gives up its blocks, keeps its tokens, and waits in front of those of its priority that never ran.
    A step that preempted admits nobody.

    No starvation: a waiting sequence whose first chunk does not fit is passed by at most `max_bypass`
    sequences that were behind it. From then on only those in front of it are admitted, and as the
    best-ranked decode always makes progress, they and all that run come to an end: short of an endless
    stream of higher priorities, so does every request.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        max_bypass: int = 16,
        policy: str = "splitfuse",
        prefix_caching: bool = False,
        window: int | None = None,
    ) -> None:
        self.block_pool = block_pool
        self._policy = get_policy(policy)
        self._window = Window.under(self._policy.name, window, block_pool.block_size)
        self._cache = PrefixCache(block_pool, self._window, enabled=prefix_caching)
        self._limits = Limits(max_num_batched_tokens, max_num_seqs, max_model_len, max_bypass)
        self._sequences: dict[int, Sequence] = {}  # every unfinished one
        self._running: list[Sequence] = []  # those with a slot, best-ranked first
        self._waiting = WaitingQueue()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))  # a stack
        self._num_arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._sequences)

    def add(self, seq: Sequence) -> None:
        """Let `seq` wait for its turn. A ValueError if it never could have one."""
        self.check_can_run(seq)
        seq.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._sequences[seq.seq_id] = seq
        self._waiting.push(seq)

    def schedule(self) -> StepPlan:
        """Plan a step and count it as done: its rows' tokens as computed, its samples as in flight.

        A plan without rows means that nothing can run before the `update` of a step already dispatched,
        or that nothing is left to do.
        """
        step = Step(self._limits.max_num_batched_tokens)
        self._policy.fill(step, self)
        return StepPlan(step.rows, step.preempted)

    def update(self, plan: StepPlan, token_ids: Collection[int]) -> list[Sequence]:
        """Take in the samples of a step that has run: `token_ids[i]` belongs to `plan.rows[i]`.

        Samples of unfinished prompt chunks and of ended sequences are dropped. Returns the sequences that
        received a token; those it ended have a `finish_reason`, and their blocks and slots are free.
        """
        if len(token_ids) != len(plan.rows):
            raise ValueError(f"{len(token_ids)} token ids for {len(plan.rows)} rows; it takes one per row")
        updated, block_size = [], self.block_pool.block_size
        for (seq, _, _, samples), token_id in zip(plan.rows, token_ids, strict=True):
            if not samples or seq.finish_reason is not None:
                continue
            seq.num_in_flight -= 1
            output = seq.output_token_ids
            output.append(token_id)
            updated.append(seq)
            num_tokens = len(seq.prompt_token_ids) + len(output)
            if num_tokens % block_size == 0:
                self._cache.register(seq)
            if token_id in seq.stop_token_ids and len(output) >= seq.min_tokens:
                self._end(seq, "stop")
            elif num_tokens >= self._limits.max_num_tokens(seq):
                self._end(seq, "length")
        return updated

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End `seq`, for a reason its token ids do not show. If it has ended, only the reason changes."""
        if seq.is_finished:
            seq.finish_reason = reason
        else:
            self._end(seq, reason)

    def abort(self, seq_id: int) -> Sequence | None:
        """End the running or waiting sequence of that id; None if there is none."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self._end(seq, "abort")
        return seq

    def check_can_run(self, seq: Sequence) -> None:
        """ValueError, naming the numbers, if `seq` could never run here; nothing changes."""
        if seq.seq_id in self._sequences:
            raise ValueError(f"seq_id={seq.seq_id} is in use; an unfinished sequence needs its own id")
        self._limits.check(seq, self.block_pool.num_blocks - 1, self._window, self._policy)

    def forget_cache(self) -> None:
        """Have no sequence share what has been computed so far, nor what those that run go on to compute."""
        self.block_pool.forget()
        for seq in self._running:
            seq.fills_cache = False

    def plan_decodes(self, step: Step) -> Sequence | None:
        """Plan one token for each running decode; return the running prompt that is not computed yet.

        There is one at most: only the last row of a step can fall short of its sequence's last token, for
        that takes the rest of the budget or of the blocks. Going by rank, a victim of preemption (the last
        running one) never has its row yet.
        """
        rows, block_size, reserve = step.rows, self.block_pool.block_size, 0
        begun = None
        for seq in self._running:  # preemption shortens it, from its end
            start = seq.num_computed_tokens
            num_tokens = len(seq.prompt_token_ids) + len(seq.output_token_ids) + seq.num_in_flight
            if num_tokens - start > 1:
                begun = seq
                continue
            if num_tokens >= (max_num_tokens := self._limits.max_num_tokens(seq)):
                continue  # its last token is in flight
            if start == len(seq.block_table) * block_size and not self._claim_or_preempt(seq, step):
                continue
            seq.num_computed_tokens = num_tokens
            seq.num_in_flight += 1
            rows.append(Row(seq, start, 1, True))
            if num_tokens % block_size == 0:
                self._cache.register(seq)
            if len(seq.block_table) * block_size < max_num_tokens - 1:
                reserve += 1
        step.budget -= len(rows)
        step.reserve = reserve
        return begun

    def plan_begun(self, seq: Sequence, step: Step) -> None:
        """Plan the next chunk of a begun prompt, as far as tokens and blocks last."""
        self._window.give_back(seq, self.block_pool)
        num_blocks = len(seq.block_table) + max(0, self.block_pool.num_free - step.reserve)
        room = num_blocks * self.block_pool.block_size - seq.num_computed_tokens
        num_new_tokens = min(seq.num_uncomputed_tokens, step.budget, room)
        if num_new_tokens and self._claim(seq, num_new_tokens, step.reserve):
            self._plan_chunk(seq, num_new_tokens, step)

    def admit(self, step: Step) -> None:
        """Plan first chunks of waiting sequences, those that fit past those that do not (see the class).

        Under a policy that does not split prompts, whole ones only, and none is passed.
        """
        max_blocked = LOOKAHEAD if self._policy.splits_prompts else 0
        blocked: list[Sequence] = []
        while len(blocked) <= max_blocked and self._has_room(step):
            seq = self._waiting.pop()
            if seq is None:
                break
            if not self._admit_one(seq, step):
                blocked.append(seq)
            else:
                for passed in blocked:
                    passed.num_bypassed += 1
            if any(passed.num_bypassed >= self._limits.max_bypass for passed in blocked):
                break
        for seq in blocked:
            self._waiting.push(seq)

    def decode_reserve(self) -> int:
        """How many running sequences will need another block before they end."""
        return sum(self._limits.needs_another_block(seq, self.block_pool.block_size) for seq in self._running)

    def _has_room(self, step: Step) -> bool:
        """Whether there is a slot, a token and a block for one more sequence."""
        return bool(self._free_slots) and step.budget > 0 and self.block_pool.num_free > step.reserve

    def _admit_one(self, seq: Sequence, step: Step) -> bool:
        """Let `seq` run, and plan its first chunk; False, and nothing changed, if that does not fit now."""
        if seq.num_in_flight:  # the token that a preempted sequence has in flight is part of what it computes anew
            return False
        pool = self.block_pool
        table = self._cache.find(seq)
        num_cached = len(table) * pool.block_size
        num_past = self._window.num_past(num_cached)
        found = table[num_past:]
        most = (num_past + pool.num_blocks - 1) * pool.block_size - num_cached  # what an empty pool holds beside them
        num_new_tokens = min(seq.num_tokens - num_cached, step.budget, most)
        if num_cached + num_new_tokens < seq.num_tokens and not self._policy.splits_prompts:
            return False
        missing = pool.blocks_needed(num_cached + num_new_tokens) - len(table)
        if missing + sum(map(pool.is_free, found)) > pool.num_free - step.reserve:
            return False
        pool.share(found)
        seq.block_table, seq.num_past_blocks = table, num_past
        seq.num_computed_tokens = num_cached
        seq.num_registered_blocks, seq.fills_cache = len(table), True
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = num_cached
        seq.slot = self._free_slots.pop()
        insort(self._running, seq, key=rank)
        self._claim(seq, num_new_tokens)
        self._plan_chunk(seq, num_new_tokens, step)
        return True

    def _plan_chunk(self, seq: Sequence, num_new_tokens: int, step: Step) -> None:
        samples = num_new_tokens == seq.num_uncomputed_tokens
        step.rows.append(Row(seq, seq.num_computed_tokens, num_new_tokens, samples))
        step.budget -= num_new_tokens
        seq.num_computed_tokens += num_new_tokens
        self._cache.register(seq)
        if samples:
            seq.num_in_flight += 1
            step.reserve += self._limits.needs_another_block(seq, self.block_pool.block_size)

    def _claim(self, seq: Sequence, num_new_tokens: int, reserve: int = 0) -> bool:
        """Give `seq` the blocks for its next tokens if `reserve` stay free; say whether it has them."""
        self._window.give_back(seq, pool := self.block_pool)
        missing = pool.blocks_needed(seq.num_computed_tokens + num_new_tokens) - len(seq.block_table)
        blocks = pool.allocate(missing) if missing <= max(0, pool.num_free - reserve) else None
        if blocks is None:
            return False
        seq.block_table += blocks
        return True

    def _claim_or_preempt(self, seq: Sequence, step: Step) -> bool:
        """Give `seq` a block, at the expense of worse-ranked ones; False if it had to go itself."""
        while seq.slot is not None:
            if self._claim(seq, 1):
                return True
            self._preempt_worst(step)
        return False

    def _preempt_worst(self, step: Step) -> None:
        """Send the worst-ranked running sequence back to wait, to be computed anew."""
        seq = self._running.pop()
        self._release(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._waiting.push(seq)
        step.preempted.append(seq)

    def _release(self, seq: Sequence) -> None:
        """Take back the blocks and the slot of a sequence that is leaving `_running`."""
        assert seq.slot is not None
        self.block_pool.free(seq.blocks)
        seq.block_table, seq.num_past_blocks = [], 0
        self._free_slots.append(seq.slot)
        seq.slot = None

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        seq.num_in_flight = 0  # what is still to come will be dropped
        del self._sequences[seq.seq_id]
        if seq.slot is not None:
            del self._running[bisect_left(self._running, rank(seq), key=rank)]
            self._release(seq)
        else:
            self._waiting.forget_ended(self.num_waiting)
