"""What a user passes in and gets back: `SamplingParams`, `Response`, `EngineConfig`. No JAX."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]

DEFAULT_MODEL = "smollm2-135m"
"""What every command and function that takes a model runs if none is named."""

MAX_LOGPROBS = 20
_MORE_THAN_0 = 1e-6
MAX_LOGIT_BIAS = 512
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
UNTUNED_BUDGET = 512
"""What max_num_batched_tokens="auto" is where nothing can be timed."""
QUANTIZATIONS = ("int8", "int4", "fp8")
POLICIES = ("splitfuse", "prefill_first", "orca")
"""What a step is filled with; see `fastgen_jax.scheduler.policies`."""


def refuse_unknown(cls: type, fields: Mapping[str, Any]) -> None:
    """Raise a TypeError naming every field that `cls`, a dataclass, does not have."""
    valid = sorted(f.name for f in dataclasses.fields(cls))
    if unknown := sorted(set(fields) - set(valid)):
        raise TypeError(
            f"{cls.__name__} has no field {', '.join(map(repr, unknown))}; the fields are {', '.join(valid)}"
        )


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Every field is honoured for every request; there are no others.

    The logits go through, in this order: logit_bias, repetition_penalty, presence_penalty,
    frequency_penalty, min_tokens, allowed_token_ids, temperature, top_k, top_p, min_p. That is the
    order, and these are the definitions, of Hugging Face's `LogitsProcessor`s; the presence and
    frequency penalties, which Hugging Face lacks, are OpenAI's, over the generated tokens.

    max_tokens: generated tokens at most; None is as many as the context holds.
    min_tokens: generated tokens before EOS, a stop token or a stop string may end the text.
    temperature: 0 is greedy.
    top_p, top_k, min_p: filters for temperature > 0; 1.0, 0 and 0.0 turn them off. Tokens tied with the
        last one kept are kept.
    repetition_penalty: over prompt and generated tokens; 1.0 is off.
    logit_bias: token id -> added to its logit, at most 512 entries.
    allowed_token_ids: the only tokens that may be generated; None is all.
    stop: strings, 64 of 1024 characters at most, that end the text where they first appear; they are cut off
        unless include_stop_str_in_output.
    stop_token_ids: tokens that end the text, beside the model's EOS; their text is cut off likewise.
    ignore_eos: go on after EOS (stop and stop_token_ids still count).
    skip_special_tokens: leave special tokens out of the text.
    seed: the same seed gives the same tokens whatever else is in the batch; sample i of n uses seed + i.
    n: how many samples of one prompt.
    logprobs: how many of the likeliest tokens to report for each generated token, 0 to 20; None is no
        report. Log-probabilities are the model's own, before any processor.
    prompt_logprobs: the same for the prompt's tokens (the first has none).
    echo, return_full_text: two names for: the text starts with the prompt.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    return_full_text: bool = False

    def __new__(cls, *_args: Any, **fields: Any) -> "SamplingParams":
        refuse_unknown(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            if isinstance(value := getattr(self, name), list | set | frozenset):
                object.__setattr__(self, name, tuple(value))
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        elif isinstance(self.logit_bias, Mapping):  # a copy: the caller may go on changing theirs
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _check_sampling(self)

    @property
    def full_text(self) -> bool:
        """Whether the response's text starts with the prompt."""
        return self.echo or self.return_full_text

    def replace(self, **fields: Any) -> "SamplingParams":
        """A copy with `fields` changed, checked like a new one."""
        return SamplingParams(**{**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **fields})


def _number(name: str, value: Any, low: float, high: float, *, whole: bool = False, none: bool = False) -> None:
    """Raise unless `low <= value <= high`; `whole` wants an int, `none` lets None through."""
    if value is None and none:
        return
    kinds = (int,) if whole else (int, float)
    want = "a whole number " if whole else "a number "
    if low == _MORE_THAN_0:
        want += f"above 0 and at most {high}"
    else:
        want += f"from {low}" if high == math.inf else f"from {low} to {high}"
    want += " or None" if none else ""
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be {want}")
    if not low <= value <= high or value == math.inf:
        raise ValueError(f"{name}={value!r} is out of range; it must be {want}")


def _check_sampling(p: SamplingParams) -> None:
    _number("max_tokens", p.max_tokens, 1, math.inf, whole=True, none=True)
    _number("min_tokens", p.min_tokens, 0, math.inf, whole=True)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ValueError(f"min_tokens={p.min_tokens} is more than max_tokens={p.max_tokens}")
    _number("temperature", p.temperature, 0, 10**6)
    _number("top_p", p.top_p, _MORE_THAN_0, 1)
    _number("top_k", p.top_k, 0, 2**31 - 1, whole=True)
    _number("min_p", p.min_p, 0, 1)
    _number("repetition_penalty", p.repetition_penalty, _MORE_THAN_0, 10**6)
    _number("presence_penalty", p.presence_penalty, -2, 2)
    _number("frequency_penalty", p.frequency_penalty, -2, 2)
    _number("seed", p.seed, 0, 2**63 - 1, whole=True, none=True)
    _number("n", p.n, 1, 1024, whole=True)
    _number("logprobs", p.logprobs, 0, MAX_LOGPROBS, whole=True, none=True)
    _number("prompt_logprobs", p.prompt_logprobs, 0, MAX_LOGPROBS, whole=True, none=True)
    for name in (
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "echo",
        "return_full_text",
    ):
        if not isinstance(value := getattr(p, name), bool):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be True or False")
    if not isinstance(p.stop, tuple) or not all(isinstance(s, str) and s for s in p.stop):
        raise ValueError(f"stop={p.stop!r:.80}; it must be one string or a list of strings, none of them empty")
    if len(p.stop) > MAX_STOPS:
        raise ValueError(f"stop has {len(p.stop)} strings; it may have {MAX_STOPS} at most")
    if any(len(s) > MAX_STOP_LENGTH for s in p.stop):
        raise ValueError(f"a stop string has {max(map(len, p.stop))} characters; it may have {MAX_STOP_LENGTH} at most")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(p, name)
        if ids is not None and not isinstance(ids, tuple):
            raise TypeError(f"{name}={ids!r} is {type(ids).__name__}; it must be a list of token ids")
        for token_id in ids or ():
            _number(f"a token id in {name}", token_id, 0, 2**31 - 1, whole=True)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise ValueError("allowed_token_ids=[] allows no token at all; None allows every token")
    if not isinstance(p.logit_bias, Mapping) or len(p.logit_bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must map at most {MAX_LOGIT_BIAS} token ids to numbers, not {p.logit_bias!r:.80}")
    for token_id, bias in p.logit_bias.items():
        _number("a token id in logit_bias", token_id, 0, 2**31 - 1, whole=True)
        _number(f"logit_bias[{token_id}]", bias, -1e30, 1e30)


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, and of the likeliest tokens in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """What one step added to one sample of a request that is under way.

    text: may be empty, for a token can leave a character or a possible stop string unfinished; all of a sample's
        texts joined are its response's (without echo). An empty delta may bring the last of the text.
    logprobs: one entry for each of token_ids, or None where SamplingParams.logprobs was None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was added: until it was first scheduled, until each of its tokens, until its end.

    None for what never happened.
    """

    queue: float | None = None
    tokens: tuple[float, ...] = ()
    total: float | None = None

    @property
    def first_token(self) -> float | None:
        return self.tokens[0] if self.tokens else None


@dataclass(frozen=True)
class Response:
    """One finished sample of one prompt.

    finish_reason: "stop" (EOS, a stop token or a stop string), "length" (max_tokens or the context's end),
        "abort" (aborted; text and token_ids are what there was).
    token_ids: every generated token, the one that stopped it included.
    logprobs: one entry for each of token_ids, or None where SamplingParams.logprobs was None.
    prompt_logprobs: one entry for each prompt token, the first None; fewer where the request was aborted before.
    index: which of SamplingParams.n samples this is.
    cached_tokens: prompt tokens whose K/V were found in the prefix cache when the sample first ran.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    index: int = 0
    request_id: int = 0
    num_preemptions: int = 0
    cached_tokens: int = 0
    timings: Timings = Timings()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class EngineConfig:
    """How an engine divides memory and time. `None` is chosen for the device and the model.

    dtype: of the weights, the activations and, unless kv_cache_dtype says otherwise, the KV pool: float32, bfloat16 or
        float16.
    kv_cache_dtype: of the KV pool: "auto", which is dtype, or "fp8" (`float8_e4m3fn`), which takes 8 bits a number and
        scales of the checkpoint's, where it has them.
    block_size: tokens in a block of KV memory.
    num_blocks: blocks in the pool, the null block included; otherwise as many as fit.
    gpu_memory_utilization: share, for weights, one step and the pool, of the memory that JAX may use on a GPU
        (75 % of it unless XLA_CLIENT_MEM_FRACTION says otherwise). On a CPU the pool takes up to 1 GiB.
    max_num_batched_tokens: the token budget of a step (Dynamic SplitFuse). "auto" times a step of every bucket
        before the warm-up, once for a model and a machine, and takes the smallest whose throughput is all but the best;
        with warm_up=False and nothing kept from before it is 512.
    max_step_ms: with "auto", the budget is instead the largest step timed that stays within so many milliseconds;
        timing ends two buckets behind the best throughput. Less for shorter gaps; more where requests queue for their
        first token and gaps may be longer.
    max_num_seqs: sequences in a step at most; never more than max_num_batched_tokens.
    max_model_len: longest prompt + output; at most the model's own.
    backend: attention backend, one of `fastgen_jax.kernels.BACKENDS`.
    quantization: how the weights of the projections are stored when a checkpoint that has them in 16 or 32 bits is
        loaded: int8, int4 or fp8; activations stay in `dtype`. A checkpoint that is quantised says itself how.
    tensor_parallel: devices that share the model: each has a part of the heads, of the MLP and of the vocabulary.
    expert_parallel: of a mixture of experts shared by several devices, each has some experts whole, instead of a part
        of every one.
    seed: of requests that bring none.
    policy: what a step is filled with: "splitfuse", or one of the baselines it is measured against, "prefill_first"
        (vLLM 0.2's) and "orca". These never split a prompt, so max_num_batched_tokens must hold all of a sequence.
    prefix_caching: keep the K/V of full blocks until their memory is needed, and let sequences that begin with the
        same tokens share them. The tokens are the same either way, up to rounding.
    overlap: dispatch step n+1 before step n's tokens reach the host. The tokens are the same either way.
    warm_up: compile every program at construction; otherwise a step compiles what it and the decode after it need.
    compile_cache: keep compiled programs on disk between runs. This is a setting of JAX's for the whole
        process; one that is already there is left alone.
    """

    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int | Literal["auto"] = "auto"
    max_step_ms: float | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    backend: str | None = None
    quantization: str | None = None
    tensor_parallel: int = 1
    expert_parallel: bool = False
    seed: int = 0
    policy: str = "splitfuse"
    prefix_caching: bool = True
    overlap: bool = True
    warm_up: bool = True
    compile_cache: bool = True

    def __new__(cls, *_args: Any, **fields: Any) -> "EngineConfig":
        refuse_unknown(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not supported; choose {', '.join(DTYPES)}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization={self.quantization!r} is not known; choose {', '.join(QUANTIZATIONS)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            choices = ", ".join(KV_CACHE_DTYPES)
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not supported; choose {choices}")
        _number("block_size", self.block_size, 1, 1024, whole=True, none=True)
        _number("num_blocks", self.num_blocks, 2, math.inf, whole=True, none=True)
        _number("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1)
        if self.max_num_batched_tokens != "auto":
            _number("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20, whole=True)
        _number("max_step_ms", self.max_step_ms, _MORE_THAN_0, 10**6, none=True)
        _number("max_num_seqs", self.max_num_seqs, 1, 2**16, whole=True, none=True)
        _number("max_model_len", self.max_model_len, 1, math.inf, whole=True, none=True)
        _number("tensor_parallel", self.tensor_parallel, 1, 1024, whole=True)
        _number("seed", self.seed, 0, 2**31 - 1, whole=True)
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is not known; choose {', '.join(POLICIES)}")
        for name in ("expert_parallel", "prefix_caching", "overlap", "warm_up", "compile_cache"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be True or False")
        if self.max_num_batched_tokens == "auto":
            if self.policy != "splitfuse":
                raise ValueError(
                    f"policy={self.policy!r} never splits a prompt: set max_num_batched_tokens to the longest sequence"
                )
        elif self.max_step_ms is not None:
            raise ValueError(
                f"max_step_ms={self.max_step_ms} chooses max_num_batched_tokens, which is given as "
                f'{self.max_num_batched_tokens}; leave that "auto"'
            )
        elif self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is more than max_num_batched_tokens={self.max_num_batched_tokens}: "
                "a step must have a token for every running sequence"
            )


@dataclass(frozen=True)
class EngineStats:
    """An engine's state and its totals since it was made.

    running, waiting: sequences. blocks, free_blocks: of the KV pool, the null block left out.
    steps, tokens, padding: steps run, tokens they computed, and tokens they were padded by to their buckets.
    decode_tokens: of those tokens, the ones that decodes computed, one each a step.
    prompt_tokens, cached_tokens: prompt tokens of the sequences that have begun to run, and how many of them were
        found in the prefix cache instead of being computed.
    generated_tokens: tokens that became part of a response. preemptions: times a sequence gave up its blocks.
    dead_rows: rows computed for sequences that had already ended (overlapped loop).
    compiled: programs built. compiled_after_warm_up: those of them built after construction; 0 with warm_up.
    """

    running: int
    waiting: int
    blocks: int
    free_blocks: int
    steps: int
    tokens: int
    decode_tokens: int
    padding: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    dead_rows: int
    compiled: int
    compiled_after_warm_up: int

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens found in the prefix cache; 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
