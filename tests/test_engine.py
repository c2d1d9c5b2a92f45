"""The engine's promise: a request's tokens are its own, whatever the batch, the chunks, the memory or the loop."""

import dataclasses
import itertools
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pytest
from scripted import TOKENIZER
from tiny import EOS, HF_CONFIG, MAX_LEN, SMALL, VOCAB_SIZE, tiny_engine, tiny_model, tiny_params

from fastgen_jax import SamplingParams, kernels
from fastgen_jax.compile_guard import forbid_compile
from fastgen_jax.engine import Engine
from fastgen_jax.models import init_params, llama
from fastgen_jax.types import MAX_LOGPROBS


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy_by_logits(engine, prompt: list[int], num_tokens: int) -> list[int]:
    """The slow definition of greedy decoding: the whole text again for every token."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = engine.put([0], [prompt + output])
        engine.flush([0])
        output.append(int(np.argmax(logits[0])))
    return output


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens of PROMPTS by the definition, with the reference backend."""
    engine = tiny_engine(backend="reference", max_num_batched_tokens=128)
    return [greedy_by_logits(engine, prompt, NUM_TOKENS) for prompt in PROMPTS]


NUM_TOKENS = 12
PROMPTS = prompts(10)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

BUDGETS = {8: 4, 16: 8, 64: 16, 512: 32}
"""max_num_batched_tokens -> a max_num_seqs that fits it."""


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("budget", BUDGETS)
def test_same_tokens_for_every_budget_block_size_loop_and_company(expected, budget, block_size):
    for overlap in (False, True):
        engine = tiny_engine(
            max_num_batched_tokens=budget,
            max_num_seqs=BUDGETS[budget],
            block_size=block_size,
            num_blocks=512 // block_size + 1,
            overlap=overlap,
        )
        batched = engine.generate(PROMPTS, GREEDY)
        assert [list(r.token_ids) for r in batched] == expected
        alone = [engine.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        assert [r.token_ids for r in alone] == [r.token_ids for r in batched]
        assert generate_among_aborts(engine) == expected
        stats = engine.stats()
        assert stats.free_blocks == stats.blocks


def generate_among_aborts(engine) -> list[list[int]]:
    """PROMPTS, with other requests added before each of them and aborted at random moments."""
    rng = random.Random(1)
    doomed, wanted, found = [], [], {}
    for noise, prompt in zip(prompts(len(PROMPTS), seed=7), PROMPTS, strict=True):
        doomed.append(engine.add(noise, SamplingParams(max_tokens=40, ignore_eos=True)))
        wanted.append(engine.add(prompt, GREEDY))
    while engine.has_work:
        found |= {r.request_id: list(r.token_ids) for r in engine.step()}
        if doomed and rng.random() < 0.5:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
    return [found[request_id] for request_id in wanted]


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_is_invisible(expected, overlap):
    engine = tiny_engine(num_blocks=11, block_size=8, overlap=overlap)
    responses = engine.generate(PROMPTS, GREEDY)
    assert [list(r.token_ids) for r in responses] == expected
    assert engine.stats().preemptions >= 3
    assert sum(r.num_preemptions for r in responses) == engine.stats().preemptions
    assert [r.num_prompt_tokens for r in responses] == [len(p) for p in PROMPTS]
    assert engine.stats().free_blocks == 10


def test_put_gives_the_same_logits_however_a_prompt_is_split():
    engine = tiny_engine(max_num_batched_tokens=64)
    prompt = [3 + i * 7 % 100 for i in range(48)]
    whole = engine.put(["whole"], [prompt])[0]
    for cuts in [(1,), (47,), (16, 32), (5, 6, 7)]:
        edges = [0, *cuts, len(prompt)]
        for start, stop in itertools.pairwise(edges):
            logits = engine.put(["pieces"], [prompt[start:stop]])[0]
        np.testing.assert_allclose(logits, whole, atol=2e-5 * np.abs(whole).max())
        engine.flush(["pieces"])
    engine.flush(["whole"])
    assert engine.stats().free_blocks == engine.stats().blocks


def test_put_refuses_what_does_not_fit_and_changes_nothing():
    engine = tiny_engine(num_blocks=4, block_size=4)
    engine.put(["a"], [[3] * 8])
    free = engine.stats().free_blocks
    for ids, tokens, match in [
        (["b"], [[3] * 8], "needs 2 blocks and 1 are free"),
        (["b"], [[3] * 17], "17 tokens in one put"),
        (["a", "a"], [[3], [4]], "the id 'a' more than once"),
        (["b"], [[]], "no tokens for the id 'b'"),
        (["b"], [], "1 ids and 0 lists"),
        (["b"], [[VOCAB_SIZE]], f"{VOCAB_SIZE} for the id 'b'; token ids are 0 to {VOCAB_SIZE - 1}"),
        (["b"], [[-1]], "-1 for the id 'b'"),
        (["b"], [[3.5]], "3.5 for the id 'b'"),
        ([str(i) for i in range(8)], [[3]] * 8, "of max_num_seqs left"),
    ]:
        with pytest.raises(ValueError, match=match):
            engine.put(ids, tokens)
        assert engine.stats().free_blocks == free
    with pytest.raises(ValueError, match="no sequence 'z'"):
        engine.flush(["z"])
    with pytest.raises(ValueError, match="flush them"):
        engine.add([3])
    engine.flush(["a", "a"])
    engine.add([3])
    with pytest.raises(ValueError, match="idle"):
        engine.put(["a"], [[3]])


def test_eos_ends_a_sequence_and_leaves_one_dead_row():
    for overlap in (False, True):
        engine = tiny_engine(overlap=overlap)
        plain = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
        stop = plain[4]
        first = plain.index(stop) + 1
        response = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=30, stop_token_ids=[stop], ignore_eos=True))[
            0
        ]
        assert response.token_ids == plain[:first]
        assert response.finish_reason == "stop"
        assert engine.stats().dead_rows == (0 if not overlap else 1)
        assert engine.stats().free_blocks == engine.stats().blocks


def test_update_params_swaps_weights_without_compiling():
    engine = tiny_engine()
    first = engine.generate(PROMPTS[:3], GREEDY)
    other = tiny_engine(seed=1).generate(PROMPTS[:3], GREEDY)
    assert [r.token_ids for r in first] != [r.token_ids for r in other]
    with forbid_compile():
        engine.update_params(tiny_params(1))
        swapped = engine.generate(PROMPTS[:3], GREEDY)
    assert [r.token_ids for r in swapped] == [r.token_ids for r in other]
    broken = tiny_params(1) | {"lm_head": {"weight": np.zeros((2, 2), np.float32)}}
    with pytest.raises(ValueError, match=r"\['lm_head'\]\['weight'\] is float32\[2, 2\]"):
        engine.update_params(broken)
    with pytest.raises(ValueError, match="lack"):
        engine.update_params({"model": tiny_params(1)["model"]})


def test_random_params_have_every_field_in_play():
    rng = random.Random(0)
    drawn = [random_params(rng) for _ in range(300)]
    for field in dataclasses.fields(SamplingParams):
        assert len({repr(getattr(params, field.name)) for params in drawn}) > 1, field.name


def random_params(rng: random.Random) -> SamplingParams:
    """Any mixture of fields."""

    def maybe(value, otherwise):
        return value if rng.random() < 0.3 else otherwise

    return SamplingParams(
        max_tokens=rng.randint(4, 16) if rng.random() < 0.98 else None,
        min_tokens=maybe(rng.randint(1, 4), 0),
        temperature=maybe(rng.uniform(0.1, 2), 0.0),
        top_p=maybe(rng.uniform(0.1, 1), 1.0),
        top_k=maybe(rng.randint(1, VOCAB_SIZE), 0),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(VOCAB_SIZE): rng.uniform(-5, 5)}, {}),
        allowed_token_ids=maybe(rng.sample(range(VOCAB_SIZE), 20), None),
        stop=maybe([chr(rng.randrange(97, 123)) for _ in range(3)], ()),
        include_stop_str_in_output=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.5,
        echo=rng.random() < 0.5,
        return_full_text=rng.random() < 0.5,
        stop_token_ids=maybe([rng.randrange(VOCAB_SIZE)], ()),
        ignore_eos=rng.random() < 0.5,
        seed=maybe(rng.randrange(2**63), None),
        n=maybe(2, 1),
        logprobs=maybe(rng.randint(0, MAX_LOGPROBS), None),
        prompt_logprobs=maybe(rng.randint(0, MAX_LOGPROBS), None),
    )


@pytest.mark.slow
def test_nothing_compiles_after_warm_up_over_500_random_requests():
    rng = random.Random(0)
    engine = tiny_engine(TOKENIZER, warm_up=True, max_num_batched_tokens=32, max_num_seqs=16, num_blocks=20)
    left = [(prompt, random_params(rng)) for prompt in prompts(500, longest=80)]
    num_wanted, num_found = sum(params.n for _, params in left), 0
    with forbid_compile():
        while left or engine.has_work:
            for _ in range(rng.randint(0, 3)):
                if left:
                    engine.add(*left.pop(), priority=rng.randint(0, 2))
            num_found += len(engine.step())
    assert num_found == num_wanted
    stats = engine.stats()
    assert stats.compiled_after_warm_up == 0
    assert stats.preemptions > 0
    assert stats.free_blocks == stats.blocks


def test_forbid_compile_notices():
    engine = tiny_engine(compile_cache=False, block_size=2)
    with pytest.raises(RuntimeError, match="compiled where nothing should be"), forbid_compile():
        engine.generate([[3, 4]], SamplingParams(max_tokens=1))


def test_seeded_requests_do_not_depend_on_their_company():
    params = [SamplingParams(max_tokens=10, temperature=1.0, seed=i, ignore_eos=True) for i in range(6)]
    engine = tiny_engine()
    together = engine.generate(PROMPTS[:6], params)
    alone = [engine.generate(p, s)[0] for p, s in zip(PROMPTS[:6], params, strict=True)]
    small = tiny_engine(num_blocks=12, block_size=8, overlap=False).generate(PROMPTS[:6], params)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone] == [r.token_ids for r in small]


def test_unseeded_samples_differ_and_repeat_with_the_engine_seed():
    params = SamplingParams(max_tokens=12, temperature=1.5, n=4, ignore_eos=True)
    samples = [tiny_engine(seed=0).generate([[5, 6]], params) for _ in range(2)]
    assert [r.index for r in samples[0]] == [0, 1, 2, 3]
    assert len({r.token_ids for r in samples[0]}) == 4
    assert [r.token_ids for r in samples[0]] == [r.token_ids for r in samples[1]]


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_are_those_of_the_logits(overlap):
    engine = tiny_engine(overlap=overlap, num_blocks=12, block_size=8)
    params = SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    responses = engine.generate(PROMPTS, params)
    assert engine.stats().preemptions > 0
    oracle = tiny_engine(backend="reference", max_num_batched_tokens=128)
    for prompt, response in zip(PROMPTS[:4], responses, strict=False):
        tokens = prompt + list(response.token_ids)
        reported = [*response.prompt_logprobs, *response.logprobs]
        assert len(reported) == len(tokens)
        assert reported[0] is None
        for i in range(1, len(tokens)):
            logits = oracle.put([0], [tokens[:i]])[0].astype(np.float64)
            oracle.flush([0])
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert reported[i].token_id == tokens[i]
            assert reported[i].logprob == pytest.approx(logprobs[tokens[i]], abs=1e-4)
            best = np.argsort(-logprobs)[: len(reported[i].top)]
            assert [token_id for token_id, _ in reported[i].top] == best.tolist()
    assert all(
        len(r.logprobs[0].top) == 3 and len(r.prompt_logprobs[-1].top) == 2 for r in responses if r.prompt_token_ids[1:]
    )


@pytest.mark.parametrize(
    ("prompt", "fields", "match"),
    [
        ([VOCAB_SIZE], {}, f"token id {VOCAB_SIZE}; this model's are 0 to {VOCAB_SIZE - 1}"),
        ([-1], {}, "token id -1"),
        ([], {}, "empty prompt|a prompt is"),
        ([3] * MAX_LEN, {}, "max_model_len"),
        ([3], {"stop_token_ids": [999]}, "stop_token_ids has the token id 999"),
        ([3], {"logit_bias": {999: 1.0}}, "logit_bias has the token id 999"),
        ([3], {"allowed_token_ids": [999]}, "allowed_token_ids has the token id 999"),
        ([3], {"stop": ["x"]}, "stop strings need a tokenizer"),
        ([3], {"max_tokens": None, "min_tokens": 2**32}, "min_tokens=4294967296 does not fit into max_model_len"),
        ([True], {}, "a prompt is a string or a list of token ids"),
        (b"abc", {}, "a prompt is a string or a list of token ids"),
        ({"prompt": "hi"}, {}, "a prompt is a string or a list of token ids"),
        ("text", {}, "no tokenizer"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_the_others_alone(expected, prompt, fields, match):
    engine = tiny_engine()
    wanted = [engine.add(p, GREEDY) for p in PROMPTS[:3]]
    engine.step()
    with pytest.raises((ValueError, TypeError), match=match):
        engine.add(prompt, SamplingParams(**fields))
    found = {}
    while engine.has_work:
        found |= {r.request_id: list(r.token_ids) for r in engine.step()}
    assert [found[i] for i in wanted] == expected[:3]


def test_abort_returns_what_there_was():
    engine = tiny_engine()
    request_id = engine.add([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(6):
        engine.step()
    assert engine.abort(request_id)
    assert not engine.abort(request_id)
    (response,) = engine.step()
    assert response.finish_reason == "abort"
    assert 1 <= len(response.token_ids) <= 6
    while engine.has_work:
        assert engine.step() == []
    assert engine.stats().free_blocks == engine.stats().blocks


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"max_num_seqs": 32, "max_num_batched_tokens": 16}, "max_num_seqs=32 is more than"),
        ({"max_step_ms": 10, "max_num_batched_tokens": 16}, 'which is given as 16; leave that "auto"'),
        ({"max_step_ms": 0}, "max_step_ms=0 is out of range; it must be a number above 0"),
        ({"policy": "orca", "max_num_batched_tokens": "auto"}, "policy='orca' never splits a prompt: set"),
        ({"max_model_len": MAX_LEN + 1}, "more than the model's"),
        ({"max_model_len": 200, "num_blocks": 5}, "needs more than the pool's 65 tokens"),
        ({"num_blocks": 1}, "num_blocks=1 is out of range"),
        ({"backend_": "x"}, "has no field 'backend_'"),
        ({"backend": "reference"}, "backend='reference' is not the model's, which is 'xla'"),
        ({"seed": 2**31}, "seed=2147483648 is out of range"),
        ({"dtype": "int8"}, "choose float32, bfloat16, float16"),
    ],
)
def test_a_bad_configuration_is_one_sentence(config, match):
    with pytest.raises((ValueError, TypeError), match=match):
        Engine(tiny_model(), tiny_params(), **(SMALL | config))


def test_default_max_model_len_shrinks_to_the_pool():
    assert tiny_engine(num_blocks=5).max_model_len == 65


def test_eos_comes_from_the_engine_and_may_be_several():
    engine = tiny_engine(eos_token_ids=())
    free = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=30))[0].token_ids
    ends = (free[10], free[20])
    response = tiny_engine(eos_token_ids=ends).generate([[5, 6, 7]], SamplingParams(max_tokens=30))[0]
    assert response.token_ids == free[: min(map(free.index, ends)) + 1]
    assert EOS not in ends


def test_what_a_chat_template_refuses_is_one_sentence():
    class Tokenizer:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, *_args, **_kwargs):
            raise jinja2.TemplateError("roles must alternate")

    with pytest.raises(ValueError, match="the chat template refuses these messages: roles must alternate"):
        tiny_engine(Tokenizer()).chat([{"role": "user", "content": "hi"}])
    Tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; use generate"):
        tiny_engine(Tokenizer()).chat([{"role": "user", "content": "hi"}])


def test_the_pool_is_updated_in_place_and_a_step_needs_little_beside_it():
    engine = tiny_engine(num_blocks=256)
    programs, pool = engine._runner.programs, engine._runner.kv_pool
    memory = programs.get("backbone", 16).memory_analysis()
    pool_bytes = sum(array.nbytes for kv in pool for array in kv)
    assert memory.alias_size_in_bytes >= pool_bytes + engine._runner.state.token_pool.nbytes
    assert memory.temp_size_in_bytes < pool_bytes / 2
    assert 0 < programs.largest_step_bytes() < pool_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_weights_run_in_sixteen_bits(dtype):
    model = tiny_model()
    engine = Engine(model, jax.tree.map(lambda w: w.astype(dtype), tiny_params()), **SMALL)
    assert {array.dtype.name for kv in engine._runner.kv_pool for array in kv} == {dtype}
    responses = engine.generate(PROMPTS, GREEDY)
    assert all(len(r.token_ids) == NUM_TOKENS for r in responses)
    with pytest.raises(ValueError, match=rf"dtype='float32' .* {dtype}"):
        Engine(model, engine.params, dtype="float32", **SMALL)


@pytest.mark.parametrize("priority", ["high", 1.5, None])
def test_a_priority_that_is_no_whole_number_changes_nothing(priority):
    engine = tiny_engine()
    with pytest.raises(TypeError, match=r"priority=.* must be a whole number"):
        engine.add([5, 6], priority=priority)
    assert not engine.has_work


def interrupt_after(monkeypatch, engine, name: str) -> None:
    """Ctrl-C strikes between the call of a program, which was given the pools, and the assignment of its result."""
    programs = engine._runner.programs
    get = programs.get

    def interrupted(wanted, bucket):
        def call(*args):
            get(wanted, bucket)(*args)
            raise KeyboardInterrupt

        return call if wanted == name else get(wanted, bucket)

    monkeypatch.setattr(programs, "get", interrupted)


def test_an_interrupted_put_forgets_its_sequences(expected, monkeypatch):
    engine = tiny_engine()
    engine.put([1, 2], [[5, 6], [7]])
    interrupt_after(monkeypatch, engine, "backbone")
    with pytest.raises(KeyboardInterrupt):
        engine.put([1], [[8]])
    monkeypatch.undo()
    assert engine.stats().free_blocks == engine.stats().blocks
    assert [list(r.token_ids) for r in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("name", ["backbone", "sample"])
def test_an_interrupted_step_leaves_a_usable_engine(expected, monkeypatch, name):
    engine = tiny_engine()
    interrupt_after(monkeypatch, engine, name)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert not engine.has_work
    assert [list(r.token_ids) for r in engine.generate(PROMPTS, GREEDY)] == expected


def test_pools_lost_to_an_exception_are_made_anew(expected):
    engine = tiny_engine()
    for array in jax.tree.leaves((engine._runner.kv_pool, engine._runner.state)):
        array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        engine.generate(PROMPTS, GREEDY)
    assert [list(r.token_ids) for r in engine.generate(PROMPTS, GREEDY)] == expected


def test_an_engine_is_gone_when_nobody_holds_it():
    engine = tiny_engine()
    gone = weakref.ref(engine._runner)
    del engine
    assert gone() is None


def test_params_may_be_numpy_arrays_but_of_one_dtype(expected):
    params = jax.tree.map(np.asarray, tiny_params())
    engine = Engine(tiny_model(), params, **SMALL)
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(engine.params))
    assert [list(r.token_ids) for r in engine.generate(PROMPTS, GREEDY)] == expected
    mixed = tiny_params() | {"lm_head": {"weight": jnp.zeros((32, VOCAB_SIZE), jnp.bfloat16)}}
    with pytest.raises(ValueError, match=r"params are of one dtype: .*(float32|bfloat16)"):
        Engine(tiny_model(), mixed, **SMALL)


def test_a_vocabulary_smaller_than_the_reported_logprobs():
    config = llama.from_hf(HF_CONFIG | {"vocab_size": 12})
    model = llama.Model(config, kernels.get_backend("xla"))
    engine = Engine(model, init_params(model, jax.random.key(0)), **SMALL)
    (response,) = engine.generate([[3, 4]], SamplingParams(max_tokens=2, logprobs=20, prompt_logprobs=20))
    assert len(response.logprobs[0].top) == len(response.prompt_logprobs[1].top) == 12


def test_a_request_keeps_the_biases_it_was_given():
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[VOCAB_SIZE * 2] = 1.0
    assert params.logit_bias == {5: 1.0}


def test_generate_from_several_threads(expected):
    engine = tiny_engine(num_blocks=20)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: engine.generate(PROMPTS, GREEDY), range(12)))
    assert all([list(r.token_ids) for r in responses] == expected for responses in results)
    assert engine.stats().free_blocks == engine.stats().blocks


@pytest.mark.parametrize(
    "messages", ["hi", None, {"role": "user", "content": "hi"}, [], [{"role": "user"}], [[5]], [5]]
)
def test_what_is_no_conversation_is_one_sentence(messages):
    class Tokenizer:
        chat_template = "{{ messages }}"

    with pytest.raises(TypeError, match=r"a conversation is a list of messages|a message is"):
        tiny_engine(Tokenizer()).chat_prompt(messages)
