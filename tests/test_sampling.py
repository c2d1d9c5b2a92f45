"""Sampling on the device: Hugging Face's processors, exact distributions, seeds, and nothing done unasked."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
import transformers

from fastgen_jax import sampling
from fastgen_jax.sampling_state import SamplingRows, SamplingState, pack_row, seed_words, set_row
from fastgen_jax.types import SamplingParams

EOS = 2
VOCAB_SIZE = 97  # neither whole words of a bit mask nor whole blocks of 128
NUM_ROWS = 16  # of every batch unless a test says otherwise, so that tests share a few compiled programs
MAX_MODEL_LEN = 24
NUM_DRAWS = 20_000
FILTERS = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PARAMS_OF_ROWS = (*FILTERS, *PENALTIES, "min_tokens")

jit_sample = jax.jit(sampling.sample)
jit_process_logits = jax.jit(sampling.process_logits)
jit_set_row = jax.jit(set_row)


@pytest.fixture(autouse=True)
def _no_rank_promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"):
        yield


@dataclass(frozen=True)
class Request:
    """One row's request: its sampling, its tokens so far, and its stop tokens (EOS)."""

    params: SamplingParams
    prompt: Sequence[int] = (5, 6, 6)
    output: Sequence[int] = ()


def padding_rows(num_rows: int) -> SamplingRows:
    """Greedy rows without any processor, as numpy arrays to fill in."""
    ints = ("slot", "num_tokens", "num_prompt_tokens", "top_k", "min_tokens")
    zeros = ("temperature", "min_p", "presence_penalty", "frequency_penalty")
    ones = ("top_p", "repetition_penalty")
    flags = ("has_bias", "has_allowed")
    arrays = {name: np.zeros(num_rows, np.int32) for name in ints}
    arrays |= {name: np.zeros(num_rows, np.float32) for name in zeros}
    arrays |= {name: np.ones(num_rows, np.float32) for name in ones}
    arrays |= {name: np.zeros(num_rows, np.bool_) for name in flags}
    return SamplingRows(seed=np.zeros((num_rows, 2), np.uint32), **arrays)


def pack(requests: Sequence[Request], vocab_size: int, num_rows: int) -> tuple[SamplingRows, SamplingState]:
    """The rows of a step, padding last, and the state; request i is in slot num_rows - 1 - i."""
    rows = padding_rows(num_rows)
    state = SamplingState.allocate(num_rows, MAX_MODEL_LEN, vocab_size)
    token_pool = np.full((num_rows, MAX_MODEL_LEN), 7, np.int32)  # 7 is what an earlier sequence left behind
    for i, request in enumerate(requests):
        params, slot = request.params, num_rows - 1 - i
        tokens = [*request.prompt, *request.output]
        token_pool[slot, : len(tokens)] = tokens
        state = jit_set_row(state, slot, *pack_row(params, (EOS,), vocab_size))
        columns = {name: getattr(params, name) for name in PARAMS_OF_ROWS} | {
            "slot": slot,
            "num_tokens": len(tokens),
            "num_prompt_tokens": len(request.prompt),
            "seed": seed_words(params.seed or 0),
            "has_bias": bool(params.logit_bias),
            "has_allowed": params.allowed_token_ids is not None,
        }
        for name, value in columns.items():
            getattr(rows, name)[i] = value
    return rows, replace(state, token_pool=jnp.asarray(token_pool))


def pad_rows(logits: np.ndarray, num_rows: int) -> np.ndarray:
    return np.concatenate([logits, np.zeros((num_rows - len(logits), logits.shape[1]), logits.dtype)])


def processed(logits: np.ndarray, requests: Sequence[Request], num_rows: int = NUM_ROWS) -> np.ndarray:
    rows, state = pack(requests, logits.shape[1], num_rows)
    return np.asarray(jit_process_logits(pad_rows(logits, num_rows), rows, state))[: len(logits)]


def sampled(logits: np.ndarray, requests: Sequence[Request], num_rows: int = NUM_ROWS) -> list[int]:
    rows, state = pack(requests, logits.shape[1], num_rows)
    return jit_sample(pad_rows(logits, num_rows), rows, state)[: len(logits)].tolist()


def by_hand(logits: Sequence[float], request: Request) -> list[float]:
    """The processed logits of the first tokens, the others being impossible."""
    row = np.full((1, VOCAB_SIZE), -np.inf, np.float32)
    row[0, : len(logits)] = logits
    return processed(row, [request])[0, : len(logits)].tolist()


def random_logits(seed: int, num_rows: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


@functools.cache
def tiny_model() -> Any:
    """Any model: `generate`'s choice of processors is a method of it."""
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    return transformers.GPT2LMHeadModel(config)


def hugging_face(logits: np.ndarray, request: Request) -> np.ndarray:
    """The request's logits [V] through transformers' processors, chosen and ordered by `generate`'s code."""
    p = request.params
    config = transformers.GenerationConfig(
        do_sample=p.temperature > 0,
        sequence_bias={(token,): float(bias) for token, bias in p.logit_bias.items()} or None,
        repetition_penalty=p.repetition_penalty,
        min_new_tokens=p.min_tokens,
        temperature=float(p.temperature) or None,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p or None,
        num_beams=1,
        num_return_sequences=1,
    )
    config._eos_token_tensor = torch.tensor([EOS])
    allowed = p.allowed_token_ids
    processors = tiny_model()._get_logits_processor(
        config,
        input_ids_seq_length=len(request.prompt),
        prefix_allowed_tokens_fn=None if allowed is None else lambda batch, ids: list(allowed),
    )
    input_ids = torch.tensor([[*request.prompt, *request.output]])
    result = processors(input_ids, torch.tensor(logits[None]))[0].numpy()
    return result - result.max() if p.temperature > 0 else result


PROCESSORS = {
    "logit_bias": SamplingParams(logit_bias={3: 4.5, 11: -2.0}),
    "repetition_penalty": SamplingParams(repetition_penalty=1.3),
    "repetition_penalty below 1": SamplingParams(repetition_penalty=0.7),
    "min_tokens": SamplingParams(min_tokens=4),
    "allowed_token_ids": SamplingParams(allowed_token_ids=[0, 2, 31, 32, 96]),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.0, top_k=7),
    "top_k of more than there are": SamplingParams(temperature=1.0, top_k=10**6),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "top_p of almost nothing": SamplingParams(temperature=1.0, top_p=1e-6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "min_p of 1": SamplingParams(temperature=1.0, min_p=1.0),
    "top_k, then top_p": SamplingParams(temperature=2.0, top_k=20, top_p=0.7),
    "top_p, then min_p": SamplingParams(temperature=2.0, top_p=0.9, min_p=0.1),
    "filters of a greedy row": SamplingParams(top_k=3, top_p=0.5, min_p=0.5),
    "all": SamplingParams(
        logit_bias={3: 4.5, 11: -2.0, EOS: 9.0},
        repetition_penalty=1.2,
        min_tokens=4,
        allowed_token_ids=list(range(90)),
        temperature=1.5,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
    ),
}


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 256])
@pytest.mark.parametrize("params", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_processors_are_hugging_faces(params: SamplingParams, vocab_size: int) -> None:
    requests = [Request(params, output=output) for output in ([], [9, 9, 40], [9, 9, 40, 3])]
    logits = random_logits(vocab_size, len(requests), vocab_size)
    expected = np.stack([hugging_face(row, request) for row, request in zip(logits, requests, strict=True)])
    np.testing.assert_allclose(processed(logits, requests), expected, rtol=1e-5, atol=1e-5)


def test_hugging_faces_processors_all_do_something() -> None:
    """So that the test above compares what it says."""
    logits = random_logits(0, 1, VOCAB_SIZE)[0]
    for name, params in PROCESSORS.items():
        shift = logits.max() if params.temperature > 0 else 0
        result = hugging_face(logits, Request(params, output=[9, 9, 40]))
        unchanged = np.allclose(result, logits - shift)
        assert unchanged == (name in ("top_k of more than there are", "filters of a greedy row")), name


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_batch_is_its_rows_one_by_one(seed: int) -> None:
    requests = [
        Request(params, prompt=(5, i % 7), output=[9] * (i % 6)) for i, params in enumerate(PROCESSORS.values())
    ]
    logits = random_logits(seed, len(requests), VOCAB_SIZE)
    together = processed(logits, requests)
    alone = [processed(logits[i : i + 1], [request], num_rows=1)[0] for i, request in enumerate(requests)]
    np.testing.assert_array_equal(together, np.stack(alone))


def test_eos_may_come_once_min_tokens_are_there_before_it() -> None:
    requests = [Request(SamplingParams(min_tokens=2), output=[9] * n) for n in range(4)]
    excluded = np.isneginf(processed(random_logits(0, 4, VOCAB_SIZE), requests))
    assert excluded[:, EOS].tolist() == [True, True, False, False]
    assert excluded.sum() == 2


def test_presence_and_frequency_penalties_are_openais_over_the_output() -> None:
    """Output 4 once and 9 three times; the prompt's 5 and 6 are not penalised. All is exact in binary."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    expected = [2, 2, 2, 2, 2 - 0.5 - 0.25, 2, 2, 2, 2, 2 - 0.5 - 0.75, 2, 2]
    assert by_hand([2.0] * 12, Request(params, prompt=[5, 6], output=[9, 4, 9, 9])) == expected


def test_negative_presence_and_frequency_penalties_reward() -> None:
    params = SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.5)
    assert by_hand([0.0] * 4, Request(params, prompt=[0], output=[3, 3])) == [0, 0, 0, 1 + 2 * 0.5]


def test_logit_bias_comes_before_the_repetition_penalty_and_both_are_exact() -> None:
    params = SamplingParams(logit_bias={5: 4.0, 6: -4.0}, repetition_penalty=2.0)
    expected = [1, 1, 1, 1, 1, (1 + 4) / 2, (1 - 4) * 2, 1 / 2]
    assert by_hand([1.0] * 8, Request(params, prompt=[5, 6, 6, 7])) == expected


def test_what_an_earlier_sequence_left_in_the_slot_counts_for_nothing() -> None:
    """`pack` leaves token 7 at every position past the sequence's end."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    result = by_hand([1.0] * 9, Request(params, prompt=[1], output=[3]))
    assert result == [1, 1 / 2, 1, 1 / 2 - 1, 1, 1, 1, 1, 1]


def test_all_512_biases_count() -> None:
    biases = {token: token / 4 for token in range(100, 612)}
    logits = np.zeros((1, 700), np.float32)
    result = processed(logits, [Request(SamplingParams(logit_bias=biases))], num_rows=1)
    assert result[0].tolist() == [biases.get(token, 0.0) for token in range(700)]


@pytest.mark.parametrize(
    "params, kept",
    [
        (SamplingParams(temperature=1.0, top_k=1), [1]),
        (SamplingParams(temperature=1.0, top_k=2), [1, 3, 4, 5]),
        (SamplingParams(temperature=1.0, top_k=4), [1, 3, 4, 5]),
        (SamplingParams(temperature=1.0, top_k=5), [0, 1, 3, 4, 5]),
        (SamplingParams(temperature=1.0, top_p=0.3), [1]),
        (SamplingParams(temperature=1.0, top_p=0.45), [1, 3, 4, 5]),
        (SamplingParams(temperature=1.0, top_p=0.95), [0, 1, 3, 4, 5]),
        (SamplingParams(temperature=1.0, min_p=0.49), [1, 3, 4, 5]),
    ],
)
def test_tied_tokens_share_their_fate(params: SamplingParams, kept: list[int]) -> None:
    """Probabilities 0.08, 0.36, 0.02 and three of 0.18."""
    logits = np.log([0.08, 0.36, 0.02, 0.18, 0.18, 0.18]).tolist()
    assert np.flatnonzero(np.isfinite(by_hand(logits, Request(params)))).tolist() == kept


@pytest.mark.parametrize("seed", range(3))
def test_top_k_is_exact_to_the_last_bit(seed: int) -> None:
    """Neighbouring floats above 1 and below -1, at a temperature that makes them all but even."""
    steps = np.random.default_rng(seed).choice(256, VOCAB_SIZE, replace=False) - 128
    logits = np.sign(steps + 0.5) + steps.astype(np.float32) * np.finfo(np.float32).eps
    logits = logits.astype(np.float32)
    assert len(set(logits)) == VOCAB_SIZE
    for k in (1, 5, 50, 96):
        result = processed(logits[None], [Request(SamplingParams(temperature=100.0, top_k=k))])[0]
        assert np.flatnonzero(np.isfinite(result)).tolist() == sorted(np.argsort(-steps)[:k])


def exact_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution [V] that temperature, top_k, top_p and min_p define, by sorting in float64."""
    p = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    p /= p.sum()
    if params.top_k:
        p[np.argsort(-p)[params.top_k :]] = 0
        p /= p.sum()
    order = np.argsort(-p)
    p[order[np.cumsum(p[order]) - p[order] >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=3.0),
        SamplingParams(temperature=1.5, top_k=11),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.05),
        SamplingParams(temperature=2.0, top_k=60, top_p=0.9, min_p=0.02),
    ],
    ids=lambda p: ",".join(f"{k}={getattr(p, k)}" for k in FILTERS),
)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    """20,000 draws of 200 seeds at 100 output indices each; the vocabulary spans three blocks."""
    logits = random_logits(1, 1, 300)[0]
    rows = padding_rows(NUM_DRAWS)
    for name in FILTERS:
        getattr(rows, name)[:] = getattr(params, name)
    rows.seed[:, 1], rows.num_tokens[:] = np.divmod(np.arange(NUM_DRAWS), 100)
    state = SamplingState.allocate(1, MAX_MODEL_LEN, 300)
    tokens = jit_sample(np.tile(logits, (NUM_DRAWS, 1)), rows, state)

    expected = exact_probabilities(logits, params) * NUM_DRAWS
    counts = np.bincount(tokens, minlength=300)
    assert not counts[expected == 0].any()
    rare = expected < 5
    observed = [*counts[~rare], counts[rare].sum()]
    wanted = [*expected[~rare], expected[rare].sum()]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 5
    assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-4


def random_request(seed: int, num_output: int = 0) -> Request:
    return Request(SamplingParams(temperature=1.3, top_p=0.95, seed=seed), output=[9] * num_output)


def test_a_seed_gives_the_same_token_alone_and_anywhere_in_any_batch() -> None:
    logits = random_logits(3, 1, VOCAB_SIZE)
    mine = random_request(seed=2**40 + 21, num_output=4)
    alone = sampled(logits, [mine], num_rows=1)
    assert alone != [logits.argmax()]
    for num_rows, position in [(NUM_ROWS, 0), (NUM_ROWS, 7), (NUM_ROWS, 15), (33, 32)]:
        requests = [Request(params) for params in PROCESSORS.values()] * 3
        requests[position] = mine
        batch = random_logits(4, num_rows, VOCAB_SIZE)
        batch[position] = logits[0]
        assert [sampled(batch, requests[:num_rows], num_rows)[position]] == alone


@pytest.mark.parametrize(
    "requests",
    [
        [random_request(seed=i) for i in range(NUM_ROWS)],
        [random_request(seed=i << 32) for i in range(NUM_ROWS)],
        [random_request(seed=0, num_output=i) for i in range(NUM_ROWS)],
    ],
    ids=["low word of the seed", "high word of the seed", "output index"],
)
def test_the_draw_depends_on(requests: list[Request]) -> None:
    """97 tokens of equal logits: 16 draws rarely meet, and those that depend on nothing always do."""
    assert len(set(sampled(np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32), requests))) > 8


def test_the_draw_does_not_depend_on_the_prompts_length() -> None:
    logits = np.zeros((8, VOCAB_SIZE), np.float32)
    params = SamplingParams(temperature=1.0, seed=1)
    assert len(set(sampled(logits, [Request(params, [1] * n, [3, 4]) for n in range(1, 9)]))) == 1


@pytest.mark.parametrize(
    "vocab_size, dtype", [(VOCAB_SIZE, jnp.float32), (300, jnp.float32), (VOCAB_SIZE, jnp.bfloat16)]
)
def test_greedy_is_the_first_of_the_likeliest(vocab_size: int, dtype: Any) -> None:
    """300 tokens are three blocks. Logits are rounded to a half, so that there are ties."""
    logits = (np.round(2 * random_logits(0, NUM_ROWS, vocab_size)) / 2).astype(dtype)
    expected = np.argmax(logits.astype(np.float32), axis=1).tolist()
    assert sampled(logits, [Request(SamplingParams())] * NUM_ROWS) == expected


def test_half_precision_logits_are_processed_in_float32() -> None:
    requests = [Request(params) for params in PROCESSORS.values()]
    logits = random_logits(0, len(requests), VOCAB_SIZE).astype(jnp.bfloat16)
    result = processed(logits, requests)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, processed(logits.astype(np.float32), requests))


@pytest.mark.parametrize("token", [0, 130, 299])
def test_the_only_possible_token_is_taken(token: int) -> None:
    requests = [Request(params.replace(allowed_token_ids=None)) for params in PROCESSORS.values()]
    logits = np.full((len(requests), 300), -np.inf, np.float32)
    logits[:, token] = -5.0
    assert sampled(logits, requests) == [token] * len(requests)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    """Whatever the random number, the smallest and (out of its range) 1 included."""
    weights = np.zeros((4, 384), np.float32)
    weights[:, [5, 140, 141]] = [0.1, 0.7, 1e-7]
    uniform = np.array([0.0, 0.1, 0.99, 1.0], np.float32)
    assert jax.jit(sampling._draw)(weights, uniform).tolist() == [5, 5, 140, 140]


def test_rounding_that_makes_the_rest_of_the_random_number_negative_draws_nothing_impossible() -> None:
    index, _ = sampling._pass(jnp.array([[0.0, 0.0, 0.5, 0.5]]), jnp.array([-1e-8]))
    assert index.tolist() == [2]


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-6, 1e6])
def test_no_temperature_and_no_bias_gives_nan(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias={3: -1e30, 4: 1e30, 5: 1e30}, top_p=0.9, top_k=9)
    requests = [Request(params.replace(seed=seed)) for seed in range(8)]
    logits = random_logits(0, 8, VOCAB_SIZE)
    assert not np.isnan(processed(logits, requests)).any()
    assert set(sampled(logits, requests)) <= {4, 5}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_tokens_that_min_tokens_all_forbids_come_nevertheless(temperature: float) -> None:
    """As with Hugging Face, which gives them logit 0."""
    request = Request(SamplingParams(temperature=temperature, allowed_token_ids=[EOS], min_tokens=5))
    logits = random_logits(0, 1, VOCAB_SIZE)
    np.testing.assert_array_equal(processed(logits, [request])[0], hugging_face(logits[0], request))
    assert sampled(logits, [request]) == [EOS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_exclude_everything_give_token_0(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1)
    assert sampled(np.full((1, 300), -np.inf, np.float32), [Request(params)]) == [0]


def primitives(jaxpr: Any, *, branches: bool) -> Iterator[tuple[str, int]]:
    """(name, size of the largest output) of every operation; of those inside `cond` only if `branches`."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in ("jit", "pjit"):
            yield name, max(math.prod(out.aval.shape) for out in equation.outvars)
        if name != "cond" or branches:
            for param in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(param, "eqns"):
                    yield from primitives(param, branches=branches)


def test_what_no_row_asks_for_is_not_computed_and_nothing_sorts() -> None:
    """Outside of conditionals nothing of the logits' size is computed; `pad` has nothing to add here."""
    rows, state = pack([], 1024, NUM_ROWS)
    jaxpr = jax.make_jaxpr(sampling.sample)(random_logits(0, NUM_ROWS, 1024), rows, state)
    always = {name for name, size in primitives(jaxpr, branches=False) if size >= NUM_ROWS * 1024}
    assert always == {"cond", "pad", "reshape"}
    all_names = {name for name, _ in primitives(jaxpr, branches=True)}
    assert {"exp", "scatter-add", "cumsum"} <= all_names
    assert not {"sort", "top_k", "approx_top_k"} & all_names


def test_padding_rows_ask_for_nothing() -> None:
    """Whatever the slot they name holds: here the bias, the mask and the tokens of a real request."""
    request = Request(PROCESSORS["all"], output=[9, 9])
    rows, state = pack([request] * NUM_ROWS, VOCAB_SIZE, NUM_ROWS)
    for name, padding in asdict(padding_rows(2)).items():
        getattr(rows, name)[3:5] = padding
    logits = random_logits(0, NUM_ROWS, VOCAB_SIZE)
    result = np.asarray(jit_process_logits(logits, rows, state))
    unchanged = (result == logits).all(axis=1)
    assert np.flatnonzero(unchanged).tolist() == [3, 4]


@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs_are_the_log_softmax(k: int) -> None:
    logits = random_logits(0, 6, VOCAB_SIZE)
    token_ids = np.array([0, 96, 3, 3, 50, 7], np.int32)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=1)
    top = expected.topk(k, dim=1)

    chosen, top_ids, top_logprobs = jax.jit(sampling.logprobs, static_argnums=2)(logits, token_ids, k)

    np.testing.assert_allclose(chosen, expected[np.arange(6), token_ids], atol=2e-6)
    np.testing.assert_allclose(top_logprobs, top.values, atol=2e-6)
    np.testing.assert_array_equal(top_ids, top.indices)


def test_logprobs_of_excluded_tokens_are_minus_infinity() -> None:
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    chosen, _, top_logprobs = sampling.logprobs(jnp.asarray(logits), jnp.array([1]), 3)
    assert chosen.tolist() == [-math.inf]
    np.testing.assert_allclose(top_logprobs[0], [-math.log(2), -math.log(2), -math.inf], atol=1e-6)


def test_pack_row_is_bits_and_padded_biases() -> None:
    """A vocabulary of 40 needs two words, the upper 24 bits of the second unused."""
    params = SamplingParams(allowed_token_ids=[0, 31, 32, 39], logit_bias={7: 1.5, 39: -2.0})
    row = pack_row(params, [1, 33, 40, 5000], 40)
    assert row.allowed_bits.tolist() == [1 | 1 << 31, 1 | 1 << 7]
    assert row.stop_bits.tolist() == [1 << 1, 1 << 1]
    assert row.bias_ids.tolist() == [7, 39] + [40] * 510
    assert row.bias_values.tolist() == [1.5, -2.0] + [0.0] * 510
    assert pack_row(SamplingParams(), [], 40).allowed_bits.tolist() == [2**32 - 1, 2**8 - 1]


@pytest.mark.parametrize(
    "field",
    [{"allowed_token_ids": [3, 40]}, {"logit_bias": {40: 1.0}}, {"stop_token_ids": [40]}],
    ids=lambda f: next(iter(f)),
)
def test_pack_row_refuses_tokens_outside_the_vocabulary(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(field))} names token 40; the vocabulary has tokens 0 to 39$"):
        pack_row(SamplingParams(**field), [], 40)


def test_set_row_changes_its_slot_only() -> None:
    row = pack_row(PROCESSORS["all"], [EOS], VOCAB_SIZE)
    before = SamplingState.allocate(3, MAX_MODEL_LEN, VOCAB_SIZE)
    after = jit_set_row(before, 1, *row)
    for name, value in row._asdict().items():
        np.testing.assert_array_equal(getattr(after, name)[1], value)
        np.testing.assert_array_equal(getattr(after, name)[::2], getattr(before, name)[::2])
    np.testing.assert_array_equal(after.token_pool, before.token_pool)


def test_set_row_takes_the_state_it_is_given() -> None:
    """Every buffer of a donated state is reused, none copied."""
    before = SamplingState.allocate(3, MAX_MODEL_LEN, VOCAB_SIZE)
    row = pack_row(SamplingParams(), [EOS], VOCAB_SIZE)
    memory: Any = jax.jit(set_row, donate_argnums=0).lower(before, 1, *row).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(before))


def test_seed_words_are_high_and_low() -> None:
    assert seed_words(5 << 32 | 0xFFFFFFFF).tolist() == [5, 0xFFFFFFFF]
    assert seed_words(2**63 - 1).tolist() == [2**31 - 1, 2**32 - 1]
