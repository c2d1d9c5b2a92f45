"""Models all of whose layers have a window: their sequences give back what no token to come sees, and nothing else."""

import itertools
import random
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hf import LLAMA, SIZES, assert_close, load_model, save_random_model
from real_configs import REAL
from tiny import tiny_engine
from traces import A, B, C, add, both_loops, make_scheduler, run, sample, show, step, tokens_of
from transformers import PreTrainedModel

from fastgen_jax import EngineConfig, SamplingParams
from fastgen_jax.batch import Layout, Packer, Settings
from fastgen_jax.engine import Engine
from fastgen_jax.gpus import GPUS
from fastgen_jax.scheduler import Window, widest
from fastgen_jax.scheduler.blocks import NULL_BLOCK
from fastgen_jax.sizing import Sizing

MAX_LEN, NUM_TOKENS = 320, 40
WINDOWS = (8, 20, 32)  # a block of 8 as it is, some and a half, and several
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(LLAMA["vocab_size"]) for _ in range(length)] for length in lengths]


PROMPTS = prompts([230, 61, 9, 150])
PROMPTS.append(PROMPTS[0][:200] + PROMPTS[1])

# The arithmetic


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_block_is_past_when_no_later_token_sees_any_of_it(window: int | None, block_size: int) -> None:
    counted = Window(window, block_size)
    for position in range(40):
        seen = range(60) if window is None else range(position - window + 1, 60)
        unseen = [all(k not in seen for k in range(i * block_size, (i + 1) * block_size)) for i in range(60)]
        assert counted.num_past(position) == unseen.index(False)
        held = len({k // block_size for k in range(position + 1) if k in seen})
        assert held <= counted.most_blocks(position + 1)
    for chunk in (1, 2, 7):
        starts = [(first, counted.num_past(first)) for first in range(80)]
        most = max(-(-(first + chunk) // block_size) - past for first, past in starts)
        assert most == counted.most_blocks(79 + chunk, chunk)


def test_a_pool_that_holds_a_window_holds_any_length() -> None:
    assert [Window(8, 4).most_blocks(n) for n in (1, 4, 5, 9, 12, 13, 10**9)] == [1, 1, 2, 3, 3, 3, 3]
    assert [Window(9, 4).longest(n) for n in (1, 2)] == [5, 9]
    assert Window(9, 4).longest(3) > 10**9
    assert [Window(None, 4).longest(n) for n in (1, 2, 3)] == [5, 9, 13]


def test_blocks_are_kept_if_any_layer_sees_all() -> None:
    assert widest((4, 8, 8)) == 8
    assert widest((4, None, 4)) is widest((None,)) is widest(()) is None
    assert Window.under("splitfuse", 8, 4) == Window(8, 4)
    assert Window.under("orca", 8, 4) == Window.under("prefill_first", 8, 4) == Window(None, 4)


# The scheduler, with blocks of 4


@both_loops
def test_a_decode_gives_back_a_block_for_each_that_it_takes(overlap: bool) -> None:
    """With a window of 6, token 12 sees tokens 7 to 12: the first block is past."""
    scheduler = make_scheduler(window=6, budget=8)
    a = add(scheduler, A, 5, 30)
    held = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        held.append((a.num_computed_tokens, len(a.blocks), a.num_past_blocks))
        scheduler.update(plan, sample(plan))
    assert held[:9] == [
        (5, 2, 0),
        (6, 2, 0),
        (7, 2, 0),
        (8, 2, 0),
        (9, 3, 0),
        *[(n, 3, 0) for n in (10, 11, 12)],
        (13, 3, 1),
    ]
    assert {count for _, count, _ in held[4:]} == {3}
    assert a.num_output_tokens == 30 and scheduler.block_pool.num_used == 0


def test_entries_slid_past_are_the_null_block_and_the_rest_stay_where_they_were() -> None:
    scheduler = make_scheduler(window=6, budget=8)
    a = add(scheduler, A, 21, 2)
    tables = []
    for _ in range(3):
        step(scheduler)
        tables.append(list(a.block_table))
    assert tables[0] == tables[0][:2] and NULL_BLOCK not in tables[0]
    assert tables[1] == [*tables[0], *tables[1][2:]] and NULL_BLOCK not in tables[1]  # token 8 sees tokens from 3 on
    assert tables[2][:2] == [NULL_BLOCK] * 2 and tables[2][2:4] == tables[1][2:]  # token 16 sees tokens from 11 on


def test_the_device_is_given_the_table_as_it_is() -> None:
    scheduler = make_scheduler(window=6, budget=8)
    a = add(scheduler, A, 21, 20)
    packer = Packer(Layout(max_num_seqs=8, blocks_per_seq=12, block_size=4), buckets=[8])
    while scheduler.has_work:
        plan = scheduler.schedule()
        buffer, bucket = packer.pack(plan, lambda _: Settings())
        table = packer.layout.split(buffer, bucket)["block_tables"][0].tolist()
        assert table == a.block_table + [NULL_BLOCK] * (12 - len(a.block_table))
        scheduler.update(plan, sample(plan))


def test_what_a_window_frees_may_go_to_another_in_the_same_step() -> None:
    """Of 5 blocks A holds 4, and gives 3 back before it takes 1; B's step is the first with tokens left."""
    scheduler = make_scheduler(num_blocks=6, window=5, budget=8)
    a, b = add(scheduler, A, 17, 1), add(scheduler, B, 3, 1)
    assert [step(scheduler) for _ in range(3)] == ["A8", "A8", "A1 B3"]
    assert a.finish_reason == b.finish_reason == "length"


@both_loops
def test_a_sequence_longer_than_the_pool_runs(overlap: bool) -> None:
    """3 blocks of 4 hold a window of 9, and no more; the budget is more than they hold."""
    scheduler = make_scheduler(num_blocks=4, window=9, budget=64)
    a, b = add(scheduler, A, 40, 40), add(scheduler, B, 100, 3)
    trace = run(scheduler, overlap)
    assert trace[0] == "A12"
    assert (a.num_output_tokens, b.num_output_tokens) == (40, 3)
    assert scheduler.block_pool.num_used == 0


@pytest.mark.parametrize(
    ("window", "policy"), [(10, "splitfuse"), (None, "splitfuse"), (9, "orca"), (9, "prefill_first")]
)
def test_what_its_window_does_not_let_fit_is_refused(window: int | None, policy: str) -> None:
    scheduler = make_scheduler(num_blocks=4, window=window, budget=64, policy=policy)
    needed = {10: 4}.get(window, 5)  # of 3
    sentence = (
        f"may grow to 18 tokens, which take {needed} blocks of 4, but the pool has 3: "
        f"raise num_blocks to {needed + 1}, or keep prompt [+] max_tokens within 13"
    )
    with pytest.raises(ValueError, match=sentence):
        add(scheduler, A, 8, 10)
    add(scheduler, A, 8, 5)


def test_a_preempted_sequence_slides_again_through_its_own_text() -> None:
    scheduler = make_scheduler(num_blocks=12, window=17, budget=8)
    seqs = [add(scheduler, seq_id, 2, 60) for seq_id in range(4)]
    run(scheduler)
    assert [seq.output_token_ids for seq in seqs] == [tokens_of(seq) for seq in seqs]
    assert sum(seq.num_preemptions for seq in seqs) > 0


# The prefix cache, with blocks of 4


def test_of_a_found_beginning_only_what_is_still_seen_is_needed_and_held() -> None:
    """A's blocks 0 to 5 are all free and known; token 24 sees tokens from 19 on, in blocks 4 and 5."""
    scheduler = make_scheduler(window=6, caching=True, budget=64)
    a = add(scheduler, A, 25, 1)
    step(scheduler)
    assert a.finish_reason == "length"
    b = add(scheduler, B, 26, 1)
    plan = scheduler.schedule()
    assert show(plan) == "B2" and b.num_cached_tokens == 24
    assert b.block_table[:4] == [NULL_BLOCK] * 4 and len(b.blocks) == 3


def test_a_beginning_is_found_after_its_own_was_handed_out_again() -> None:
    """A's first blocks are the longest free, so B gets those; then C finds A's last ones alone."""
    scheduler = make_scheduler(num_blocks=12, window=6, caching=True, budget=8)
    add(scheduler, A, 33, 1)
    run(scheduler)
    b = add(scheduler, B, 16, 1, prompt=[8] * 16)
    run(scheduler)
    c = add(scheduler, C, 34, 1)
    assert run(scheduler) == ["C2"]
    assert (b.num_cached_tokens, c.num_cached_tokens) == (0, 32)


@pytest.mark.parametrize(
    ("missing", "num_cached"),
    [
        ((), 36),
        ((8,), 32),
        ((8, 6), 24),
        ((8, 6, 4), 16),
        ((8, 6, 4, 3), 12),
        ((2, 5), 36),
        ((1, 3, 5, 7), 4),
        ((0, 1, 3, 5, 7), 0),
    ],
)
def test_a_missing_block_leaves_the_longest_beginning_that_does_not_need_it(
    missing: tuple[int, ...], num_cached: int
) -> None:
    scheduler = make_scheduler(window=6, caching=True, budget=64)
    a = add(scheduler, A, 40, 2)
    step(scheduler)
    for index in missing:
        del scheduler.block_pool._blocks[a.block_keys[index]]
    b = add(scheduler, B, 40, 1)
    step(scheduler)
    assert b.num_cached_tokens == num_cached


def test_a_block_that_one_has_slid_past_stays_with_the_other() -> None:
    scheduler = make_scheduler(window=6, caching=True, budget=16)
    a, b = add(scheduler, A, 9, 40), add(scheduler, B, 9, 3)
    step(scheduler)
    assert a.block_table[:2] == b.block_table[:2]
    used = {scheduler.block_pool.num_used}
    run(scheduler)
    assert used == {4} and scheduler.block_pool.num_used == 0


# Engines, against Hugging Face's model


@cache
def tiny_mistral(window: int) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
    """Hugging Face's, ours, and its parameters."""
    config = LLAMA | {"model_type": "mistral", "sliding_window": window, "max_position_embeddings": MAX_LEN}
    with TemporaryDirectory() as folder:
        hf = save_random_model(config, Path(folder))
        return hf, *load_model(Path(folder))


@cache
def hf_logits(window: int, token_ids: tuple[int, ...]) -> np.ndarray:
    with torch.no_grad():
        return tiny_mistral(window)[0](torch.tensor([token_ids])).logits[0].numpy()


def assert_greedy(window: int, outputs: list[list[int]], prompts: list[list[int]]) -> None:
    """Each token is the one that Hugging Face's model finds likeliest after those before it."""
    for prompt, output in zip(prompts, outputs, strict=True):
        likeliest = hf_logits(window, (*prompt, *output)).argmax(-1)[len(prompt) - 1 : -1]
        assert output == likeliest.tolist()


def mistral_engine(window: int, **config: Any) -> Engine:
    _, model, params = tiny_mistral(window)
    return Engine(model, params, **(SIZES | {"num_blocks": 160} | config))


def least_blocks(window: int, chunk: int = 1) -> int:
    """What one sequence holds at most: as many whole blocks as the tokens are long, and one at each end in part."""
    return -(-(window + chunk) // SIZES["block_size"]) + 1


def generate(engine: Engine, window: int, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens; no sequence ever holds more blocks than its window and a step's tokens take."""
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    found = {}
    while engine.has_work:
        found |= {r.request_id: list(r.token_ids) for r in engine.step()}
        for seq in vars(engine)["_scheduler"]._running:
            assert len(seq.blocks) <= least_blocks(window, engine.max_num_batched_tokens)
    assert engine.stats().free_blocks == engine.stats().blocks
    return [found[request_id] for request_id in ids]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("budget", "overlap", "prefix_caching"),
    [(256, False, False), (32, True, False), (7, False, True), (32, True, True)],
)
def test_tokens_are_hugging_faces(window: int, budget: int, overlap: bool, prefix_caching: bool) -> None:
    engine = mistral_engine(
        window,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        overlap=overlap,
        prefix_caching=prefix_caching,
    )
    outputs = generate(engine, window, PROMPTS)
    assert_greedy(window, outputs, PROMPTS)
    cached = engine.stats().cached_tokens
    assert generate(engine, window, PROMPTS) == outputs
    assert engine.stats().cached_tokens - cached > (300 if prefix_caching else -1)


@both_loops
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("window", [20, 32])
def test_preemption_is_invisible(window: int, prefix_caching: bool, overlap: bool) -> None:
    """Short prompts begin together in a pool that holds the windows of two of them."""
    num_blocks = 1 + 2 * least_blocks(window)
    engine = mistral_engine(window, num_blocks=num_blocks, overlap=overlap, prefix_caching=prefix_caching)
    assert engine.max_model_len == MAX_LEN > (num_blocks - 1) * SIZES["block_size"]
    prompts = [prompt[:4] for prompt in PROMPTS] + PROMPTS[:2]
    assert_greedy(window, generate(engine, window, prompts), prompts)
    assert engine.stats().preemptions > 0


def test_freeing_a_block_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: with a window of which one block less is kept they do."""
    kept = Window.num_past
    monkeypatch.setattr(Window, "num_past", lambda self, position: kept(self, position + self.block_size))
    for overlap, prefix_caching in itertools.product((False, True), repeat=2):
        engine = mistral_engine(20, max_num_batched_tokens=32, overlap=overlap, prefix_caching=prefix_caching)
        outputs = generate(engine, 20, PROMPTS)
        with pytest.raises(AssertionError):
            assert_greedy(20, outputs, PROMPTS)


@pytest.mark.parametrize("window", WINDOWS)
def test_put_feeds_a_sequence_longer_than_the_pool(window: int) -> None:
    chunk = 16
    engine = mistral_engine(window, num_blocks=1 + 2 * least_blocks(window, chunk), max_num_batched_tokens=96)
    texts = {"a": PROMPTS[0], "b": PROMPTS[3]}
    logits = {name: hf_logits(window, tuple(text)) for name, text in texts.items()}
    for start in range(0, len(PROMPTS[0]), chunk):
        fed = {name: text[start : start + chunk] for name, text in texts.items() if start < len(text)}
        found = engine.put(list(fed), list(fed.values()))
        for row, (name, tokens) in zip(found, fed.items(), strict=True):
            assert_close(row, logits[name][start + len(tokens) - 1])
    with pytest.raises(ValueError, match=r"put needs \d+ blocks and \d+ are free"):
        engine.put(["c"], [PROMPTS[0][:96]])
    engine.flush(["a", "b"])
    assert engine.stats().free_blocks == engine.stats().blocks


def test_max_model_len_is_the_models_where_the_pool_holds_a_window() -> None:
    assert [mistral_engine(20, num_blocks=n).max_model_len for n in (2, 3, 4, 5, 6)] == [9, 17, 25, MAX_LEN, MAX_LEN]
    assert mistral_engine(20, num_blocks=6, policy="orca").max_model_len == 41
    assert tiny_engine(num_blocks=5).max_model_len == 65
    with pytest.raises(
        ValueError, match="max_model_len=100 needs more than the pool's 25 tokens; raise num_blocks to 5"
    ):
        mistral_engine(20, num_blocks=4, max_model_len=100)


def test_the_documented_costs_of_hybrids_are_those_of_their_configs() -> None:
    """docs/design.md: a sequence of the context's length, all blocks kept, and with a pool for each kind of layer."""
    docs = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    rows = re.findall(r"\| (\w+) \(\w+\) \| (\d+) of (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", docs)
    assert [family for family, *_ in rows] == ["gemma2", "cohere2", "exaone4"]
    for family, *figures, kept_gb, by_kind_gb in rows:
        sizing = Sizing(REAL[family], GPUS["h200"], EngineConfig(), tp=1, mem_fraction=0.75)
        c, length = sizing.model_config, sizing.wanted_len
        (window,) = {window for window in c.windows if window is not None}
        token_bytes = sizing.block_bytes // sizing.block_size
        assert list(map(int, figures)) == [c.windows.count(None), c.num_layers, window, token_bytes, length]
        assert sizing.window.num_tokens is None
        blocks = [Window(window, sizing.block_size).most_blocks(length) for window in c.windows]
        kept = [length * token_bytes, sizing.block_bytes // c.num_layers * sum(blocks)]
        assert [f"{num_bytes / 1e9:.2f}" for num_bytes in kept] == [kept_gb, by_kind_gb]
