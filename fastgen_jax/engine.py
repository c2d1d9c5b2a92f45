"""`Engine`: turns requests into sequences, runs the loop over their steps, and turns them into responses."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import jinja2
import numpy as np

from fastgen_jax import checkpoint, defaults, kernels, models, progress
from fastgen_jax.batch import Settings
from fastgen_jax.compile_guard import num_compilations
from fastgen_jax.detokenize import Detokenizer
from fastgen_jax.low_level import LowLevel
from fastgen_jax.models.layers import Params
from fastgen_jax.request import Sample
from fastgen_jax.runner import ModelRunner, Pending, Report
from fastgen_jax.sampling_state import pack_row
from fastgen_jax.scheduler import BlockPool, Row, Scheduler, Sequence, StepPlan
from fastgen_jax.types import DEFAULT_MODEL, EngineConfig, EngineStats, Response, SamplingParams

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, Any]]
OnPiece = Callable[[str], Any]


class Engine:
    """Generates text with one model, continuously batched.

        engine = Engine.from_pretrained("smollm2-135m")
        for response in engine.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=8)):
            print(response.text)

    `add`, `step` and `abort` drive the loop by hand; requests may come between any two steps.
    """

    def __init__(
        self,
        model: Any,
        params: Params,
        tokenizer: Any = None,
        *,
        eos_token_ids: Seq[int] = (),
        default_params: Mapping[str, Any] | None = None,
        show_progress: bool | None = None,
        **config: Any,
    ):
        """An engine for `model`, a module of `fastgen_jax.models`, with `params`, its nested dict of arrays.

        tokenizer: a transformers tokenizer; without one, prompts are token ids and responses have no text.
        eos_token_ids: tokens that end a sequence.
        default_params: SamplingParams fields for requests that bring no params of their own.
        show_progress: a bar on stderr while compiling; None is where stderr is a terminal.
        config: fields of `EngineConfig`.
        """
        self.config = EngineConfig(**config)
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.default_params = SamplingParams(**(default_params or {}))
        found = jax.tree.leaves(params)[0].dtype
        if self.config.dtype not in (None, found.name):
            raise ValueError(f"dtype={self.config.dtype!r} does not fit params of {found.name}; cast them first")
        if self.config.compile_cache:
            defaults.enable_compile_cache()
        block_size = self.config.block_size or model.backend.DEFAULT_BLOCK_SIZE
        longest = model.config.max_positions
        wanted = self.config.max_model_len or longest
        if wanted > longest:
            raise ValueError(f"max_model_len={wanted} is more than the model's {longest} positions")
        budget = self.config.max_num_batched_tokens
        max_num_seqs = self.config.max_num_seqs or min(defaults.MAX_NUM_SEQS, budget)
        self._runner = ModelRunner(
            model,
            params,
            self.config,
            max_model_len=wanted,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            settings_of=self._settle,
        )
        block_pool = BlockPool(self._runner.num_blocks, block_size)
        fits = (block_pool.num_blocks - 1) * block_size + 1
        if self.config.max_model_len and wanted > fits:
            raise ValueError(
                f"max_model_len={wanted} needs more than the pool's {fits} tokens; "
                f"raise num_blocks to {block_pool.blocks_needed(wanted - 1) + 1} or lower max_model_len"
            )
        self.max_model_len = min(wanted, fits)
        self._block_pool = block_pool
        self._scheduler = Scheduler(
            block_pool,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self._samples: dict[int, Sample] = {}
        self._requests: dict[int, list[Sample]] = {}
        self._done: list[Response] = []
        self._pieces: deque[tuple[Sample, str]] = deque()
        self._pending: Pending | None = None
        self._ids = itertools.count()
        self._request_ids = itertools.count()
        self._totals = Counter[str]()
        self._low_level = LowLevel(self._runner, block_pool, max_num_seqs, budget, self.max_model_len)
        if self.config.warm_up:
            self._warm_up(show_progress)
        self._compiled_before = num_compilations()

    @classmethod
    def from_pretrained(
        cls,
        name: str = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        show_progress: bool | None = None,
        **config: Any,
    ) -> "Engine":
        """An engine for a local folder, a .gguf file, a Hub id, or an alias such as "llama2-7b".

        revision: branch, tag or commit on the Hub. config: fields of `EngineConfig`.
        """
        chosen = EngineConfig(**config)
        found = checkpoint.resolve(name, revision=revision)
        family = models.family(found.hf_config.get("model_type", ""))
        model_config = family.from_hf(found.hf_config)
        dtype = chosen.dtype or defaults.dtype()
        backend = kernels.choose_backend(
            chosen.backend,
            head_dim=model_config.head_dim,
            num_heads=model_config.num_heads,
            num_kv_heads=model_config.num_kv_heads,
            block_size=chosen.block_size,
            dtype=jnp.dtype(dtype),
        )
        model = family.Model(model_config, backend)
        shapes = jax.eval_shape(partial(models.init_params, model), jax.random.key(0))
        params = checkpoint.load_params(
            found.open(),
            shapes,
            dtype=dtype,
            fused=model_config.fused,
            tied=getattr(model_config, "tie_word_embeddings", True),
            progress=show_progress,
        )
        tokenizer = found.tokenizer()
        eos = defaults.eos_token_ids(found.generation_config, found.hf_config, {"eos_token_id": tokenizer.eos_token_id})
        return cls(
            model,
            params,
            tokenizer,
            eos_token_ids=eos,
            default_params=defaults.sampling(found.generation_config),
            show_progress=show_progress,
            **config,
        )

    # Requests

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        on_piece: OnPiece | None = None,
    ) -> int:
        """Queue a request and return its id; the higher `priority` is served first.

        on_piece: called with each piece of new text, which joined are the response's (without echo). It may
            call `add` and `abort`. If it raises, its request is aborted, and the exception comes out of the
            `step` or `abort` that called it, when everything is in order again.
        A ValueError for what can never run leaves everything as it was.
        """
        params = self.default_params if params is None else params
        token_ids = self._encode(prompt)
        self._check(token_ids, params, on_piece)
        return self._add(prompt, token_ids, params, priority, on_piece)

    def step(self) -> list[Response]:
        """Run one step and return the responses that have finished, those of aborted requests included.

        An exception of the step itself, as of a failing device, aborts every request. After any exception
        the responses that were ready come from the next `step`.
        """
        self._advance()
        responses, self._done = self._done, []
        return responses

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
            padding=total["padding"],
            generated_tokens=total["generated_tokens"],
            preemptions=total["preemptions"],
            dead_rows=total["dead_rows"],
            compiled=self._runner.programs.num_compiled,
            compiled_after_warm_up=num_compilations() - self._compiled_before,
        )

    def update_params(self, params: Params) -> None:
        """Swap the weights in place, between two steps; nothing is compiled.

        ValueError unless `params` has the names, shapes and dtypes of the present ones. Sequences in
        flight go on with K/V that the old weights computed.
        """
        self._runner.update_params(params)

    @property
    def params(self) -> Params:
        """The weights, a nested dict of arrays named as the checkpoint names its modules."""
        return self._runner.params

    # Conveniences over add and step

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Response]:
        """Responses to `prompts`, strings or lists of token ids, in their order; n of them for a prompt with n > 1.

        params: one for all, one for each, or None for the model's own defaults.
        show_progress: a bar on stderr; None is where stderr is a terminal.
        A prompt that cannot run raises ValueError before any other is begun.
        """
        every = prompt_list(prompts)
        params = self.default_params if params is None else params
        each = list(params) if isinstance(params, Seq) else [params] * len(every)
        if len(each) != len(every):
            raise ValueError(f"{len(each)} params for {len(every)} prompts; give one, or one for each")
        encoded = [self._encode(prompt) for prompt in every]
        for token_ids, wanted in zip(encoded, each, strict=True):
            self._check(token_ids, wanted, None)
        mine = {self._add(*request) for request in zip(every, encoded, each, strict=True)}
        responses: list[Response] = []
        with progress.bar("generating", sum(p.n for p in each), show_progress, "samples") as advance:
            try:
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
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("this model's tokenizer has no chat template; use generate with a plain prompt")
        try:
            out = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return list(out["input_ids"])

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

    def put(self, ids: Seq[int], tokens: Seq[Seq[int]]) -> np.ndarray:
        """Append `tokens[i]` to the sequence called `ids[i]`, new ids beginning new sequences, in one step.

        Returns float32 logits [len(ids), V] after each one's last token. The sequences keep their KV blocks
        until `flush`; until then the engine takes no requests. For parity checks and research.
        """
        if self._scheduler.has_work or self._pending is not None:
            raise ValueError("put needs an idle engine, and requests are unfinished; step until has_work is False")
        return self._low_level.put(ids, tokens)

    def flush(self, ids: Seq[int]) -> None:
        """Forget sequences made by `put` and free their blocks."""
        self._low_level.flush(ids)

    # The loop

    def _advance(self) -> None:
        """Run one step: the responses it finished are in `_done`, and its pieces have been handed out."""
        try:
            if self.config.overlap:
                self._step_overlapped()
            else:
                self._step_plain()
        except BaseException:
            self._pending = None  # rows may count as computed that never were: no request can go on
            for request_id in list(self._requests):
                self._abort(request_id)
            raise
        self._deliver()

    def _deliver(self) -> None:
        """Call on_piece for every piece there is; all is in order by now, whatever a callback does."""
        while self._pieces:
            sample, piece = self._pieces.popleft()
            try:
                if sample.on_piece is not None:
                    sample.on_piece(piece)
            except BaseException:
                sample.on_piece = None
                self._abort(sample.request_id)
                raise

    def _abort(self, request_id: int) -> bool:
        samples = list(self._requests.get(request_id, ()))
        for sample in samples:
            self._scheduler.finish(sample.seq, "abort")
            self._close(sample)
            self._queue_piece(sample)
        return bool(samples)

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
            sample.scheduled = sample.scheduled or now
        report = any(row.samples and self._samples[row.seq.seq_id].params.logprobs is not None for row in plan.rows)
        pending = self._runner.dispatch(plan, report=report, wants_prompt=self._wants_prompt)
        self._totals.update(
            steps=1,
            tokens=plan.num_tokens,
            padding=self._runner.packer.bucket(plan.num_tokens) - plan.num_tokens,
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
            self._queue_piece(sample)

    def _queue_piece(self, sample: Sample) -> None:
        if sample.on_piece is not None and (piece := sample.take_piece()):
            self._pieces.append((sample, piece))

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

    def num_prompt_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt is for this model."""
        return len(self._encode(prompt))

    # From requests to sequences

    def _add(
        self,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        on_piece: OnPiece | None = None,
    ) -> int:
        """Queue a request that has passed `_check`; its id, higher than any before."""
        request_id = next(self._request_ids)
        text = self._text(prompt, params) if params.full_text else ""
        samples = [self._sample(request_id, i, token_ids, text, params, priority, on_piece) for i in range(params.n)]
        for sample in samples:
            self._scheduler.add(sample.seq)
            self._samples[sample.seq.seq_id] = sample
        self._requests[request_id] = samples
        return request_id

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer; give prompts as lists of token ids")
            return list(self.tokenizer(prompt)["input_ids"])
        if not is_token_ids(prompt):
            raise TypeError(f"a prompt is a string or a list of token ids, not {prompt!r:.60}")
        return [int(token_id) for token_id in prompt]

    def _text(self, prompt: Prompt, params: SamplingParams) -> str:
        """A prompt's text, for echo."""
        if isinstance(prompt, str) or self.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return self.tokenizer.decode(
            list(prompt), skip_special_tokens=params.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _check(self, token_ids: list[int], params: SamplingParams, on_piece: OnPiece | None) -> None:
        """ValueError for a request that can never run; nothing has changed."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params={params!r:.60} is {type(params).__name__}; it must be SamplingParams")
        vocab_size = self._runner.model.config.vocab_size
        named = {
            "the prompt": token_ids,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias,
        }
        for name, ids in named.items():
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} has the token id {token_id}; this model's are 0 to {vocab_size - 1}")
        if self.tokenizer is None and params.stop:
            raise ValueError("stop strings need a tokenizer, which this engine does not have; use stop_token_ids")
        if self.tokenizer is None and on_piece is not None:
            raise ValueError("this engine has no tokenizer, so there is no text to stream; use add and step")
        if params.n > 1 and on_piece is not None:
            raise ValueError(f"n={params.n} samples cannot be streamed as one text; stream them one by one")
        if self._low_level.is_in_use:
            raise ValueError("sequences made by put hold the pool; flush them before adding requests")
        self._scheduler.check_can_run(self._sequence(-1, token_ids, params, 0))

    def _sequence(self, seq_id: int, token_ids: list[int], params: SamplingParams, priority: int) -> Sequence:
        return Sequence(
            seq_id=seq_id,
            prompt_token_ids=token_ids,
            max_tokens=params.max_tokens or self.max_model_len,
            stop_token_ids=frozenset(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos_token_ids)),
            min_tokens=params.min_tokens,
            priority=priority,
        )

    def _sample(
        self,
        request_id: int,
        index: int,
        token_ids: list[int],
        text: str,
        params: SamplingParams,
        priority: int,
        on_piece: OnPiece | None,
    ) -> Sample:
        detokenizer = self.tokenizer and Detokenizer(
            self.tokenizer,
            token_ids,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        seq = self._sequence(next(self._ids), token_ids, params, priority)
        return Sample(seq, params, request_id, index, text, detokenizer, on_piece)

    def _settle(self, seq: Sequence) -> np.ndarray:
        """Store a sequence's masks and biases in the slot it has got; its row of settings."""
        sample = self._samples.get(seq.seq_id)
        if sample is None:  # made by put
            return Settings(num_prompt_tokens=len(seq.prompt_token_ids)).to_row()
        p = sample.params
        if p.logit_bias or p.allowed_token_ids is not None or p.min_tokens:
            assert seq.slot is not None
            row = pack_row(p, seq.stop_token_ids, self._runner.model.config.vocab_size)
            self._runner.set_row(seq.slot, row)
        # Requests without a seed get one of the engine's, from a range that no request can name.
        seed = (1 << 63) + (self.config.seed << 32) + seq.seq_id if p.seed is None else p.seed + sample.index
        return Settings(
            num_prompt_tokens=len(seq.prompt_token_ids),
            min_tokens=p.min_tokens,
            top_k=p.top_k,
            seed_high=seed >> 32 & 0xFFFFFFFF,
            seed_low=seed & 0xFFFFFFFF,
            has_bias=bool(p.logit_bias),
            has_allowed=p.allowed_token_ids is not None,
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
        ).to_row()

    def _warm_up(self, show_progress: bool | None) -> None:
        programs = self._runner.programs
        keys = list(programs.keys())
        with progress.bar("compiling", len(keys), show_progress, "programs") as advance:
            for key in keys:
                programs.get(*key)
                advance(1)


def is_token_ids(prompt: Any) -> bool:
    """Whether `prompt` is a list of token ids rather than a string or a list of prompts."""
    return (
        isinstance(prompt, Seq | np.ndarray)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(i, int | np.integer) for i in prompt)
    )


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    alone = not isinstance(prompts, Iterable) or isinstance(prompts, str) or is_token_ids(prompts)
    return cast(list[Prompt], [prompts] if alone else list(prompts))
