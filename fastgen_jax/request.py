"""`Sample`: what the host keeps of one sequence beside its tokens, and the `Response` made of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastgen_jax.detokenize import Detokenizer
from fastgen_jax.runner import Report
from fastgen_jax.scheduler import Sequence
from fastgen_jax.types import Delta, Response, SamplingParams, Timings, TokenLogprob


@dataclass(eq=False)
class Sample:
    """One of the `n` samples of a request, from `Engine.add` to its `Response`.

    prompt: the prompt's text, for echo. on_delta: what the engine calls with what each step brought.
    """

    seq: Sequence
    params: SamplingParams
    request_id: int
    index: int
    prompt: str
    detokenizer: Detokenizer | None
    on_delta: Callable[[Delta], Any] | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    added: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_told: int = 0

    def push(self, token_id: int, report: Report | None, row: int) -> bool:
        """Take in a generated token; True if a stop string has appeared."""
        self.token_times.append(time.perf_counter())
        if self.params.logprobs is not None and report is not None:
            self.logprobs.append(token_logprob(token_id, report, row, self.params.logprobs))
        if self.detokenizer is None:
            return False
        return self.detokenizer.push(token_id, is_stop_token=self.seq.finish_reason == "stop")

    def take_delta(self) -> Delta | None:
        """The tokens since the last call, and the text that none can change any more: after `response`, all of it."""
        text = "" if self.detokenizer is None else self.detokenizer.take_piece()
        first, self.num_told = self.num_told, len(self.seq.output_token_ids)
        token_ids = tuple(self.seq.output_token_ids[first:])
        if not text and not token_ids:
            return None
        logprobs = None if self.params.logprobs is None else tuple(self.logprobs[first:])
        return Delta(self.index, text, token_ids, logprobs)

    def wants_prompt_logprobs(self, start: int) -> bool:
        """Whether a row that starts at token `start` has log-probabilities of the prompt still to report."""
        last = len(self.seq.prompt_token_ids) - 1
        return self.params.prompt_logprobs is not None and start < last and len(self.prompt_logprobs) <= last

    def push_prompt(self, start: int, report: Report, first_row: int, num_rows: int) -> None:
        """Take in the log-probabilities that rows of tokens [start, start + num_rows) give their successors."""
        prompt = self.seq.prompt_token_ids
        assert self.params.prompt_logprobs is not None
        for i in range(num_rows):
            position = start + i + 1
            if position == len(self.prompt_logprobs) and position < len(prompt):
                self.prompt_logprobs.append(
                    token_logprob(prompt[position], report, first_row + i, self.params.prompt_logprobs)
                )

    def response(self) -> Response:
        """The finished response."""
        text = ""
        if self.detokenizer is not None:
            self.detokenizer.finish()
            text = self.detokenizer.text
        reason = self.seq.finish_reason
        assert reason is not None
        return Response(
            text=(self.prompt if self.params.full_text else "") + text,
            token_ids=tuple(self.seq.output_token_ids),
            prompt_token_ids=tuple(self.seq.prompt_token_ids),
            finish_reason=reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            index=self.index,
            request_id=self.request_id,
            num_preemptions=self.seq.num_preemptions,
            cached_tokens=self.seq.num_cached_tokens,
            timings=self._timings(),
        )

    def _timings(self) -> Timings:
        return Timings(
            None if self.scheduled is None else self.scheduled - self.added,
            tuple(moment - self.added for moment in self.token_times),
            time.perf_counter() - self.added,
        )


def token_logprob(token_id: int, report: Report, row: int, num_top: int) -> TokenLogprob:
    logprob, top_ids, top_logprobs = report
    top = zip(top_ids[row, :num_top].tolist(), top_logprobs[row, :num_top].tolist(), strict=True)
    return TokenLogprob(token_id, float(logprob[row]), tuple(top))
