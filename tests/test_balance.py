"""Which replica a request goes to, and what a replica is thought to have left to do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_jax.serving import balance
from fastgen_jax.serving.balance import (
    CHARACTERS_PER_TOKEN,
    CHUNK_TOKENS,
    USUAL_OUTPUT,
    Balancer,
    Load,
    Ticket,
    estimated_tokens,
    prompt_chunks,
)

quick = settings(max_examples=100, deadline=None)


def loads(**tokens: int) -> dict[str, Load]:
    """A replica for each name, with so many tokens outstanding."""
    found = {name: Load() for name in tokens}
    for name, outstanding in tokens.items():
        if outstanding:
            found[name].update(Ticket(outstanding - 1, 1))
            assert found[name].outstanding == outstanding
    return found


def prompt(name: str, num_chunks: int) -> list[int]:
    """Token ids that begin like no other prompt's."""
    return [ord(name), *range(num_chunks * CHUNK_TOKENS - 1)]


# What a request costs


@pytest.mark.parametrize(
    ("ticket", "tokens"),
    [
        (Ticket(10, None), 10 + 100),
        (Ticket(10, 16), 10 + 16),
        (Ticket(10, 500), 10 + 100),
        (Ticket(0, 16, num_generated=10), 6),
        (Ticket(10, 16, num_samples=4), 10 + 64),
        (Ticket(0, 16, num_samples=4, num_generated=30), 34),
    ],
)
def test_a_request_costs_its_prompt_and_the_output_that_is_expected(ticket, tokens):
    assert ticket.outstanding(expected_output=100) == tokens


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("max_tokens", [None, 16])
def test_one_that_has_outlived_expectations_is_about_to_end(max_tokens, num_samples):
    assert Ticket(0, max_tokens, num_samples, num_generated=5000).outstanding(100) == num_samples


@pytest.mark.parametrize(("text", "tokens"), [("", 1), ("abc", 1), ("a" * 400, 101), ([1, 2, 3], 3)])
def test_a_prompts_length_is_known_or_estimated_from_its_text(text, tokens):
    assert estimated_tokens(text) == tokens


def test_estimates_become_exact():
    load, ticket = Load(), Ticket(estimated_tokens("a" * 400), 20)
    load.update(ticket)
    assert load.outstanding == 101 + 20
    ticket.prompt_tokens = 87  # what the replica counted
    load.update(ticket)
    assert load.outstanding == 87 + 20
    ticket.prompt_tokens, ticket.num_generated = 0, 1
    load.update(ticket)
    assert load.outstanding == 19
    load.remove(ticket)
    assert load.outstanding == len(load) == 0


operations = st.tuples(
    st.sampled_from(["update", "remove", "end"]), st.integers(0, 5), st.integers(0, 300), st.integers(0, 200)
)


@quick
@given(operations=st.lists(operations, max_size=60))
def test_a_load_is_the_sum_of_its_tickets_as_they_were_last_seen(operations):
    load = Load()
    tickets = [Ticket(100, max_tokens, num_samples) for max_tokens in (None, 50) for num_samples in (1, 2, 4)]
    costs: dict[Ticket, int] = {}
    for operation, number, prompt_tokens, num_generated in operations:
        ticket = tickets[number]
        ticket.prompt_tokens, ticket.num_generated = prompt_tokens, num_generated
        if operation == "update":
            load.update(ticket)
            costs[ticket] = ticket.outstanding(round(load.expected_output))
        else:
            load.remove(ticket)
            costs.pop(ticket, None)
        if operation == "end":
            load.ended(ticket)
        assert load.outstanding == sum(costs.values())
        assert len(load) == len(costs)


def test_outputs_are_expected_to_be_as_long_as_they_have_been():
    load = Load()
    assert load.expected_output == USUAL_OUTPUT
    for _ in range(200):
        load.ended(Ticket(0, None, num_samples=2, num_generated=2 * 30))
    assert load.expected_output == pytest.approx(30, abs=0.1)
    load.update(Ticket(5, None))
    assert load.outstanding == 5 + 30


# The choice


def test_the_fewest_outstanding_tokens_win():
    assert Balancer().choose(loads(a=300, b=200, c=250), []) == "b"


def test_equals_take_turns():
    balancer, equal = Balancer(), loads(a=0, b=0, c=0)
    assert [balancer.choose(equal, []) for _ in range(7)] == list("abcabca")


def test_choosing_looks_at_no_ticket(monkeypatch):
    """So it costs the same with 1,000 of them."""
    found = loads(a=300, b=200)
    monkeypatch.setattr(Ticket, "outstanding", None)
    assert Balancer().choose(found, []) == "b"


@pytest.mark.parametrize(("ahead", "chosen"), [(0, "a"), (4 * CHUNK_TOKENS - 1, "a"), (4 * CHUNK_TOKENS + 1, "b")])
def test_a_prompt_goes_where_its_beginning_is_unless_waiting_there_costs_more(ahead, chosen):
    balancer, found = Balancer(), loads(a=ahead, b=0)
    found["a"].remember(prompt_chunks(prompt("x", 4)))
    assert balancer.choose(found, prompt_chunks([*prompt("x", 4), 7, 7, 7])) == chosen


def test_a_request_that_is_sent_leaves_its_beginning_there():
    balancer, found = Balancer(), loads(a=0, b=0)
    prompts = {name: prompt_chunks(prompt(name, 2)) for name in "xyz"}
    assert [balancer.choose(found, prompts[name]) for name in "xyz"] == ["a", "b", "a"]
    assert [balancer.choose(found, prompts[name]) for name in "zyxyz"] == ["a", "b", "a", "b", "a"]


def test_only_a_beginning_counts():
    load = Load()
    load.remember(prompt_chunks([*prompt("x", 1), *prompt("y", 1)]))
    assert load.cached_tokens(prompt_chunks([*prompt("x", 1), *prompt("y", 1)])) == 2 * CHUNK_TOKENS
    assert load.cached_tokens(prompt_chunks([*prompt("x", 1), *prompt("z", 1)])) == CHUNK_TOKENS
    assert load.cached_tokens(prompt_chunks([*prompt("z", 1), *prompt("y", 1)])) == 0


def test_a_replica_that_was_restarted_has_nothing_cached():
    load, chunks = Load(), prompt_chunks(prompt("x", 3))
    load.remember(chunks)
    load.forget()
    assert load.cached_tokens(chunks) == 0


def test_the_prompts_that_are_remembered_are_bounded_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(balance, "REMEMBERED_CHUNKS", 3)
    load = Load()
    for name in "xyxzw":
        load.remember(prompt_chunks(prompt(name, 1)))
    assert [load.cached_tokens(prompt_chunks(prompt(name, 1))) > 0 for name in "xyzw"] == [True, False, True, True]


@pytest.mark.parametrize(
    "make", [lambda n: list(range(n * CHUNK_TOKENS)), lambda n: "ab" * (n * CHUNK_TOKENS * CHARACTERS_PER_TOKEN // 2)]
)
def test_a_chunk_stands_for_all_up_to_its_end_and_an_unfinished_one_for_nothing(make):
    short, long = prompt_chunks(make(2)), prompt_chunks(make(4))
    assert len(set(long)) == 4
    assert long[:2] == short
    assert prompt_chunks(make(3)[:-1]) == short
    assert prompt_chunks(make(1)[1:]) == []


@quick
@given(
    outstanding=st.lists(st.integers(0, 600), min_size=1, max_size=5),
    seen=st.lists(st.integers(0, 6), min_size=5, max_size=5),
)
def test_no_other_replica_would_be_done_sooner(outstanding, seen):
    found = loads(**{f"r{i}": tokens for i, tokens in enumerate(outstanding)})
    chunks = prompt_chunks(prompt("x", 6))
    for load, num_chunks in zip(found.values(), seen, strict=False):
        load.remember(chunks[:num_chunks])
    left = {name: load.outstanding - CHUNK_TOKENS * seen[i] for i, (name, load) in enumerate(found.items())}
    assert left[Balancer().choose(found, chunks)] == min(left.values())
