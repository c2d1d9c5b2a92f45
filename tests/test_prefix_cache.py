"""Prefix caching: what is found and what is not, as literal traces, and that it never changes a token."""

from typing import Any

import jax
import pytest
from tiny import HF_CONFIG, SMALL, tiny_engine, tiny_model, tiny_params
from traces import A, B, C, D, add, both_loops, make_scheduler, num_free, run, sample, show, step, token, tokens_of

from fastgen_jax import EngineConfig, SamplingParams, kernels
from fastgen_jax.engine import Engine
from fastgen_jax.intake import max_cached_tokens
from fastgen_jax.models import llama
from fastgen_jax.types import EngineStats, Response

# Traces of the scheduler. Blocks have 4 tokens; prompts are all alike unless given.


@pytest.mark.parametrize(
    ("num_prompt", "num_computed"),
    [(1, 1), (3, 3), (4, 4), (5, 1), (8, 4), (9, 1), (12, 4), (13, 5), (16, 8)],
)
def test_full_blocks_are_found_and_the_last_token_is_computed(num_prompt: int, num_computed: int) -> None:
    """A leaves two full blocks and a third of one token."""
    scheduler = make_scheduler(caching=True)
    add(scheduler, A, 9, 1)
    assert run(scheduler) == ["A9"]
    b = add(scheduler, B, num_prompt, 1)
    assert run(scheduler) == [f"B{num_computed}"]
    assert b.num_cached_tokens == num_prompt - num_computed


def test_a_block_is_found_only_behind_the_same_tokens() -> None:
    scheduler = make_scheduler(caching=True)
    add(scheduler, A, 0, 1, prompt=[1, 1, 1, 1, 2, 2, 2, 2, 3])
    run(scheduler)
    for seq_id, prompt, num_cached in [
        (B, [1, 1, 1, 1, 2, 2, 2, 2, 4], 8),
        (C, [1, 1, 1, 1, 2, 2, 2, 5, 3], 4),
        (D, [5, 1, 1, 1, 2, 2, 2, 2, 3], 0),
    ]:
        seq = add(scheduler, seq_id, 0, 1, prompt=prompt)
        run(scheduler)
        assert seq.num_cached_tokens == num_cached


def test_without_caching_nothing_is_found() -> None:
    scheduler = make_scheduler(caching=False)
    for seq_id in (A, B):
        add(scheduler, seq_id, 9, 1)
    assert run(scheduler) == ["A9 B7", "B2"]


def test_other_salts_share_nothing_and_max_cached_tokens_is_kept() -> None:
    scheduler = make_scheduler(caching=True)
    add(scheduler, A, 9, 1)
    run(scheduler)
    add(scheduler, B, 9, 1, cache_salt=1)
    assert run(scheduler) == ["B9"]
    for seq_id, most, trace in [(C, 0, "C9"), (D, 7, "D5")]:
        add(scheduler, seq_id, 9, 1, max_cached_tokens=most)
        assert run(scheduler) == [trace]


@both_loops
def test_a_prefix_is_shared_within_the_step_that_computes_it(overlap: bool) -> None:
    scheduler = make_scheduler(budget=32, caching=True)
    seqs = [add(scheduler, seq_id, 0, 2, prompt=[1] * 8 + [seq_id] * 2) for seq_id in (A, B, C)]
    plan = scheduler.schedule()
    assert show(plan) == "A10 B2 C2"
    assert seqs[0].block_table[:2] == seqs[1].block_table[:2] == seqs[2].block_table[:2]
    assert len({seq.block_table[2] for seq in seqs}) == 3
    assert scheduler.block_pool.num_used == 2 + 3
    scheduler.update(plan, sample(plan))
    assert run(scheduler, overlap) == ["A1 B1 C1"]
    assert num_free(scheduler) == 999


@both_loops
def test_those_behind_a_split_prompt_wait_for_its_blocks(overlap: bool) -> None:
    """Only the last row of a step is split, so nobody computes what a begun prompt is about to."""
    scheduler = make_scheduler(budget=8, caching=True)
    for seq_id in (A, B, C):
        add(scheduler, seq_id, 0, 1, prompt=[1] * 20 + [seq_id])
    assert run(scheduler, overlap) == ["A8", "A8", "A5 B1 C1"]


@both_loops
def test_generated_tokens_are_found_too(overlap: bool) -> None:
    """The conversation's next turn: A's prompt of 6 and its output, of which the last token's K/V never was."""
    scheduler = make_scheduler(caching=True)
    a = add(scheduler, A, 6, 5)
    run(scheduler, overlap)
    b = add(scheduler, B, 0, 1, prompt=a.prompt_token_ids + a.output_token_ids + [5, 5])
    run(scheduler, overlap)
    assert b.num_cached_tokens == 8


def test_a_token_in_flight_is_not_known_until_update() -> None:
    """A's fourth token fills a block: planned in the second step, it is found once the first has come back."""
    scheduler = make_scheduler(caching=True)
    a = add(scheduler, A, 3, 9)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (show(first), show(second), a.num_registered_blocks) == ("A3", "A1", 0)
    scheduler.update(first, sample(first))
    assert a.num_registered_blocks == 1
    add(scheduler, B, 0, 1, prompt=[7, 7, 7, token(A, 3), 7])
    assert show(scheduler.schedule()) == "A1 B1"


@both_loops
def test_a_preempted_sequence_finds_its_blocks_if_they_are_still_there(overlap: bool) -> None:
    """B gives up three full blocks of two tokens, of which A takes the last."""
    scheduler = make_scheduler(num_blocks=7, block_size=2, caching=True)
    a = add(scheduler, A, 0, 5, prompt=[1, 1, 1])
    b = add(scheduler, B, 0, 6, prompt=[2, 2, 2])
    assert run(scheduler, overlap) == ["A3 B3", "A1 B1", "A1 B1", "A1 B1", "A1", "B3", "B1"]
    assert (a.output_token_ids, b.output_token_ids) == (tokens_of(a), tokens_of(b))
    assert (b.num_preemptions, b.num_cached_tokens) == (1, 0)  # nothing when it first ran


def test_what_is_cached_counts_as_free_and_makes_room() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4, caching=True)
    add(scheduler, A, 16, 1)
    run(scheduler)
    assert num_free(scheduler) == 4
    add(scheduler, B, 0, 1, prompt=[9] * 16)
    assert run(scheduler) == ["B16"]
    add(scheduler, C, 16, 1)
    assert run(scheduler) == ["C16"]


def test_blocks_found_free_are_not_there_for_the_tail() -> None:
    """B finds two of the free blocks and needs a third; there are three, one of which A's decodes want."""
    scheduler = make_scheduler(num_blocks=5, block_size=4, caching=True)
    add(scheduler, C, 9, 1)
    run(scheduler)
    add(scheduler, A, 0, 5, prompt=[1] * 4)
    assert step(scheduler) == "A4"
    b = add(scheduler, B, 9, 1)
    assert step(scheduler) == "A1"
    assert (b.slot, b.block_table, b.num_computed_tokens) == (None, [], 0)


def test_forgetting_ends_the_sharing_of_old_blocks_and_of_what_runs() -> None:
    scheduler = make_scheduler(caching=True)
    add(scheduler, A, 9, 9)
    step(scheduler)
    scheduler.forget_cache()
    for _ in range(8):
        step(scheduler)
    assert not scheduler.has_work
    add(scheduler, B, 9, 1)
    assert run(scheduler) == ["B9"]
    add(scheduler, C, 9, 1)
    assert run(scheduler) == ["C1"]


# The engine

COMMON = [3 + (i * i + 5 * i) % 120 for i in range(40)]
PROMPTS = [COMMON + [5 + i] * (1 + i) for i in range(5)] + [COMMON[:32], COMMON[:7] + [9] * 20, COMMON]
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
SIZES: dict[str, Any] = {"block_size": 8, "num_blocks": 24}
CONFIG = SMALL | SIZES


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return [r.token_ids for r in tiny_engine(prefix_caching=False, **SIZES).generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_the_same_with_the_cache(expected: list[tuple[int, ...]], overlap: bool) -> None:
    engine = tiny_engine(overlap=overlap, **SIZES)
    for _ in range(2):
        assert [r.token_ids for r in engine.generate(PROMPTS, GREEDY)] == expected
    turns = [prompt + list(output) + [5] for prompt, output in zip(PROMPTS, expected, strict=True)]
    cold = tiny_engine(prefix_caching=False, **SIZES)
    found = engine.generate(turns, GREEDY)
    assert [r.token_ids for r in found] == [r.token_ids for r in cold.generate(turns, GREEDY)]
    assert found[0].cached_tokens == 48  # of a prompt of 41 tokens and 9 generated ones, the last never computed
    stats = engine.stats()
    assert stats.free_blocks == stats.blocks
    assert stats.cache_hit_rate > 0.5


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_and_eviction_are_invisible(overlap: bool) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    cold, warm = tiny_engine(prefix_caching=False, overlap=overlap, **SIZES), tiny_engine(overlap=overlap, **SIZES)
    expected = [r.token_ids for r in cold.generate(PROMPTS, params)]
    for _ in range(2):
        assert [r.token_ids for r in warm.generate(PROMPTS, params)] == expected
    assert warm.stats().preemptions > 0
    assert warm.stats().free_blocks == 23


def test_samples_of_one_prompt_share_it() -> None:
    params = SamplingParams(max_tokens=6, n=4, temperature=1.0, seed=3, ignore_eos=True)
    cold, warm = tiny_engine(prefix_caching=False, **SIZES), tiny_engine(**SIZES)
    found = warm.generate([PROMPTS[0]], params)
    assert [r.token_ids for r in found] == [r.token_ids for r in cold.generate([PROMPTS[0]], params)]
    assert [r.cached_tokens for r in found] == [0, 40, 40, 40]
    stats = warm.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.cache_hit_rate) == (4 * 41, 3 * 40, 3 * 40 / (4 * 41))
    assert stats.tokens == 41 + 3 * 1 + 4 * 5


PENALISED: list[dict[str, Any]] = [
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"logit_bias": {7: 4.0}},
    {"min_tokens": 4},
]


@pytest.mark.parametrize(
    ("fields", "most"),
    [(PENALISED[0], 0), (PENALISED[1], 0), (PENALISED[2], 30), (PENALISED[3], 30), (PENALISED[4], 10**9)],
)
def test_what_counts_tokens_or_reports_the_prompt_computes_them(fields: dict[str, Any], most: int) -> None:
    assert min(max_cached_tokens(30, SamplingParams(**fields)), 10**9) == most


def test_every_kind_of_request_is_answered_alike_from_a_warm_cache() -> None:
    """And when it is preempted, and finds its blocks again or not."""
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **fields) for fields in PENALISED]
    prompts = [COMMON] * len(params)
    cold = tiny_engine(prefix_caching=False, **SIZES).generate(prompts, params)
    engine = tiny_engine(**SIZES)
    engine.generate([COMMON], GREEDY)
    warm = engine.generate(prompts, params)
    assert [r.token_ids for r in warm] == [r.token_ids for r in cold]
    assert [p.token_id for p in (warm[0].prompt_logprobs or ())[1:] if p] == COMMON[1:]
    assert [r.cached_tokens for r in warm] == [0, 0, 32, 32, 32, 32]
    assert sum(r.num_preemptions for r in warm[1:4]) > 0


def test_new_weights_forget_what_the_old_ones_computed(expected: list[tuple[int, ...]]) -> None:
    """Also what a sequence in flight goes on to compute."""
    other = Engine(tiny_model(), tiny_params(1), **CONFIG, prefix_caching=False)
    engine = tiny_engine(**SIZES)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.update_params(tiny_params(1))
    responses: list[Response] = []
    while engine.has_work:
        responses += engine.step()
    turn = [*PROMPTS[0], *responses[0].token_ids, 5]
    for prompt in (PROMPTS[0], turn):
        (found,) = engine.generate([prompt], GREEDY)
        assert found.token_ids == other.generate([prompt], GREEDY)[0].token_ids
    assert [r.token_ids for r in engine.generate(PROMPTS, GREEDY)] != expected


@pytest.mark.parametrize("strikes", ["dispatch", "pools"])
def test_a_failed_step_leaves_nothing_to_find(
    expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, strikes: str
) -> None:
    engine = tiny_engine(**SIZES)
    if strikes == "pools":
        engine.generate([COMMON], GREEDY)
        for array in jax.tree.leaves((engine._runner.kv_pool, engine._runner.state)):
            array.delete()
    else:
        monkeypatch.setattr(engine._runner, "dispatch", lambda *_args, **_options: 1 / 0)
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        engine.generate([COMMON], GREEDY)
    monkeypatch.undo()
    responses = engine.generate(PROMPTS, GREEDY)
    assert responses[0].cached_tokens == 0
    assert [r.token_ids for r in responses] == expected


def test_put_takes_blocks_that_hold_something_and_is_never_found(expected: list[tuple[int, ...]]) -> None:
    engine = tiny_engine(**SIZES)
    engine.generate([COMMON], GREEDY)
    for part in (COMMON[:16], *[[11] * 16] * 10):  # 22 of the 23 blocks
        engine.put(["a"], [part])
    engine.flush(["a"])
    responses = engine.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in responses] == expected


def test_a_failed_put_forgets_what_the_pool_held(expected: list[tuple[int, ...]]) -> None:
    engine = tiny_engine(**SIZES)
    engine.generate([COMMON], GREEDY)
    for array in jax.tree.leaves((engine._runner.kv_pool, engine._runner.state)):
        array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        engine.put(["a"], [[5]])
    assert [r.token_ids for r in engine.generate(PROMPTS, GREEDY)] == expected


def test_dynamic_rope_shares_between_prompts_of_one_length_or_short_ones_only() -> None:
    """K depends on the prompt's length where that is more than the 24 positions of the unscaled model."""
    dynamic = HF_CONFIG | {"max_position_embeddings": 24, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    model = llama.Model(llama.from_hf(dynamic), kernels.get_backend("xla"))
    cold, warm = (Engine(model, tiny_params(), **CONFIG, prefix_caching=caching) for caching in (False, True))
    cached = []
    for length in (30, 17, 24, 30, 38, 30):
        prompt = [*COMMON[: length - 1], 3 + length]
        (found,) = warm.generate([prompt], GREEDY)
        assert found.token_ids == cold.generate([prompt], GREEDY)[0].token_ids
        cached.append(found.cached_tokens)
    assert cached == [0, 0, 16, 24, 0, 24]


@pytest.mark.parametrize("overlap", [False, True])
def test_32_requests_that_share_1024_tokens_cost_one_prompt_and_the_tails(overlap: bool) -> None:
    scheduler = make_scheduler(num_blocks=2000, block_size=16, budget=512, seqs=64, length=2000, caching=True)
    prefix = list(range(1024))
    seqs = [add(scheduler, i, 0, 1, prompt=[*prefix, i, i, i]) for i in range(32)]
    trace = run(scheduler, overlap)
    assert [len(line.split()) for line in trace] == [1, 1, 32]
    assert sum(len(seq.prompt_token_ids) - seq.num_cached_tokens for seq in seqs) == 1024 + 32 * 3


def test_the_engine_computes_a_shared_prefix_once() -> None:
    engine = tiny_engine(**SIZES)
    prefix = [3 + i for i in range(80)]
    engine.generate([[*prefix, i] for i in range(32)], SamplingParams(max_tokens=1))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.tokens, stats.cached_tokens) == (32 * 81, 80 + 32, 31 * 80)


def test_the_hit_rate_of_nothing_is_0() -> None:
    numbers = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    assert EngineStats(**numbers).cache_hit_rate == 0.0
    assert EngineStats(**(numbers | {"prompt_tokens": 8, "cached_tokens": 6})).cache_hit_rate == 0.75


def test_prefix_caching_is_on_by_default_and_a_bool() -> None:
    assert EngineConfig().prefix_caching is True
    with pytest.raises(TypeError, match="prefix_caching=1 is int; it must be True or False"):
        EngineConfig(prefix_caching=1)  # type: ignore[arg-type]
