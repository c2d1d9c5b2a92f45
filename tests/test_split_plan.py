"""Dynamic SplitKV on the host: how many splits each row gets, where they lie, and what the SMs read."""

import runpy
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastgen_jax.scheduler.split_plan import SplitPlanner, plan_splits, simulate, split_bounds, work_list
from fastgen_jax.scheduler.split_search import Rows, slowest_load

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "split_table.py"))
POLICIES = ("waves", "proportional", "fixed(4)", "fixed(16)", "none")

lens = st.one_of(st.integers(0, 600), st.integers(0, 40_000))
batches = st.one_of(
    st.lists(lens, max_size=40),
    st.tuples(lens, st.integers(1, 300)).map(lambda row: [row[0]] * row[1]),
    st.tuples(st.lists(st.integers(1, 2000), max_size=40), st.integers(8_000, 200_000)).map(lambda b: [*b[0], b[1]]),
)
settings = st.fixed_dictionaries(
    {"min_split_tokens": st.sampled_from([1, 64, 500, 512, 1024]), "block_size": st.sampled_from([1, 16, 64, 128])}
)
heads = st.sampled_from([1, 2, 3, 8, 32])
sms = st.sampled_from([1, 7, 108, 132, 148])


def slowest_time(kv_lens, splits, num_kv_heads, num_sms, block_size=64):
    """Of the SMs in the kernel's order, in tokens: each unit reads whole blocks and costs 64 tokens more."""
    items = work_list(kv_lens, splits, block_size)
    times = [-(-(item.stop - item.start) // block_size) * block_size + 64 for item in items]
    return max(simulate([time for time in times for _ in range(num_kv_heads)], num_sms).bytes_per_sm)


def whole(kv_lens):
    return [min(n, 1) for n in kv_lens]


# --- the number of splits ---


@pytest.mark.parametrize(
    ("kv_lens", "num_kv_heads", "num_sms", "expected"),
    [
        ([4096] * 8, 32, 132, [1] * 8),  # Llama-2-7B, batch 8: 256 items are 97 % of two waves
        ([4096] * 8, 32, 108, [2] * 8),  # 2.4 waves' worth: 512 items are 95 % of 5 waves
        ([4096] * 8, 32, 148, [4] * 8),  # 1.7 waves' worth: 1024 items are 99 % of 7 waves
        ([32768], 1, 132, [64]),  # Llama-2-70B over 8 devices has one KV head on each: the minimum's 64, no cap
        ([4096] * 8, 1, 132, [8] * 8),
        ([32768], 8, 132, [16]),  # 128 items, one wave; 17 splits would need two
        ([131072], 1, 148, [147]),  # 14 blocks each; 148 splits would still have one of 14
        ([512] * 64, 8, 132, [1] * 64),  # too short to split
        (
            [256] * 255 + [16384],
            32,
            132,
            [1] * 255 + [4],
        ),  # an SM with the long row would get its share of the others too
        ([256] * 255 + [16384], 1, 108, [1] * 255 + [32]),
        ([0, 1, 1023, 0], 1, 132, [0, 1, 1, 0]),
        ([0, 0], 8, 132, [0, 0]),
        ([], 8, 132, []),
    ],
)
def test_waves_split_as_few_or_as_many_as_the_sms_need(kv_lens, num_kv_heads, num_sms, expected):
    assert plan_splits(kv_lens, num_kv_heads, num_sms) == expected


@pytest.mark.parametrize(
    ("policy", "min_split_tokens", "kv_lens", "expected"),
    [
        ("proportional", 1024, [512, 4096, 16384], [1, 4, 16]),  # the guide's figure
        ("proportional", 1024, [17408, 65536], [16, 16]),  # its cap
        ("proportional", 512, [256, 1024, 4096, 8192], [1, 2, 8, 16]),  # its sample code: [4, 8, 32, 64]
        ("proportional", 500, [1023, 1024], [1, 2]),  # in whole blocks the minimum is 512
        ("fixed(8)", 512, [0, 512, 1024, 4096, 32768], [0, 1, 2, 8, 8]),
        ("fixed(1)", 512, [32768], [1]),
        ("none", 512, [0, 1, 32768], [0, 1, 1]),
    ],
)
def test_the_other_policies_look_at_each_row_alone(policy, min_split_tokens, kv_lens, expected):
    splits = plan_splits(kv_lens, 1, 108, min_split_tokens=min_split_tokens, policy=policy)
    assert splits == expected


@given(batches, heads, sms, settings, st.sampled_from(POLICIES))
def test_no_split_of_any_policy_is_shorter_than_the_minimum(kv_lens, num_kv_heads, num_sms, setting, policy):
    splits = plan_splits(kv_lens, num_kv_heads, num_sms, policy=policy, **setting)
    assert len(splits) == len(kv_lens)
    for n, num_splits in zip(kv_lens, splits, strict=True):
        sizes = [stop - start for start, stop in split_bounds(n, num_splits, setting["block_size"])]
        assert min(sizes, default=0) >= min(n, setting["min_split_tokens"])


@given(batches, heads, sms, settings)
def test_waves_are_never_slower_than_no_splits(kv_lens, num_kv_heads, num_sms, setting):
    splits = plan_splits(kv_lens, num_kv_heads, num_sms, **setting)
    device = num_kv_heads, num_sms, setting["block_size"]
    assert slowest_time(kv_lens, splits, *device) <= slowest_time(kv_lens, whole(kv_lens), *device)


@given(st.integers(1, 40), st.integers(1, 20_000), heads, sms)
@example(32, 8577, 2, 7)  # a plan within the slack of one that was within the slack of the best
def test_of_equal_rows_no_number_of_splits_does_better_by_more_than_the_slack(num_rows, n, num_kv_heads, num_sms):
    def waves_of_the_longest_item(num_splits):
        longest = -(-num_blocks // num_splits) * 64 + 64
        return -(-num_rows * num_kv_heads * num_splits // num_sms) * longest

    num_blocks = -(-n // 64)
    kv_lens = [n] * num_rows
    planned = slowest_time(kv_lens, plan_splits(kv_lens, num_kv_heads, num_sms), num_kv_heads, num_sms)
    assert planned <= 1.05 * min(map(waves_of_the_longest_item, range(1, max(1, n // 512) + 1)))


@pytest.mark.parametrize("case", SCRIPT["CASES"], ids=str)
def test_on_the_documented_mixes_no_policy_is_faster_than_waves_by_more_than_the_slack(case):
    times = {policy: SCRIPT["slowest_tokens"](case, policy) for policy in SCRIPT["POLICIES"]}
    assert times["waves"] <= 1.05 * min(times.values())


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), max_size=8), st.integers(1, 13))
def test_the_search_counts_the_slowest_load_as_the_simulation_does(groups, num_sms):
    units = [size for size, num_units in groups for _ in range(num_units)]
    assert slowest_load(groups, num_sms) == max(simulate(units, num_sms).bytes_per_sm)


@given(batches.filter(any), heads, sms, settings, st.integers(0, 200))
def test_the_score_of_a_chunk_is_the_time_of_the_plan_it_makes(kv_lens, num_kv_heads, num_sms, setting, more_blocks):
    block_size = setting["block_size"]
    min_blocks = -(-setting["min_split_tokens"] // block_size)
    min_chunk, chunk = min_blocks * block_size, min_blocks + more_blocks
    splits = [min(-(-n // (chunk * block_size)), n // min_chunk or 1) for n in kv_lens]
    score = Rows(kv_lens, min_chunk, block_size).slowest_sm(chunk, num_kv_heads, num_sms)
    assert score == slowest_time(kv_lens, splits, num_kv_heads, num_sms, block_size)


# --- one step after another ---


@given(batches, heads, sms, settings, st.sampled_from(POLICIES))
def test_a_planner_begins_with_the_plan_of_its_first_step(kv_lens, num_kv_heads, num_sms, setting, policy):
    planner = SplitPlanner(num_kv_heads, num_sms, policy=policy, **setting)
    assert planner.plan(kv_lens) == plan_splits(kv_lens, num_kv_heads, num_sms, policy=policy, **setting)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([[32768]] + [[8192]] * 8, [[16]] + [[4]] * 7 + [[16]]),  # the ninth step is searched anew
        ([[32768] * 8, [32768] * 9, [32768] * 10], [[2] * 8, [2] * 9, [8] * 10]),  # a 9th row is 1/8 more
        ([[32768] * 8, [32768] * 7, [32768] * 6], [[2] * 8, [2] * 7, [8] * 6]),
        ([[0], [0, 32768], [0, 0]], [[0], [0, 16], [0, 0]]),
    ],
)
def test_between_searches_rows_are_cut_at_the_length_found_last(steps, expected):
    planner = SplitPlanner(8, 132, 64)
    assert [planner.plan(kv_lens) for kv_lens in steps] == expected


@pytest.mark.parametrize(
    ("policy", "max_extra", "kv_lens", "expected"),
    [
        ("fixed(8)", 14, [8192, 8192], [8, 8]),
        ("fixed(8)", 13, [8192, 8192], [4, 4]),
        ("fixed(7)", 5, [8192, 0, 8192], [2, 0, 2]),
        ("fixed(8)", 0, [8192, 8192], [1, 1]),
        ("waves", 63, [32768], [64]),
        ("waves", 62, [32768], [57]),  # 9 blocks each
        ("waves", 0, [32768], [1]),
    ],
)
def test_there_are_no_more_splits_than_there_is_room_for(policy, max_extra, kv_lens, expected):
    assert SplitPlanner(1, 132, 64, policy=policy, max_extra=max_extra).plan(kv_lens) == expected


@given(st.lists(batches, min_size=1, max_size=10), heads, sms, settings, st.sampled_from(POLICIES), st.integers(0, 300))
def test_every_step_keeps_the_room_and_the_minimum(steps, num_kv_heads, num_sms, setting, policy, max_extra):
    planner = SplitPlanner(num_kv_heads, num_sms, policy=policy, max_extra=max_extra, **setting)
    for kv_lens in steps:
        splits = planner.plan(kv_lens)
        assert len(work_list(kv_lens, splits, setting["block_size"])) <= sum(whole(kv_lens)) + max_extra
        for n, num_splits in zip(kv_lens, splits, strict=True):
            sizes = [stop - start for start, stop in split_bounds(n, num_splits, setting["block_size"])]
            assert min(sizes, default=0) >= min(n, setting["min_split_tokens"])


def test_a_window_bounds_what_a_row_has_to_split():
    planner = SplitPlanner(1, 132, 64, policy="proportional", window=4096)
    assert planner.plan([0, 1, 1024, 4096, 100_000]) == [0, 1, 2, 8, 8]


# --- their bounds ---


@pytest.mark.parametrize(
    ("kv_len", "num_splits", "block_size", "expected"),
    [
        (0, 0, 64, []),
        (1, 1, 64, [(0, 1)]),
        (256, 2, 64, [(0, 128), (128, 256)]),
        (257, 2, 64, [(0, 128), (128, 257)]),
        (300, 4, 64, [(0, 64), (64, 128), (128, 192), (192, 300)]),
        (5, 5, 1, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
    ],
)
def test_split_bounds_are_these(kv_len, num_splits, block_size, expected):
    assert split_bounds(kv_len, num_splits, block_size) == expected


@given(st.data(), st.integers(1, 50_000), st.integers(1, 200))
def test_splits_cover_the_row_in_balanced_whole_blocks(data, kv_len, block_size):
    num_blocks = -(-kv_len // block_size)
    num_splits = data.draw(st.integers(1, min(num_blocks, 400)))
    bounds = split_bounds(kv_len, num_splits, block_size)
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == kv_len
    assert len(bounds) == num_splits
    assert all(start % block_size == 0 and start < stop for start, stop in bounds)
    blocks = [-(-(stop - start) // block_size) for start, stop in bounds]
    assert max(blocks) - min(blocks) <= 1
    assert blocks[-1] == max(blocks)


def test_the_work_list_is_every_split_the_longest_first():
    items = work_list([100, 0, 300, 500, 192], [1, 0, 2, 1, 1], 64)
    assert items == [(3, 0, 500), (4, 0, 192), (2, 128, 300), (2, 0, 128), (0, 0, 100)]


# --- the simulated launch ---


@pytest.mark.parametrize(
    ("item_bytes", "num_sms", "waves", "loads", "share"),
    [
        ([], 2, 0, [0, 0], 0),
        ([5], 2, 1, [5, 0], 1),
        ([4, 3, 2, 1], 2, 2, [4 + 1, 3 + 2], 1 / 2),
        ([6, 5, 4, 3, 2, 1, 1], 3, 3, [6 + 1 + 1, 5 + 2, 4 + 3], 8 / 22),
        ([4, 4, 4], 2, 2, [4, 4 + 4], 2 / 3),
        ([9, 1, 1, 1], 2, 2, [9 + 1, 1 + 1], 10 / 12),  # the SM that is free first gets no more than its turn
    ],
)
def test_units_go_to_the_sms_back_and_forth(item_bytes, num_sms, waves, loads, share):
    simulation = simulate(item_bytes, num_sms)
    assert simulation == (waves, loads)
    assert simulation.slowest_share == pytest.approx(share)


# --- bad input ---


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_lens": [5, -1]}, ValueError, "kv_lens holds -1; it must hold whole numbers from 0"),
        ({"kv_lens": [5, 1.5]}, TypeError, "kv_lens holds 1.5, float; it must hold whole numbers from 0"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads=0 is out of range; it must be a whole number from 1"),
        ({"num_sms": -3}, ValueError, "num_sms=-3 is out of range; it must be a whole number from 1"),
        ({"num_sms": None}, TypeError, "num_sms=None is NoneType; it must be a whole number from 1"),
        ({"min_split_tokens": 0}, ValueError, "min_split_tokens=0 is out of range; it must be a whole number from 1"),
        ({"block_size": True}, TypeError, "block_size=True is bool; it must be a whole number from 1"),
        ({"policy": "fixed(0)"}, ValueError, "policy='fixed(0)' is unknown; choose waves, proportional, none or fixed"),
        ({"policy": 8}, ValueError, "policy=8 is unknown; choose waves, proportional, none or fixed"),
    ],
)
def test_bad_input_of_a_plan_is_named_in_one_sentence(change, error, words):
    arguments = {"kv_lens": [4096], "num_kv_heads": 8, "num_sms": 132} | change
    with pytest.raises(error) as raised:
        plan_splits(**arguments)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: split_bounds(100, 3, 64), "num_splits=3 does not suit a row of 2 blocks; it must be from 1 to 2"),
        (lambda: split_bounds(100, 0, 64), "num_splits=0 does not suit a row of 2 blocks; it must be from 1 to 2"),
        (lambda: split_bounds(0, 1, 64), "num_splits=1 does not suit a row of 0 blocks; it must be 0"),
        (lambda: work_list([100], [1, 1], 64), "splits has 2 entries for 1 rows; it must have one for each"),
        (lambda: simulate([1, -2], 4), "item_bytes holds -2; it must hold whole numbers from 0"),
    ],
)
def test_bad_input_of_the_others_is_named_too(call, words):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, "window=0 is out of range; it must be a whole number from 1"),
        ({"max_extra": -1}, "max_extra holds -1; it must hold whole numbers from 0"),
        ({"policy": "dynamic"}, "policy='dynamic' is unknown; choose waves, proportional, none or fixed(n)"),
    ],
)
def test_bad_input_of_a_planner_is_named_too(change, words):
    with pytest.raises(ValueError) as raised:
        SplitPlanner(**({"num_kv_heads": 8, "num_sms": 132, "block_size": 64} | change))
    assert str(raised.value).startswith(words)


# --- the documented figures ---


def test_the_documented_table_is_what_the_script_prints():
    assert "\n".join(SCRIPT["table"]()) in (ROOT / "docs" / "split-kv.md").read_text()
