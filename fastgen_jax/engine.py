"""`Engine`: turns requests into sequences, runs the loop over their steps, and turns them into responses."""

import functools
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Concatenate, cast

import numpy as np

from fastgen_jax import budget, pretrained, progress
from fastgen_jax.batch import Settings
from fastgen_jax.intake import Intake, Messages, OnDelta, Prompt, dynamic_rope_len, prompt_list
from fastgen_jax.low_level import LowLevel
from fastgen_jax.models.layers import Params
from fastgen_jax.orders import Group
from fastgen_jax.reader import Reader
from fastgen_jax.request import Sample
from fastgen_jax.runner import Pending, Report
from fastgen_jax.scheduler import BlockPool, Row, Scheduler, Sequence, StepPlan
from fastgen_jax.types import DEFAULT_MODEL, Delta, EngineConfig, EngineStats, Response, SamplingParams


def _one_at_a_time[**P, R](method: Callable[Concatenate["Engine", P], R]) -> Callable[Concatenate["Engine", P], R]:
    """Have other threads wait until the method returns."""

    @functools.wraps(method)
    def locked(engine: "Engine", *args: P.args, **kwargs: P.kwargs) -> R:
        with engine._lock:
            return method(engine, *args, **kwargs)

    return locked


def _text_only(on_piece: Callable[[str], Any], delta: Delta) -> None:
    if delta.text:
        on_piece(delta.text)


class Engine:
    """Generates text with one model, continuously batched.

        engine = Engine.from_pretrained("smollm2-135m")
        for response in engine.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=8)):
            print(response.text)

    `add`, `step` and `abort` drive the loop by hand; requests may come between any two steps. Methods may be
    called from several threads and wait for each other, step by step; `step` hands out whatever has finished,
    so let one thread call it, or use `generate`, `stream` or `AsyncEngine`.
    """

    def __init__(
        self,
        model: Any,
        params: Params,
        tokenizer: Any = None,
        *,
        eos_token_ids: Seq[int] = (),
        default_params: Mapping[str, Any] | None = None,
        group: Group | None = None,
        show_progress: bool | None = None,
        **config: Any,
    ):
        """An engine for `model`, a module of `fastgen_jax.models`, with `params`, its nested dict of arrays.

        tokenizer: a transformers tokenizer; without one, prompts are token ids and responses have no text.
        eos_token_ids: tokens that end a sequence.
        default_params: SamplingParams fields for requests that bring no params of their own.
        group: the processes that share the model, of which this one leads (`fastgen_jax.multihost`).
        show_progress: a bar on stderr while compiling; None is where stderr is a terminal.
        config: fields of `EngineConfig`.
        """
        self.config = EngineConfig(**config)
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.default_params = SamplingParams(**(default_params or {}))
        self._runner = pretrained.make_runner(model, params, self.config, group)
        wanted, max_num_seqs = self.config.max_model_len, self._runner.max_num_seqs
        block_pool = BlockPool(self._runner.num_blocks, self._runner.block_size)
        self.max_model_len = self._runner.max_model_len
        if wanted and self.max_model_len < wanted:
            raise ValueError(
                f"max_model_len={wanted} needs more than the pool's {self.max_model_len} tokens; "
                f"raise num_blocks to {self._runner.window.most_blocks(wanted - 1) + 1} or lower max_model_len"
            )
        self.step_curve = budget.tune(self._runner, self.config, show_progress)
        self.max_num_batched_tokens = budget.choose(self.step_curve, self.config)
        self._runner.limit(self.max_num_batched_tokens)
        self.max_num_seqs = max_num_seqs = min(max_num_seqs, self.max_num_batched_tokens)
        self._block_pool = block_pool
        self._scheduler = Scheduler(
            block_pool,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            policy=self.config.policy,
            prefix_caching=self.config.prefix_caching,
            window=self._runner.window.num_tokens,
        )
        self._intake = Intake(
            tokenizer,
            model.config.vocab_size,
            self.eos_token_ids,
            self.max_model_len,
            self.config.seed,
            short_context=dynamic_rope_len(model.config),
        )
        self._lock = threading.RLock()
        self._is_stepping = False
        self._to_abort: list[int] = []
        self._samples: dict[int, Sample] = {}
        self._requests: dict[int, list[Sample]] = {}
        self._done: list[Response] = []
        self._deltas: deque[tuple[Sample, Delta]] = deque()
        self._pending: Pending | None = None
        self._request_ids = itertools.count()
        self._totals = Counter[str]()
        self._low_level = LowLevel(
            self._runner, block_pool, max_num_seqs, self.max_num_batched_tokens, self.max_model_len
        )
        if self.config.warm_up:
            self._warm_up(show_progress)
        self._compiled_at_start = self._runner.programs.num_compiled

    @classmethod
    def from_pretrained(
        cls,
        name: str = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        group: Group | None = None,
        show_progress: bool | None = None,
        **config: Any,
    ) -> "Engine":
        """An engine for a local folder, a .gguf file, a Hub id, or an alias such as "llama2-7b".

        revision: branch, tag or commit on the Hub. group: as for `Engine`. config: fields of `EngineConfig`.
        """
        if group is not None and not group.leads:
            raise ValueError("this process does not lead those that share the model; let it group.follow(name, ...)")
        found = pretrained.load(
            name, EngineConfig(**config), revision=revision, group=group, show_progress=show_progress
        )
        return cls(**found._asdict(), group=group, show_progress=show_progress, **config)

    # Requests

    @_one_at_a_time
    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        token_ids: list[int] | None = None,
        on_piece: Callable[[str], Any] | None = None,
        on_delta: OnDelta | None = None,
    ) -> int:
        """Queue a request and return its id; the higher `priority` is served first.

        token_ids: the prompt's, where `reader.encode` has made them already.
        on_piece: called with each piece of new text, which joined are the response's (without echo).
        on_delta: called instead with a `Delta` for each step and sample: text, tokens, log-probabilities.
        Either may call `add` and `abort`. If it raises, its request is aborted, and the exception comes out of
        the `step` or `abort` that called it, when everything is in order again.
        A ValueError for what can never run leaves everything as it was.
        """
        if on_piece is not None and on_delta is not None:
            raise TypeError("on_piece and on_delta tell the same; give one of them")
        params = self.default_params if params is None else params
        if token_ids is None:
            token_ids = self._intake.encode(prompt)
        self._check(token_ids, params, priority=priority, streamed=on_piece is not None)
        if on_piece is not None:
            on_delta = functools.partial(_text_only, on_piece)
        return self._add(prompt, token_ids, params, priority, on_delta)

    @_one_at_a_time
    def step(self) -> list[Response]:
        """Run one step and return the responses that have finished, those of aborted requests included.

        An exception of the step itself, as of a failing device, aborts every request. After any exception
        the responses that were ready come from the next `step`.
        """
        self._advance()
        responses, self._done = self._done, []
        return responses

    @_one_at_a_time
    def abort(self, request_id: int) -> bool:
        """End a request; its responses, with what text there is, come from the next `step`.

        False if it is unknown or has ended.
        """
        was_live = self._abort(request_id)
        self._deliver()
        return was_live

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return self._scheduler.has_work or self._pending is not None or bool(self._done)

    def stats(self) -> EngineStats:
        """What the engine holds now and has done so far."""
        pool, total = self._block_pool, self._totals
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            blocks=pool.num_blocks - 1,
            free_blocks=pool.num_free,
            steps=total["steps"],
            tokens=total["tokens"],
            decode_tokens=total["decode_tokens"],
            padding=total["padding"],
            prompt_tokens=total["prompt_tokens"],
            cached_tokens=total["cached_tokens"],
            generated_tokens=total["generated_tokens"],
            preemptions=total["preemptions"],
            dead_rows=total["dead_rows"],
            compiled=self._runner.programs.num_compiled,
            compiled_after_warm_up=self._runner.programs.num_compiled - self._compiled_at_start,
        )

    @_one_at_a_time
    def update_params(self, params: Params) -> None:
        """Swap the weights in place, between two steps; nothing is compiled.

        ValueError unless `params` has the names, shapes and dtypes of the present ones. Sequences in
        flight go on with K/V that the old weights computed; none that begins later shares these.
        """
        self._runner.check_not_shared("update_params")
        self._runner.update_params(params)
        self._scheduler.forget_cache()

    def close(self) -> None:
        """Let go of the processes that share the model, if any do; the engine cannot be used any more."""
        self._runner.close()

    @property
    def params(self) -> Params:
        """The weights, a nested dict of arrays named as the checkpoint names its modules."""
        return self._runner.params

    @functools.cached_property
    def reader(self) -> Reader:
        """Prompts to tokens and back, from any thread and beside a step that runs; its tokenizer is a copy."""
        return Reader(self._intake)

    # Conveniences over add and step

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Response]:
        """Responses to `prompts`, strings or lists of token ids, in their order; n of them for a prompt with n > 1.

        params: one for all, one for each, or None for the model's own defaults; to change some of those,
            `engine.default_params.replace(max_tokens=64)`.
        show_progress: a bar on stderr; None is where stderr is a terminal.
        A prompt that cannot run raises ValueError before any other is begun.
        """
        every = prompt_list(prompts)
        params = self.default_params if params is None else params
        each = list(params) if isinstance(params, Seq) else [params] * len(every)
        if len(each) != len(every):
            raise ValueError(f"{len(each)} params for {len(every)} prompts; give one, or one for each")
        with self._lock:
            encoded = [self._intake.encode(prompt) for prompt in every]
            for token_ids, wanted in zip(encoded, each, strict=True):
                self._check(token_ids, wanted)
        mine: set[int] = set()
        responses: list[Response] = []
        with progress.bar("generating", sum(p.n for p in each), show_progress, "samples") as advance:
            try:
                for request in zip(every, encoded, each, strict=True):
                    mine.add(self._add(*request))
                while not mine.isdisjoint(self._requests):
                    self._advance()
                    finished = self._take(mine)
                    responses += finished
                    advance(len(finished))
            finally:
                for request_id in mine:
                    self._abort(request_id)
                self._take(mine)
        return sorted(responses, key=lambda response: (response.request_id, response.index))

    def chat(
        self,
        messages: Messages | Seq[Messages],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Response]:
        """`generate` for one conversation or several, through the tokenizer's chat template.

        A message is {"role": "system" | "user" | "assistant", "content": text}.
        """
        alone = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Seq[Messages], [messages] if alone else messages)
        prompts = [self.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, params, show_progress=show_progress)

    def chat_prompt(self, messages: Messages) -> list[int]:
        """The token ids that the tokenizer's chat template makes of a conversation."""
        return self._intake.chat_prompt(messages)

    def num_prompt_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt is for this model."""
        return len(self._intake.encode(prompt))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the response's text as they become final; joined, they are its text (without echo).

        Leaving the loop early aborts the request. Between two pieces the engine may be used as ever; the
        responses of other requests come from `step`.
        """
        pieces: deque[str] = deque()
        request_id = self.add(prompt, params, on_piece=pieces.append)
        try:
            while pieces or request_id in self._requests:
                if pieces:
                    yield pieces.popleft()
                else:
                    self._advance()
        finally:
            self._abort(request_id)
            self._take({request_id})

    # FastGen's low-level seam

    @_one_at_a_time
    def put(self, ids: Seq[Hashable], tokens: Seq[Seq[int]]) -> np.ndarray:
        """Append `tokens[i]` to the sequence called `ids[i]`, new ids beginning new sequences, in one step.

        Returns float32 logits [len(ids), V] after each one's last token. The sequences keep their KV blocks
        until `flush`; until then the engine takes no requests. For parity checks and research.
        """
        self._runner.check_not_shared("put")
        if not self._scheduler.has_work and self._pending is not None:  # dead rows of an aborted request
            self._advance()
        if self._scheduler.has_work:
            raise ValueError("put needs an idle engine, and requests are unfinished; step until has_work is False")
        return self._low_level.put(ids, tokens)

    @_one_at_a_time
    def flush(self, ids: Seq[Hashable]) -> None:
        """Forget sequences made by `put` and free their blocks."""
        self._low_level.flush(ids)

    # The loop

    @_one_at_a_time
    def _advance(self) -> None:
        """Run one step: the responses it finished are in `_done`, and its deltas have been handed out."""
        try:
            self._is_stepping = True
            try:
                if self.config.overlap:
                    self._step_overlapped()
                else:
                    self._step_plain()
            finally:
                self._is_stepping = False
        except BaseException as error:  # Ctrl-C too
            if isinstance(error, Exception):
                self._runner.settle()
            self._pending = None  # rows may count as computed that never were: no request can go on
            self._scheduler.forget_cache()  # nor can what they should have computed be shared
            for request_id in list(self._requests):
                self._abort(request_id)
            if self._runner.is_broken:
                self._runner.reset()
            raise
        while self._to_abort:
            request_id = self._to_abort.pop()
            self._abort(request_id)
            self._take({request_id})
        self._deliver()

    def _deliver(self) -> None:
        """Call on_delta for every delta there is; all is in order by now, whatever a callback does."""
        while self._deltas:
            sample, delta = self._deltas.popleft()
            try:
                if sample.on_delta is not None:
                    sample.on_delta(delta)
            except BaseException:
                for other in self._requests.get(sample.request_id, ()):
                    other.on_delta = None
                sample.on_delta = None
                self._abort(sample.request_id)
                raise

    @_one_at_a_time
    def _abort(self, request_id: int) -> bool:
        samples = list(self._requests.get(request_id, ()))
        if self._is_stepping:  # the garbage collector has found a stream that nobody reads any more
            self._to_abort.append(request_id)
            return bool(samples)
        for sample in samples:
            self._scheduler.finish(sample.seq, "abort")
            self._close(sample)
            self._queue_delta(sample)
        return bool(samples)

    @_one_at_a_time
    def _take(self, request_ids: Collection[int]) -> list[Response]:
        """Remove the responses of these requests from `_done`, and return them."""
        taken = [response for response in self._done if response.request_id in request_ids]
        if taken:
            self._done = [response for response in self._done if response.request_id not in request_ids]
        return taken

    def _step_plain(self) -> None:
        plan = self._scheduler.schedule()
        if plan.rows:
            self._finish(self._dispatch(plan))

    def _step_overlapped(self) -> None:
        """Dispatch the next step before the last one's tokens are fetched: the device never waits for the host."""
        plan = self._scheduler.schedule()
        before, self._pending = self._pending, self._dispatch(plan) if plan.rows else None
        if before is not None:
            self._finish(before)
        if self._pending is not None and not self._scheduler.has_work:  # nothing but dead rows
            self._finish(self._pending)
            self._pending = None

    def _dispatch(self, plan: StepPlan) -> Pending:
        now = time.perf_counter()
        for row in plan.rows:
            sample = self._samples[row.seq.seq_id]
            if sample.scheduled is None:
                sample.scheduled = now
                self._totals["prompt_tokens"] += len(row.seq.prompt_token_ids)
                self._totals["cached_tokens"] += row.seq.num_cached_tokens
        report = any(row.samples and self._samples[row.seq.seq_id].params.logprobs is not None for row in plan.rows)
        pending = self._runner.dispatch(plan, self._settle, report=report, wants_prompt=self._wants_prompt)
        self._totals.update(
            steps=1,
            tokens=plan.num_tokens,
            decode_tokens=sum(
                row.num_new_tokens == 1 and row.start >= len(row.seq.prompt_token_ids) for row in plan.rows
            ),
            padding=pending.num_padding,
            preemptions=len(plan.preempted),
        )
        return pending

    def _wants_prompt(self, row: Row) -> bool:
        return self._samples[row.seq.seq_id].wants_prompt_logprobs(row.start)

    def _finish(self, pending: Pending) -> None:
        """Take in a step's tokens and close the samples that end with them."""
        tokens, report, prompt_report = pending.tokens(), pending.report(), pending.prompt_report()
        rows = pending.plan.rows
        self._totals["dead_rows"] += sum(row.seq.is_finished for row in rows)
        if prompt_report is not None:
            self._push_prompt(pending.plan, prompt_report)
        row_of = {row.seq.seq_id: i for i, row in enumerate(rows)}
        for seq in self._scheduler.update(pending.plan, tokens):
            sample = self._samples[seq.seq_id]
            self._totals["generated_tokens"] += 1
            if sample.push(seq.output_token_ids[-1], report, row_of[seq.seq_id]):
                self._scheduler.finish(seq, "stop")
            if seq.is_finished:
                self._close(sample)
            self._queue_delta(sample)

    def _queue_delta(self, sample: Sample) -> None:
        if sample.on_delta is not None and (delta := sample.take_delta()) is not None:
            self._deltas.append((sample, delta))

    def _push_prompt(self, plan: StepPlan, report: Report) -> None:
        first = 0
        for row in plan.rows:
            sample = self._samples.get(row.seq.seq_id)
            if sample is not None and sample.wants_prompt_logprobs(row.start):
                sample.push_prompt(row.start, report, first, row.num_new_tokens)
            first += row.num_new_tokens

    def _close(self, sample: Sample) -> None:
        """Forget a finished sample; its response is then in `_done`."""
        del self._samples[sample.seq.seq_id]
        live = self._requests[sample.request_id]
        live.remove(sample)
        if not live:
            del self._requests[sample.request_id]
        self._done.append(sample.response())

    def _check(
        self, token_ids: list[int], params: SamplingParams, *, priority: int = 0, streamed: bool = False
    ) -> None:
        """ValueError for a request that can never run; nothing has changed."""
        if type(priority) is not int:
            raise TypeError(f"priority={priority!r} is {type(priority).__name__}; it must be a whole number")
        self._intake.check(token_ids, params, streamed=streamed)
        if self._low_level.is_in_use:
            raise ValueError("sequences made by put hold the pool; flush them before adding requests")
        self._scheduler.check_can_run(self._intake.sequence(-1, token_ids, params, 0))

    @_one_at_a_time
    def _add(
        self,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        on_delta: OnDelta | None = None,
    ) -> int:
        """Queue a request that has passed `_check`; its id, higher than any before."""
        request_id = next(self._request_ids)
        samples = self._intake.samples(request_id, prompt, token_ids, params, priority, on_delta)
        for sample in samples:
            self._scheduler.add(sample.seq)
            self._samples[sample.seq.seq_id] = sample
        self._requests[request_id] = samples
        return request_id

    def _settle(self, seq: Sequence) -> Settings:
        """Store a sequence's masks and biases in the slot it has got; its settings."""
        sample = self._samples[seq.seq_id]
        if (masks := self._intake.masks(sample)) is not None:
            assert seq.slot is not None
            self._runner.set_row(seq.slot, masks)
        return self._intake.settings(sample)

    def _warm_up(self, show_progress: bool | None) -> None:
        keys = list(self._runner.programs.keys())
        with progress.bar("compiling", len(keys), show_progress, "programs") as advance:
            self._runner.compile_all(keys, advance)
