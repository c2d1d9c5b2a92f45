"""Dynamic SplitKV on the host: how many splits each row gets, where they lie, and what the SMs read."""

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_jax.scheduler.split_plan import plan_splits, simulate, split_bounds, work_list

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


def slowest_tokens(kv_lens, splits, num_kv_heads, num_sms, block_size=64):
    """Tokens that the slowest SM reads when the work list is launched in its order."""
    items = work_list(kv_lens, splits, block_size)
    sizes = [item.stop - item.start for item in items for _ in range(num_kv_heads)]
    return max(simulate(sizes, num_sms).bytes_per_sm)


# --- the number of splits ---


@pytest.mark.parametrize(
    ("kv_lens", "num_kv_heads", "num_sms", "expected"),
    [
        ([4096] * 8, 32, 132, [1] * 8),  # Llama-2-7B, batch 8: 256 items are 97 % of two waves
        ([4096] * 8, 32, 108, [5] * 8),  # 2.4 waves' worth: 1280 items are 99 % of 12 waves
        ([4096] * 8, 32, 148, [4] * 8),  # 1.7 waves' worth: 1024 items are 99 % of 7 waves
        ([32768], 1, 132, [64]),  # Llama-2-70B over 8 devices has one KV head on each: the minimum's 64, no cap
        ([4096] * 8, 1, 132, [8] * 8),
        ([32768], 8, 132, [16]),  # 128 items, one wave; 17 splits would need two
        ([131072], 1, 148, [147]),  # 14 blocks each; 148 splits would still have one of 14
        ([512] * 64, 8, 132, [1] * 64),  # too short to split
        ([256] * 255 + [16384], 32, 132, [1] * 256),  # the short rows keep every SM busy meanwhile
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
def test_waves_are_never_worse_than_no_splits(kv_lens, num_kv_heads, num_sms, setting):
    splits = plan_splits(kv_lens, num_kv_heads, num_sms, **setting)
    whole = [min(n, 1) for n in kv_lens]
    slowest, unsplit = (
        slowest_tokens(kv_lens, s, num_kv_heads, num_sms, setting["block_size"]) for s in (splits, whole)
    )
    assert slowest <= unsplit


@given(st.integers(1, 40), st.integers(1, 20_000), heads, sms)
def test_of_equal_rows_no_number_of_splits_does_better_by_more_than_the_slack(num_rows, n, num_kv_heads, num_sms):
    def waves_of_the_longest_item(num_splits):
        longest = -(-num_blocks // num_splits) * 64
        return -(-num_rows * num_kv_heads * num_splits // num_sms) * longest

    num_blocks = -(-n // 64)
    kv_lens = [n] * num_rows
    planned = slowest_tokens(kv_lens, plan_splits(kv_lens, num_kv_heads, num_sms), num_kv_heads, num_sms)
    assert planned <= 1.05 * min(map(waves_of_the_longest_item, range(1, max(1, n // 512) + 1)))


@pytest.mark.parametrize("case", SCRIPT["CASES"], ids=str)
def test_on_the_documented_mixes_no_policy_beats_waves_by_more_than_the_slack(case):
    shares = {policy: SCRIPT["run"](case, policy)[1].slowest_share for policy in SCRIPT["POLICIES"]}
    assert shares["waves"] <= 1.05 * min(shares.values())


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


def test_the_work_list_names_every_split_of_a_row_and_the_rows_of_the_longest_splits_first():
    assert work_list([100, 0, 300, 500], [1, 0, 2, 1], 64) == [(3, 0, 500), (2, 0, 128), (2, 128, 300), (0, 0, 100)]


# --- the simulated launch ---


@pytest.mark.parametrize(
    ("item_bytes", "num_sms", "waves", "loads", "share"),
    [
        ([], 2, 0, [0, 0], 0),
        ([5], 2, 1, [0, 5], 1),
        ([4, 4, 4, 4], 2, 2, [8, 8], 1 / 2),
        ([4, 4, 4], 2, 2, [4, 8], 2 / 3),
        ([1, 1, 4], 2, 2, [1, 5], 5 / 6),  # in order: the long item waits
        ([4, 1, 1], 2, 2, [2, 4], 4 / 6),  # both short ones go to the SM that is free first
    ],
)
def test_each_item_goes_to_the_sm_that_is_free_first(item_bytes, num_sms, waves, loads, share):
    simulation = simulate(item_bytes, num_sms)
    assert (simulation.waves, sorted(simulation.bytes_per_sm)) == (waves, loads)
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


# --- the documented figures ---


def test_the_documented_table_is_what_the_script_prints():
    assert "\n".join(SCRIPT["table"]()) in (ROOT / "docs" / "split-kv.md").read_text()
