"""The token budget that chooses itself: the curve, what is chosen from it, and where it is kept."""

import jax
import pytest
from tiny import tiny_engine

from fastgen_jax import SamplingParams, budget
from fastgen_jax.budget import Curve
from fastgen_jax.types import UNTUNED_BUDGET

# Tokens/s: 400, 800, 1600, 2000, 2048, 2048.
CONCAVE = Curve({16: 0.04, 32: 0.04, 64: 0.04, 128: 0.064, 256: 0.125, 512: 0.25})


@pytest.fixture
def cache(tmp_path):
    """A folder for compiled programs, and so for curves."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / budget.FOLDER
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("seconds", "knee"),
    [
        ({16: 1.0}, 16),
        ({16: 1.0, 32: 1.0, 64: 1.0}, 64),
        ({16: 1.0, 32: 2.0, 64: 4.0}, 16),
        (CONCAVE.seconds, 128),
        ({16: 1.0, 32: 1.9, 64: 3.8}, 16),  # 16, 16.8 and 16.8 tokens/s: 5 % are all but nothing
        ({16: 1.0, 32: 1.89, 64: 3.8}, 32),
    ],
)
def test_the_knee_is_the_smallest_step_with_all_but_the_best_throughput(seconds, knee):
    assert Curve(seconds).knee() == knee


@pytest.mark.parametrize(
    ("max_step_ms", "at_least", "chosen"),
    [
        (None, 1, 128),
        (None, 200, 256),  # sequences that need a token each
        (None, 600, 600),  # more than was timed
        (1000, 1, 512),  # nothing larger was timed
        (130, 1, 256),
        (64, 1, 128),
        (63.9, 1, 64),
        (40, 1, 64),
        (40, 20, 64),
    ],
)
def test_the_budget_is_the_knee_or_what_a_step_may_take(max_step_ms, at_least, chosen):
    assert CONCAVE.choose(max_step_ms, at_least) == chosen


def test_a_limit_that_no_step_keeps_is_said():
    with pytest.warns(UserWarning, match="max_step_ms=10 cannot be kept: a step of 16 tokens takes 40.0 ms"):
        assert CONCAVE.choose(10) == 16
    with pytest.warns(UserWarning, match="a step of 256 tokens takes 125.0 ms"):
        assert CONCAVE.choose(100, at_least=200) == 256


def test_timing_ends_two_steps_behind_the_best():
    timed = []

    def seconds_of(tokens):
        timed.append(tokens)
        return max(tokens, 64) / 100

    curve = budget.measure([16, 32, 64, 128, 256, 512], seconds_of, lambda _: None)
    assert timed == [16, 32, 64, 128, 256] * 2
    assert curve == Curve({16: 0.64, 32: 0.64, 64: 0.64, 128: 1.28, 256: 2.56})


def test_a_step_that_was_slow_once_is_timed_again():
    """A busy moment at 64 tokens would make it 128."""
    times = {16: [1.0, 1.0], 32: [1.5, 1.5], 64: [3.5, 2.0], 128: [4.0, 4.0], 256: [8.0, 8.0]}
    curve = budget.measure(list(times), lambda tokens: times[tokens].pop(0), lambda _: None)
    assert curve.seconds[64] == 2.0
    assert curve.knee() == 64


def test_one_slow_step_does_not_end_the_timing():
    curve = budget.measure([16, 32, 64], {16: 1.0, 32: 3.0, 64: 1.0}.get, lambda _: None)
    assert curve.knee() == 64


def auto_engine(**config):
    return tiny_engine(**{"warm_up": True, "max_num_batched_tokens": "auto", "max_num_seqs": None} | config)


def fixed_times(monkeypatch, seconds_of):
    monkeypatch.setattr(budget, "LARGEST", 256)  # of what is compiled to be timed
    monkeypatch.setattr(budget.Steps, "seconds", lambda self, rows: seconds_of(sum(new for new, _ in rows)))


def test_an_engine_takes_the_budget_of_its_own_curve(monkeypatch, cache):
    fixed_times(monkeypatch, lambda tokens: max(tokens, 32))
    engine = auto_engine()
    assert engine.step_curve == Curve({1: 32, 2: 32, 4: 32, 8: 32, 16: 32, 32: 32, 64: 64, 128: 128})
    assert engine.max_num_batched_tokens == 32
    with pytest.raises(ValueError, match="max_num_batched_tokens=32 allows no more"):
        engine.put([1], [[5] * 33])
    (response,) = engine.generate([[5] * 50], SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.stats().steps == 4  # 32 + 18 prompt tokens, two decodes
    assert engine.stats().compiled_after_warm_up == 0
    assert response.token_ids == tiny_engine().generate([[5] * 50], SamplingParams(max_tokens=3))[0].token_ids


def test_a_curve_is_kept_for_the_next_engine_of_its_kind_alone(monkeypatch, cache):
    fixed_times(monkeypatch, lambda tokens: max(tokens, 32))
    first = auto_engine()
    assert len(list(cache.glob("*.json"))) == 1
    fixed_times(monkeypatch, lambda tokens: max(tokens, 64))
    assert auto_engine().step_curve == first.step_curve
    assert auto_engine(warm_up=False).max_num_batched_tokens == 32
    assert auto_engine(block_size=8).max_num_batched_tokens == 64
    assert len(list(cache.glob("*.json"))) == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"key": 1}', "null"])
def test_a_damaged_curve_is_measured_again(monkeypatch, cache, content):
    fixed_times(monkeypatch, lambda tokens: max(tokens, 32))
    auto_engine()
    (path,) = cache.glob("*.json")
    path.write_text(content)
    fixed_times(monkeypatch, lambda tokens: max(tokens, 64))
    assert auto_engine().max_num_batched_tokens == 64
    assert auto_engine(warm_up=False).max_num_batched_tokens == 64


def test_without_warm_up_nothing_is_timed(cache):
    engine = auto_engine(warm_up=False, max_num_seqs=8)
    assert engine.step_curve is None
    assert engine.max_num_batched_tokens == UNTUNED_BUDGET
    assert engine.stats().compiled == 0


def test_a_real_curve_of_a_tiny_model(cache):
    engine = auto_engine(max_num_seqs=8, max_model_len=40)
    assert list(engine.step_curve.seconds)[:5] == [1, 2, 4, 8, 16]
    assert max(engine.step_curve.seconds) <= 8 * 39  # no longer prompts, no more rows
    assert engine.max_num_batched_tokens in engine.step_curve.seconds
    assert engine.stats().compiled_after_warm_up == 0
