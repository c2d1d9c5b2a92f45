"""A model shared by 2, 4 or 8 devices computes what one device does."""

import re
import tempfile
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import jax
import numpy as np
import pytest
from hf import LLAMA, SIZES, assert_close, load_engine, save_random_model
from safetensors.numpy import load_file, save_file
from test_models import VARIANTS

from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.engine import Engine
from fastgen_jax.models import llama
from fastgen_jax.pretrained import shards_for
from fastgen_jax.sharding import ShardingRules, Shards, check_heads, piece
from fastgen_jax.types import EngineConfig, SamplingParams

LENGTH = 64
FAMILIES = {
    "llama": LLAMA,
    "llama, MQA, tied": LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama, biases everywhere": LLAMA | {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral, window": LLAMA | {"model_type": "mistral", "sliding_window": 8},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": LLAMA
    | {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": 97,
        "hidden_size": 64,
        "ffn_dim": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "word_embed_proj_dim": 24,
        "max_position_embeddings": LENGTH,
    },
}
FIRST = {config["model_type"]: name for name, config in reversed(VARIANTS.items())}
IN_ONE_TENSOR = "granitemoe"  # its experts, which cannot be shared out
OTHERS = set(FIRST) - {config["model_type"] for config in FAMILIES.values()} - {IN_ONE_TENSOR}
BY_TWO = [*(FIRST[model_type] for model_type in sorted(OTHERS)), "falcon, new decoder", "stablelm, head norms"]
BY_TWO += ["cohere, head norms"]
FAMILIES |= {name: VARIANTS[name] for name in BY_TWO}
PARALLEL = ("gpt_neox", "phi", "falcon", "cohere", "cohere2")
ALL_HEADS_NORMED = ("olmo2", "olmo3", "olmoe")
CASES = [(name, size) for name in FAMILIES for size in ((2,) if name in BY_TWO else (2, 4, 8))]
CASES += [
    ("olmo2", 4),
    ("stablelm, head norms", 4),
    ("cohere, head norms", 4),
]  # keys have norms that neighbours repeat
TOKENS = np.random.default_rng(0).integers(0, 97, (4, LENGTH))
PROMPTS = [TOKENS[i, : 9 * (i + 1)].tolist() for i in range(4)]


@cache
def folder_of(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="shared-model-"))
    HF[name] = save_random_model(FAMILIES[name], folder)
    return folder


HF: dict = {}


BY_EXPERTS = ShardingRules(experts="tp", expert_mlp=None)


@lru_cache(maxsize=6)  # programs take memory maps, of which a process may have so many
def engine_of(name: str, size: int, rules: ShardingRules | None = None) -> Engine:
    return load_engine(folder_of(name), Shards.over(jax.devices()[:size], rules))


@pytest.fixture(scope="module", autouse=True)
def drop_engines() -> Iterator[None]:
    yield
    engine_of.cache_clear()
    HF.clear()


def put_whole_and_in_pieces(engine: Engine) -> np.ndarray:
    """Logits after 24 tokens of three sequences: one run whole, one in chunks, one token by token at the end."""
    rows = TOKENS[:3, :24].tolist()
    engine.put([0, 1], [rows[0], rows[1][:7]])
    engine.flush([0])
    last = [engine.put([0, 1], [rows[0], rows[1][7:8]])[0]]
    engine.put([1], [rows[1][8:20]])
    last.append(engine.put([1], [rows[1][20:]])[0])
    engine.put([2], [rows[2][:20]])
    for token in rows[2][20:]:
        logits = engine.put([2], [[token]])
    engine.flush([0, 1, 2])
    return np.stack([*last, logits[0]])


@pytest.mark.parametrize(("name", "size"), CASES, scope="module")
def test_logits_are_hugging_faces_and_one_devices(name, size):
    import torch

    ours = put_whole_and_in_pieces(engine_of(name, size))
    with torch.no_grad():
        theirs = HF[name](torch.tensor(TOKENS[:3, :24])).logits[:, -1].numpy()
    assert_close(ours, theirs)
    assert_close(ours, put_whole_and_in_pieces(engine_of(name, 1)))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_may_be_shared_out_whole(name, size):
    ours = put_whole_and_in_pieces(engine_of(name, size, BY_EXPERTS))
    assert_close(ours, put_whole_and_in_pieces(engine_of(name, 1)))
    stack = engine_of(name, size, BY_EXPERTS).params["model"]["layers_0"]["mlp"]["experts"]["down_proj"]["weight"]
    assert {shard.data.shape[0] for shard in stack.addressable_shards} == {8 // size}
    backbone = engine_of(name, size, BY_EXPERTS)._runner.programs.get("backbone", 32)
    assert [kind for _, kind in collectives(backbone.as_text())] == ["all-reduce"] * (2 * 2 + 1)


@pytest.mark.parametrize(("name", "size"), [case for case in CASES if case[0] not in BY_TWO], scope="module")
def test_greedy_tokens_are_one_devices(name, size):
    """Through chunks, overlap and a pool so small that sequences are preempted, or longer than it behind a window."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    gives_back = "window" in name
    num_blocks = 6 if gives_back else 14
    sizes = {"num_blocks": num_blocks, "max_num_batched_tokens": 16}
    shared = load_engine(folder_of(name), Shards.over(jax.devices()[:size]), **sizes)
    alone = engine_of(name, 1).generate(PROMPTS, params)
    found = shared.generate(PROMPTS, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in alone]
    if gives_back:
        assert len(PROMPTS[-1]) + 24 > shared._runner.block_size * num_blocks
    else:
        assert shared.stats().preemptions > 0


@pytest.mark.parametrize(("name", "size"), [case for case in CASES if case[0] in BY_TWO], scope="module")
def test_greedy_tokens_of_more_sequences_than_fit_are_one_devices(name, size):
    """Through chunks, overlap and preemption, by the engines that the other tests have."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    shared, alone = engine_of(name, size), engine_of(name, 1)
    prompts = [tokens[start:] for start in range(3) for tokens in PROMPTS[1:]]
    found, expected = shared.generate(prompts, params), alone.generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    keeps_all = shared._runner.window.num_tokens is None  # and else has room
    assert shared.stats().preemptions > 0 or not keeps_all


def test_experts_that_lie_in_one_tensor_are_refused(tmp_path):
    save_random_model(VARIANTS[IN_ONE_TENSOR], tmp_path)
    with pytest.raises(ValueError, match=r"^tensor '.*down_proj' has all experts in one, which cannot be shared out;"):
        load_engine(tmp_path, Shards.over(jax.devices()[:2]))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.7, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.2, top_k=5, seed=4, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, seed=5, logit_bias={7: 4.0}, min_tokens=5, stop_token_ids=(1,)),
        SamplingParams(max_tokens=12, allowed_token_ids=(3, 50, 96), presence_penalty=1.0, ignore_eos=True),
    ],
    ids=["top_p", "top_k", "bias", "allowed"],
)
def test_samples_are_one_devices(size, params):
    found, alone = (engine_of("llama", n).generate(PROMPTS, params) for n in (size, 1))
    assert [r.token_ids for r in found] == [r.token_ids for r in alone]


@pytest.mark.parametrize("size", [2, 8])
def test_log_probabilities_are_one_devices(size):
    params = SamplingParams(max_tokens=3, logprobs=4, prompt_logprobs=4, ignore_eos=True)
    for found, alone in zip(*(engine_of("llama", n).generate(PROMPTS, params) for n in (size, 1)), strict=True):
        for ours, theirs in (
            *zip(found.logprobs, alone.logprobs, strict=True),
            *zip(found.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True),
        ):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_nothing_compiles_after_the_warm_up():
    engine = load_engine(folder_of("llama"), Shards.over(jax.devices()[:4]), warm_up=True, max_num_batched_tokens=16)
    for params in (SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=1.0, logprobs=2)):
        engine.generate(PROMPTS, params)
    assert engine.stats().compiled_after_warm_up == 0


def collectives(hlo: str) -> list[str]:
    """Every collective of a compiled program, with the type of what it gives."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", hlo)


@pytest.mark.parametrize(("name", "size"), CASES, scope="module")
def test_a_layer_adds_up_twice_and_nothing_else_is_exchanged(name, size):
    """XLA makes one sum of a parallel block's two; an OLMo 2 adds up two numbers a token more, to norm all heads."""
    programs = engine_of(name, size)._runner.programs
    kinds = [kind for _, kind in collectives(programs.get("backbone", 32).as_text())]
    family, num_layers = FAMILIES[name]["model_type"], engine_of(name, size)._runner.model.config.num_layers
    a_layer = 1 if family in PARALLEL else 3 if family in ALL_HEADS_NORMED else 2
    assert kinds == ["all-reduce"] * (num_layers * a_layer + 1)  # and the embedding


def test_logits_go_from_columns_to_rows_and_only_tokens_are_gathered():
    programs = engine_of("llama", 4)._runner.programs
    found = collectives(programs.get("sample", 8).as_text())
    assert sorted(kind for _, kind in found) == ["all-gather", "all-to-all"]
    assert next(shape for shape, kind in found if kind == "all-gather").startswith("s32[8]")


def test_each_device_holds_its_share():
    engine = engine_of("llama", 4)
    for layer in (engine.params["model"]["layers_0"]["mlp"], engine.params["lm_head"]):
        for leaf in jax.tree.leaves(layer):
            assert {shard.data.size * 4 for shard in leaf.addressable_shards} == {leaf.size}
    (pool, _), *_ = engine._runner.kv_pool
    assert [shard.data.shape[1] for shard in pool.addressable_shards] == [1] * 4  # two KV heads, each held twice
    heads = [np.asarray(shard.data) for shard in pool.addressable_shards]
    assert np.array_equal(heads[0], heads[1]) and np.array_equal(heads[2], heads[3])
    assert not np.array_equal(heads[0], heads[2])


# Loading


def test_shards_read_their_own_bytes(tmp_path):
    """The loader's parts, of every shard, make up the whole tensor."""
    tensors = load_file(folder_of("llama") / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight"):
        whole = tensors[name]
        for region in (
            (slice(3, 20), slice(0, whole.shape[1])),
            (slice(0, 5), slice(7, 31)),
            (slice(9, 9), slice(0, 4)),
        ):
            for dtype in (np.float32, np.float16):
                out = np.full([part.stop - part.start for part in region], 9, dtype)
                before = source.bytes_read
                source.read_into(name, out, region)
                np.testing.assert_array_equal(out, whole[region].astype(dtype))
                assert source.bytes_read - before == out.size * 4


@pytest.mark.parametrize(
    ("whole", "local", "size", "axis", "expected"),
    [
        (12, 3, 4, "heads", [(0, 3), (3, 6), (6, 9), (9, 12)]),
        (4, 2, 4, "heads", [(0, 2), (0, 2), (2, 4), (2, 4)]),  # two KV heads of two dimensions
        (2, 2, 2, "heads", [(0, 2), (0, 2)]),
        (10, 3, 4, "vocab", [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (4, 2, 3, "vocab", [(0, 2), (2, 4), (4, 4)]),
    ],
)
def test_who_gets_which_part(whole, local, size, axis, expected):
    found = [piece(whole, local, index, size, axis) for index in range(size)]
    assert [(part.start, part.stop) for part in found] == expected


# Bad input

TWELVE_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("config", "size", "valid"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 3, "1, 2, 4, 8"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 16, "1, 2, 4, 8"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96},
            2,
            "1, 3, 6, 12",
        ),
        ({"intermediate_size": 82}, 4, "1, 2"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused_with_what_can(config, size, valid):
    with pytest.raises(ValueError, match=rf"^tensor_parallel={size} cannot share out .*; it can be {valid}$"):
        check_heads(llama.from_hf(LLAMA | config), size)


def test_more_devices_than_there_are_is_one_sentence():
    config = llama.from_hf(LLAMA | {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 128})
    with pytest.raises(ValueError, match=r"^tensor_parallel=16 is more than the devices that JAX sees, 8; XLA_FLAGS="):
        shards_for(EngineConfig(tensor_parallel=16), config)


def test_experts_of_a_model_without_any_are_refused():
    with pytest.raises(ValueError, match=r"^expert_parallel=True is for a mixture of experts, and .* none$"):
        shards_for(EngineConfig(tensor_parallel=2, expert_parallel=True), llama.from_hf(LLAMA))


def test_params_laid_out_otherwise_are_refused():
    engine = engine_of("llama", 2)
    with pytest.raises(ValueError, match=r"^the params are not laid out for the model's 2 shards"):
        Engine(engine._runner.model, engine_of("llama", 1).params, **SIZES)
    with pytest.raises(ValueError, match=r"^the params lie on 2 devices, and the model has no shards"):
        Engine(engine_of("llama", 1)._runner.model, engine.params, **SIZES)
    with pytest.raises(ValueError, match=r"^tensor_parallel=4 is not the model's, which has 2 shards"):
        Engine(engine._runner.model, engine.params, **SIZES, tensor_parallel=4)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"heads": "dp"}, r"^heads='dp' is no mesh axis; it must be 'tp' or None$"),
        ({"expert_mlp": None}, r"^a mixture is cut by experts or within each"),
        ({"experts": "tp"}, r"^a mixture is cut by experts or within each"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, sentence):
    with pytest.raises(ValueError, match=sentence):
        ShardingRules(**rules)
