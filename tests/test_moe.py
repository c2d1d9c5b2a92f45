"""Mixtures of experts: routing, the grouped MLP on both kinds of device, and whole models against Hugging Face's."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf import Pair, assert_close, load_engine, load_model, make_pair, save_random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import LENGTH, MIXTRAL, QWEN2_MOE, QWEN3, QWEN3_MOE, TOKENS

from fastgen_jax.models import moe
from fastgen_jax.types import SamplingParams

RNG = np.random.default_rng(0)

# Routing


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [(True, [[0.625, 0.375], [0.75, 0.25]]), (False, [[0.5, 0.3], [0.6, 0.2]])],
)
def test_a_token_takes_its_likeliest_experts(normalise, expected):
    probabilities = jnp.array([[0.5, 0.15, 0.3, 0.05], [0.1, 0.2, 0.1, 0.6]])
    weights, experts = moe.route(jnp.log(probabilities).astype(jnp.bfloat16), 2, normalise=normalise)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(experts, [[0, 2], [3, 1]])
    np.testing.assert_allclose(weights, expected, rtol=0.01)


def test_the_rows_of_an_expert_lie_side_by_side_in_the_order_of_their_tokens():
    experts = jnp.array([[2, 0], [4, 4], [0, 2], [3, 0]])  # of 4, so the second token is padding
    order, sizes = moe.by_expert(experts, 4)
    np.testing.assert_array_equal(order, [1, 4, 7, 0, 5, 6, 2, 3])
    np.testing.assert_array_equal(sizes, [3, 0, 2, 1])


def test_what_pads_a_bucket_changes_nothing():
    layer = moe.MixtureMLP(moe.Mixture(4, 2, 8, normalise=True, shared=8), "silu")
    x = jnp.asarray(RNG.normal(size=(5, 16)), jnp.float32)
    params = layer.init(jax.random.key(0), x, jnp.ones(5, bool))
    alone = layer.apply(params, x, jnp.ones(5, bool))
    padded = jnp.concatenate((x[:2], jnp.full((4, 16), jnp.nan), x[2:]))
    real = jnp.array([True] * 2 + [False] * 4 + [True] * 3)
    np.testing.assert_allclose(layer.apply(params, padded, real)[real], alone, rtol=1e-5, atol=1e-7)


# The grouped MLP

X, E, F, R = 6, 32, 24, 64
PATHS = [moe.by_tiles, moe.by_rounds]


@cache
def stacks() -> tuple[np.ndarray, np.ndarray]:
    """gate_up [X, 2F, E] and down [X, E, F]."""
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((X, 2 * F, E), (X, E, F)))


@cache
def compiled(path: Callable) -> Callable:
    return jax.jit(partial(path, act=jax.nn.silu, most=R))


def dense(rows: np.ndarray, sizes: list[int], gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """What is in a group, by one plain product an expert."""
    out, start = [], 0
    for expert, size in enumerate(sizes):
        gate, up = np.split(rows[start : start + size] @ gate_up[expert].T, 2, axis=1)
        out.append((gate / (1 + np.exp(-gate)) * up) @ down[expert].T)
        start += size
    return np.concatenate(out)


def check(path: Callable, sizes: list[int]) -> None:
    rows = np.random.default_rng(sum(sizes)).normal(size=(R, E)).astype(np.float32)
    ours = compiled(path)(rows, jnp.asarray(sizes, jnp.int32), *stacks())
    assert ours.shape == (R, E)
    expected = dense(rows, sizes, *stacks())
    np.testing.assert_allclose(ours[: sum(sizes)], expected, atol=1e-5 * max(1, np.abs(expected).max(initial=0)))


@pytest.fixture(autouse=True)
def few_rows_a_round(monkeypatch):
    """So that there are several rounds: of 16 rows, the mean and a quarter rounded up."""
    monkeypatch.setattr(moe, "_ROUND", 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "sizes",
    [
        [0, 0, 0, 0, 0, 0],
        [64, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 64],
        [0, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [16, 8, 24, 0, 15, 1],
        [7, 9, 17, 0, 31, 0],
        [11, 11, 11, 11, 10, 10],
    ],
)
def test_each_group_goes_through_its_own_expert(path, sizes):
    check(path, sizes)


@pytest.mark.parametrize("path", PATHS)
def test_whatever_the_groups_sizes_are(path):
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.integers(0, R), min_size=X - 1, max_size=X - 1), st.integers(0, R))
    def any_sizes(cuts, end):
        check(path, np.diff([0, *sorted(min(cut, end) for cut in cuts), end]).tolist())

    any_sizes()


@pytest.mark.parametrize("path", PATHS)
def test_in_bfloat16_too(path):
    sizes, (gate_up, down) = [7, 9, 17, 0, 31, 0], stacks()
    rows = RNG.normal(size=(R, E)).astype(np.float32)
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in (rows, gate_up, down)]
    ours = compiled(path)(arrays[0], jnp.asarray(sizes, jnp.int32), *arrays[1:])
    assert ours.dtype == jnp.bfloat16
    expected = dense(*(np.asarray(a, np.float32) if a is not sizes else a for a in (arrays[0], sizes, *arrays[1:])))
    np.testing.assert_allclose(ours.astype(jnp.float32), expected, atol=0.02 * np.abs(expected).max())


def rows_computed(path: Callable, sizes: np.ndarray, num_rows: int, most: int) -> int:
    """How many rows a path multiplies: those that it hands to the activation."""
    seen: list[int] = []

    def act(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda n: seen.append(int(n)), np.prod(x.shape[:-1]))
        return x

    gate_up, down = jnp.zeros((len(sizes), 4, 1)), jnp.zeros((len(sizes), 1, 2))
    jax.block_until_ready(path(jnp.zeros((num_rows, 1)), jnp.asarray(sizes), gate_up, down, act=act, most=most))
    jax.effects_barrier()
    return sum(seen)


def skewed(num_experts: int) -> np.ndarray:
    """Probabilities of experts in which the likeliest is as likely as those from the tenth on together."""
    return 1 / np.arange(1, num_experts + 1) ** 1.2


@pytest.mark.parametrize("popularity", [np.ones, skewed])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8)], ids=["mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_a_step_of_512_tokens_on_a_cpu_computes_at_most_1_3_times_the_rows_that_it_has(num_experts, top_k, popularity):
    chances = popularity(num_experts) / popularity(num_experts).sum()
    experts = [RNG.choice(num_experts, top_k, replace=False, p=chances) for _ in range(512)]
    sizes = np.bincount(np.concatenate(experts), minlength=num_experts).astype(np.int32)
    num_rows = rows_computed(moe.by_tiles, sizes, 512 * top_k, 512)
    assert num_rows == sum(-(-sizes // 8) * 8)
    assert 512 * top_k <= num_rows <= 512 * top_k + 7 * num_experts <= 1.3 * 512 * top_k


def test_nothing_is_computed_for_padding_on_a_cpu():
    """A bucket of 512 tokens with 3 real ones in it, which take two of 8 experts each."""
    assert rows_computed(moe.by_tiles, np.array([3, 0, 1, 0, 0, 2, 0, 0], np.int32), 1024, 512) == 3 * 8


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        ([3, 0, 1, 0, 0, 2, 0, 0], 1),
        ([128] * 8, 1),
        ([160, 160, 160, 160, 160, 160, 64, 0], 1),
        ([161, 160, 160, 160, 160, 160, 63, 0], 2),
        ([512, 512, 0, 0, 0, 0, 0, 0], 4),
        ([0, 0, 0, 0, 0, 0, 0, 0], 0),
    ],
)
def test_a_round_on_a_gpu_has_room_for_a_quarter_more_rows_than_the_mean(sizes, rounds):
    """Of each of 8 experts, where 512 tokens take two."""
    assert rows_computed(moe.by_rounds, np.array(sizes, np.int32), 1024, 512) == rounds * 8 * 160


@pytest.mark.parametrize(("tokens", "loops"), [(128, 0), (512, 1)])
def test_a_gpu_gets_a_batched_matmul_and_few_tokens_no_loop(tokens, loops, monkeypatch):
    monkeypatch.undo()
    shapes = [(2 * tokens, 64), (8, 96, 64), (8, 64, 48)]
    rows, gate_up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    run = jax.jit(partial(moe.grouped_mlp, act=jax.nn.silu, most=tokens))
    traced = run.trace(rows, jax.ShapeDtypeStruct((8,), jnp.int32), gate_up, down)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") == loops
    assert text.count("stablehlo.dot_general") == text.count("batching_dims = [0] x [0]") == 2


# Whole models


@pytest.mark.parametrize("hf_config", [MIXTRAL, QWEN2_MOE, QWEN3, QWEN3_MOE], ids=lambda config: config["model_type"])
def test_greedy_tokens_are_hugging_faces(hf_config):
    pair = make_pair(hf_config, max_model_len=LENGTH)
    prompts = [TOKENS[i, :n].tolist() for i, n in enumerate((3, 40, 11, 1))]
    responses = pair.engine.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt])
        theirs = pair.hf.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, eos_token_id=-1
        )
        assert list(response.token_ids) == theirs[0, len(prompt) :].tolist()


def test_the_tokens_that_pad_a_bucket_take_no_expert(monkeypatch):
    seen: list[int] = []
    grouped_mlp = moe.grouped_mlp

    def count(rows: jax.Array, sizes: jax.Array, *stacks: jax.Array, **options) -> jax.Array:
        jax.debug.callback(lambda n: seen.append(int(n)), sizes.sum())
        return grouped_mlp(rows, sizes, *stacks, **options)

    monkeypatch.setattr(moe, "grouped_mlp", count)
    # A config that no other test has: what is traced here must not be theirs.
    pair = make_pair(MIXTRAL | {"intermediate_size": 88}, max_model_len=LENGTH, max_num_batched_tokens=16)
    pair.engine.put(["it"], [TOKENS[0, :11].tolist()])
    jax.effects_barrier()
    assert seen == [11 * 2] * 2


@pytest.mark.parametrize("hf_config", [MIXTRAL, QWEN2_MOE | {"norm_topk_prob": True}], ids=["mixtral", "qwen2_moe"])
def test_an_expert_that_all_tokens_take_and_one_that_none_takes(hf_config, tmp_path):
    hf = save_random_model(hf_config, tmp_path)
    with torch.no_grad():
        # The first channel is the same positive number in every token and layer, and the routers' bias.
        hf.model.embed_tokens.weight[:, 0] = 1
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.experts.down_proj[:, 0] = 0
            if hf_config["model_type"] == "qwen2_moe":
                layer.mlp.shared_expert.down_proj.weight[0] = 0
            layer.mlp.gate.weight[0, 0], layer.mlp.gate.weight[1, 0] = 20, -20
        for router_logits in hf(torch.tensor(TOKENS), output_router_logits=True).router_logits:
            top_k = hf_config["num_experts_per_tok"]
            taken = np.bincount(router_logits.topk(top_k).indices.ravel(), minlength=router_logits.shape[1])
            assert taken[0] == TOKENS.size and taken[1] == 0
            assert 0 < taken[2:].min() < taken[2:].max() < TOKENS.size
    hf.save_pretrained(tmp_path)
    pair = Pair(hf, load_engine(tmp_path, max_model_len=LENGTH))
    theirs = pair.hf_logits(TOKENS)
    ours = [pair.engine.put(["it"], [TOKENS[0, start : start + 16].tolist()])[0] for start in range(0, LENGTH, 16)]
    assert_close(np.stack(ours), theirs[0, 15::16])


@pytest.mark.parametrize("hf_config", [MIXTRAL, QWEN2_MOE, QWEN3_MOE], ids=lambda config: config["model_type"])
def test_experts_saved_one_by_one_and_as_stacks_load_alike(hf_config, tmp_path):
    hf = save_random_model(hf_config, tmp_path)
    _, one_by_one = load_model(tmp_path)
    hf.save_pretrained(tmp_path, save_original_format=False)
    _, stacks = load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, one_by_one, stacks)
    experts = hf.model.layers[1].mlp.experts
    ours = stacks["model"]["layers_1"]["mlp"]["experts"]
    np.testing.assert_array_equal(ours["gate_up_proj"]["weight"], experts.gate_up_proj.detach().numpy())
    np.testing.assert_array_equal(ours["down_proj"]["weight"], experts.down_proj.detach().numpy())
