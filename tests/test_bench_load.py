"""The requests a benchmark makes."""

import random
import statistics
from itertools import pairwise

import pytest

from fastgen_jax.bench.capacity import cut_requests
from fastgen_jax.bench.load import Lengths, Request, make_prompts, make_requests, poisson, random_corpus, word_salad
from fastgen_jax.bench.trace import synthetic_trace
from fastgen_jax.bench.workload import Load, Workload, closed_points, long_prompt_points, open_points


def shared(a, b):
    """How many tokens two prompts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_same_seed_makes_the_same_requests():
    made = [make_requests(5, Lengths(20, 60), Lengths(5, 15), random_corpus(), seed=seed) for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]


def test_lengths_are_normal_and_clipped():
    rng = random.Random(0)
    lengths = [Lengths(100, 150).sample(rng) for _ in range(4000)]
    assert statistics.fmean(lengths) == pytest.approx(99.5, abs=1.5)
    assert statistics.stdev(lengths) == pytest.approx(29, abs=1.5)
    assert max(lengths) == 150
    assert {Lengths(1, 9).sample(rng) for _ in range(99)} == {1}


def test_prompts_are_cut_from_the_corpus():
    corpus = list(range(100, 110))
    for prompt in make_prompts([4, 15, 10], corpus):
        start = prompt[0] - 100
        assert prompt == [corpus[(start + i) % 10] for i in range(len(prompt))]


def test_neighbours_share_no_prefix_and_places_come_once_a_round():
    corpus = random.Random(0).choices(range(8), k=500)
    prompts = make_prompts([20] * 300, corpus)
    assert all(shared(a, b) == 0 for a, b in pairwise(prompts))
    assert len({tuple(prompt) for prompt in prompts}) == 300


def test_two_tokens_are_enough_for_ever():
    assert [prompt[0] for prompt in make_prompts([2] * 5, [1, 2])] in ([1, 2, 1, 2, 1], [2, 1, 2, 1, 2])


def test_a_shared_prefix_stands_in_front():
    alone, prefixed = (make_prompts([5, 9], random_corpus(), shared_prefix=k) for k in (0, 7))
    assert [prompt[7:] for prompt in prefixed] == alone
    assert shared(*prefixed) == 7


def test_arrivals_are_a_poisson_process():
    requests = [Request([1], 1)] * 4000
    arrivals = [request.arrival for request in poisson(requests, 5.0)]
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)
    assert [r.arrival for r in poisson(requests, 5.0)] == arrivals


def test_word_salad_is_the_same_everywhere():
    text = word_salad(12, seed=1)
    assert text == word_salad(12, seed=1) != word_salad(12, seed=2)
    assert len(text.split()) == 12
    assert text[0].isupper()
    assert text.endswith(".")


# Points


def prompts_of(points):
    return [tuple(r.prompt_token_ids) for point in points for r in (*point.warm_up, *point.requests)]


def test_a_closed_loop_has_a_warm_up_a_client_and_4c_32_requests():
    points = closed_points(Workload(20, 5), (1, 2, 4), random_corpus())
    assert [(p.load, len(p.warm_up), len(p.requests)) for p in points] == [
        (Load("closed", clients=1), 1, 36),
        (Load("closed", clients=2), 2, 40),
        (Load("closed", clients=4), 4, 48),
    ]
    assert len(set(prompts_of(points))) == 36 + 40 + 48 + 7


def test_an_open_loop_has_arrivals():
    points = open_points(Workload(20, 5, num_requests=6), (0.5, 2.0), random_corpus())
    assert [(p.load, len(p.warm_up), len(p.requests)) for p in points] == [
        (Load("open", rate=0.5), 1, 6),
        (Load("open", rate=2.0), 1, 6),
    ]
    assert points[0].requests[5].arrival == pytest.approx(4 * points[1].requests[5].arrival)


def test_a_long_prompt_comes_last_among_decodes_of_the_mean_lengths():
    points = long_prompt_points(Workload(20, 5), 100, (2, 3), random_corpus())
    assert [[len(r.prompt_token_ids) for r in p.requests] for p in points] == [[20, 20, 100], [20, 20, 20, 100]]
    assert [p.num_to_run for p in points] == [5, 7]
    assert {r.max_tokens for p in points for r in p.requests} == {5}
    assert len(set(prompts_of(points))) == 12


def test_lengths_do_not_depend_on_the_corpus():
    one, other = (closed_points(Workload(20, 5), (4,), corpus) for corpus in (random_corpus(), [1, 2, 3]))
    assert [len(p) for p in prompts_of(one)] == [len(p) for p in prompts_of(other)]


REFUSED = [
    (lambda: Workload(prompt_mean=0), "a mean length of 0 tokens is too short; it must be at least 1"),
    (
        lambda: Workload(prompt_mean=float("inf")),
        "a mean length of inf tokens is too long; it must be below 2147483648",
    ),
    (lambda: Workload(output_mean=float("nan")), "a mean length of nan tokens is too short; it must be at least 1"),
    (lambda: cut_requests(9, float("inf"), 1, 99, 0), "a mean length of inf tokens is too long"),
    (lambda: cut_requests(float("nan"), 9, 1, 99, 0), "a mean length of nan tokens is too short"),
    (lambda: synthetic_trace(1, 1, prompt_mean=0, output_mean=9, max_model_len=4096), "a mean length of 0 tokens"),
    (lambda: Workload(output_cap=0), "a longest length of 0 tokens is too short; it must be at least 1"),
    (lambda: Workload(num_requests=0), "0 requests are too few; it takes at least 1"),
    (lambda: closed_points(Workload(), (4, 0), random_corpus()), "0 clients are too few; it takes at least 1"),
    (lambda: open_points(Workload(), (-1.0,), random_corpus()), "a rate of -1.0 requests/s is impossible"),
    (lambda: long_prompt_points(Workload(), 0, (8,), random_corpus()), "a long prompt of 0 tokens is too short"),
    (lambda: long_prompt_points(Workload(), 9, (0,), random_corpus()), "0 decodes are too few"),
    (lambda: make_prompts([3], [5, 5]), "a text of 1 different tokens cannot give prompts; it takes at least 2"),
    (lambda: make_prompts([3], [1, 2], shared_prefix=-1), "a shared prefix of -1 tokens is impossible"),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_impossible_loads_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
