"""Every family gives Hugging Face's logits, however a prompt is cut and whatever shares its steps."""

from collections.abc import Iterator
from functools import cache, lru_cache

import jax
import numpy as np
import pytest
from hf import LLAMA, TOLERANCE, Pair, assert_close, make_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_jax.types import SamplingParams

# Its new name is not in every version of transformers that we support.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

NUM_SEQUENCES, LENGTH, BUDGET = 4, 64, 16

MISTRAL = LLAMA | {"model_type": "mistral"}
QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN2_MOE = LLAMA | EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
QWEN3_MOE = QWEN3 | EXPERTS | {"model_type": "qwen3_moe"}
OPT = {
    "model_type": "opt",
    "vocab_size": 97,
    "hidden_size": 64,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
PLAIN = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"}
OLMO2 = LLAMA | {"model_type": "olmo2"}
GRANITE = LLAMA | {
    "model_type": "granite",
    "attention_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.3,
}
STABLELM = PLAIN | {"model_type": "stablelm", "num_attention_heads": 4}
STARCODER2 = PLAIN | {"model_type": "starcoder2"}
SMOLLM3 = LLAMA | {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": None}
PHI3 = LLAMA | {"model_type": "phi3", "num_attention_heads": 4, "pad_token_id": None}
GEMMA2 = LLAMA | {
    "model_type": "gemma2",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
GPT_NEOX = PLAIN | {"model_type": "gpt_neox", "num_attention_heads": 4, "rotary_pct": 0.5}
del GPT_NEOX["num_key_value_heads"]
PHI = PLAIN | {"model_type": "phi", "num_attention_heads": 4}
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
FALCON = {
    "model_type": "falcon",
    "vocab_size": 97,
    "hidden_size": 64,
    "ffn_hidden_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
COHERE2 = PLAIN | {"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 2, "logit_scale": 0.25}
GLM4 = LLAMA | {"model_type": "glm4", "head_dim": 16, "pad_token_id": None}
EXAONE4 = LLAMA | {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 2}
GEMMA = LLAMA | {"model_type": "gemma", "head_dim": 16, "hidden_act": "gelu"}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP |= {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 8}
COHERE = PLAIN | {"model_type": "cohere", "logit_scale": 0.25}
OLMO = PLAIN | {"model_type": "olmo", "pad_token_id": None}
OLMO3 = LLAMA | {"model_type": "olmo3", "sliding_window": 8, "num_hidden_layers": 4, "pad_token_id": None}
OLMOE = LLAMA | {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}
HELIUM = LLAMA | {"model_type": "helium", "head_dim": 8}  # whose output weights are square
MINISTRAL = LLAMA | {"model_type": "ministral", "head_dim": 8, "sliding_window": 8}
SEED_OSS = LLAMA | {"model_type": "seed_oss", "head_dim": 16}
ARCEE = LLAMA | {"model_type": "arcee"}
NEMOTRON = PLAIN | {"model_type": "nemotron", "num_attention_heads": 4}
GLM = LLAMA | {"model_type": "glm", "head_dim": 16, "pad_token_id": None}
ERNIE = LLAMA | {"model_type": "ernie4_5", "head_dim": 16}
EXAONE = {
    "model_type": "exaone",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "activation_function": "silu",
    "layer_norm_epsilon": 1e-5,
}
EXAONE45_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_key_value_heads": 1}
EXAONE45_VISION |= {"model_type": "exaone4_5_vision", "out_hidden_size": 64}
INTERNLM3 = LLAMA | {"model_type": "internlm3", "head_dim": 16}
GRANITEMOE = GRANITE | {"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 3}
# A head of 16 dimensions and bases of its own, so that the ramp of "yarn" falls between frequencies.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WIDE_HEAD = {"num_attention_heads": 4, "rope_theta": 500.0}
LONGROPE = {
    "max_position_embeddings": 4 * LENGTH,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
    },
}

ROPE_VARIANTS = {
    "default": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "linear, new spelling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn, mscale": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "yarn, attention_factor": {"rope_scaling": YARN | {"attention_factor": 1.5}},
    "yarn, not truncated": {"rope_scaling": YARN | {"truncate": False}},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3, new spelling": {"rope_parameters": LLAMA3 | {"rope_theta": 20.0}},
}

VARIANTS = {
    "llama, MHA": LLAMA | {"num_key_value_heads": 8},
    "llama, KV heads not said": {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
    "llama, G=2": LLAMA | {"num_key_value_heads": 4},
    "llama, G=4": LLAMA,
    "llama, G=8, MQA": LLAMA | {"num_key_value_heads": 1},
    "llama, tied embeddings": LLAMA | {"tie_word_embeddings": True},
    "llama, attention_bias": LLAMA | {"attention_bias": True},
    "llama, mlp_bias": LLAMA | {"mlp_bias": True},
    "llama, gelu": LLAMA | {"hidden_act": "gelu"},
    "llama, head_dim": LLAMA | {"head_dim": 24},
    "llama, dynamic rope": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    **{f"llama, rope {name}": LLAMA | WIDE_HEAD | rope for name, rope in ROPE_VARIANTS.items()},
    "mistral, window 8": MISTRAL | {"sliding_window": 8},
    "mistral, window 21": MISTRAL | {"sliding_window": 21},
    "mistral, window beyond the context": MISTRAL | {"sliding_window": 4096},
    "mistral, no window": MISTRAL | {"sliding_window": None},
    "opt": OPT,
    "opt, norm after": OPT | {"do_layer_norm_before": False},
    "opt, narrow embeddings": OPT | {"word_embed_proj_dim": 24},
    "opt-350m's shape": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "opt, no biases": OPT | {"enable_bias": False},
    "opt, norms without weights": OPT | {"layer_norm_elementwise_affine": False},
    "opt, no final norm": OPT | {"_remove_final_layer_norm": True},
    "opt, gelu": OPT | {"activation_function": "gelu"},
    "qwen2": QWEN2,
    "qwen2, window off": QWEN2 | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    "qwen2, window from layer 1": QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen2, window null": QWEN2 | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
    "qwen2, layer_types": QWEN2
    | {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2, tied, yarn": QWEN2 | {"tie_word_embeddings": True, "rope_scaling": YARN},
    "qwen3": QWEN3,
    "qwen3, attention_bias, tied": QWEN3 | {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3, window from layer 1": QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mixtral": MIXTRAL,
    "mixtral, one expert a token": MIXTRAL | {"num_experts_per_tok": 1},
    "mixtral, window 8": MIXTRAL | {"sliding_window": 8},
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe, norm_topk_prob": QWEN2_MOE | {"norm_topk_prob": True},
    "qwen2_moe, mlp_only_layers": QWEN2_MOE | {"mlp_only_layers": [0]},
    "qwen2_moe, no qkv_bias": QWEN2_MOE | {"qkv_bias": False},
    "qwen2_moe, window below layer 1": QWEN2_MOE
    | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, norm_topk_prob, attention_bias": QWEN3_MOE | {"norm_topk_prob": True, "attention_bias": True},
    "qwen3_moe, every second layer": QWEN3_MOE | {"decoder_sparse_step": 2},
    "qwen3_moe, window": QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 8},
    "olmo2": OLMO2,
    "olmo2, attention_bias": OLMO2 | {"attention_bias": True},
    "granite": GRANITE,
    "granite, biases, tied": GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "stablelm": STABLELM,
    "stablelm, parallel, biases": STABLELM | {"use_parallel_residual": True, "use_qkv_bias": True},
    "stablelm, head norms": STABLELM | {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "starcoder2": STARCODER2,
    "starcoder2, window 8, no biases": STARCODER2 | {"sliding_window": 8, "use_bias": False},
    "smollm3": SMOLLM3,
    "smollm3, no_rope_layers": SMOLLM3 | {"no_rope_layers": [0, 1], "mlp_bias": True},
    "smollm3, window in layer 1": SMOLLM3 | {"use_sliding_window": True, "sliding_window": 8, "attention_bias": True},
    "phi3": PHI3,
    "phi3, window 8, a part rotated": PHI3 | {"sliding_window": 8, "partial_rotary_factor": 0.75},
    "phi3, longrope, short": PHI3 | LONGROPE | {"original_max_position_embeddings": LENGTH},
    "gemma2": GEMMA2,
    "gemma2, no caps": GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma2, windows in the other layers, attention_bias": GEMMA2
    | {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": True},
    "gpt_neox": GPT_NEOX,
    "gpt_neox, not parallel": GPT_NEOX | {"use_parallel_residual": False, "attention_bias": False},
    "phi": PHI,
    "phi, head norms": PHI | {"qk_layernorm": True},
    "gpt2": GPT2,
    "gpt2, n_inner, gelu": GPT2 | {"n_inner": 80, "activation_function": "gelu"},
    "falcon": FALCON,
    "falcon, new decoder": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon, new decoder, one norm": FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon, many KV heads, not parallel": FALCON | {"multi_query": False, "parallel_attn": False},
    "cohere2": COHERE2,
    "cohere2, layer_types, attention_bias": COHERE2
    | {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": True},
    "glm4": GLM4,
    "glm4, no biases": GLM4 | {"attention_bias": False, "partial_rotary_factor": 1.0},
    "exaone4": EXAONE4,
    "exaone4, no window": EXAONE4 | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "exaone4_5": {
        "model_type": "exaone4_5",
        "text_config": EXAONE4,
        "vision_config": EXAONE45_VISION,
        "image_token_id": 1000,
        "video_token_id": 1001,
    },
    "exaone": EXAONE,
    "exaone, llama3 rope": EXAONE | {"rope_scaling": LLAMA3},
    "gemma": GEMMA,
    "gemma, attention_bias": GEMMA | {"attention_bias": True, "tie_word_embeddings": False},
    "gemma3_text": GEMMA3,
    "gemma3_text, linear rope": GEMMA3
    | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0, "rope_local_base_freq": 20.0},
    "gemma3_text, new spelling": GEMMA3
    | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": LLAMA3 | {"rope_theta": 20.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        },
    },
    "gemma3_text, capped, attention_bias": GEMMA3 | {"final_logit_softcapping": 5.0, "attention_bias": True},
    "gemma3": {
        "model_type": "gemma3",
        "text_config": GEMMA3,
        "vision_config": SIGLIP,
        "image_token_index": 1000,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": MISTRAL | {"head_dim": 8, "sliding_window": None},
        "vision_config": PIXTRAL,
        "image_token_index": 1000,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    },
    "cohere": COHERE,
    "cohere, head norms": COHERE | {"use_qk_norm": True, "tie_word_embeddings": False},
    "olmo": OLMO,
    "olmo, attention_bias, tied": OLMO | {"attention_bias": True, "tie_word_embeddings": True},
    "olmo3": OLMO3,
    "olmo3, yarn": OLMO3 | WIDE_HEAD | {"rope_theta": 500000.0, "rope_scaling": YARN},
    "olmoe": OLMOE,
    "olmoe, norm_topk_prob": OLMOE | {"norm_topk_prob": True},
    "helium": HELIUM,
    "ministral": MINISTRAL,
    "ministral, layer_types": MINISTRAL | {"layer_types": ["full_attention", "sliding_attention"]},
    "seed_oss": SEED_OSS,
    "seed_oss, other biases": SEED_OSS | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "arcee": ARCEE,
    "arcee, biases": ARCEE | {"attention_bias": True, "mlp_bias": True},
    "nemotron": NEMOTRON,
    "nemotron, biases": NEMOTRON | {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.25},
    "glm": GLM,
    "glm, no biases": GLM | {"attention_bias": False, "partial_rotary_factor": 1.0},
    "ernie4_5": ERNIE,
    "ernie4_5, biases": ERNIE | {"use_bias": True},
    "internlm3": INTERNLM3,
    "internlm3, biases": INTERNLM3 | {"qkv_bias": True, "bias": True},
    "granitemoe": GRANITEMOE,
}

TOKENS = np.random.default_rng(0).integers(0, 97, (NUM_SEQUENCES, LENGTH))

Step = dict[int, int]
"""Sequence -> how many of its tokens are put in one step."""

SMALL_STEPS = st.dictionaries(st.integers(0, NUM_SEQUENCES - 1), st.integers(1, 4), min_size=1)
LARGE_STEPS = st.dictionaries(st.integers(0, NUM_SEQUENCES - 1), st.integers(5, BUDGET), min_size=1, max_size=1)
CHUNKINGS = st.lists(SMALL_STEPS | LARGE_STEPS, min_size=1, max_size=12)


@pytest.fixture(scope="module", autouse=True)
def drop_pairs() -> Iterator[None]:
    """Let go of the engines when the module ends, and so of their programs."""
    yield
    for cached in (pair_of, hf_logits, dynamic_pair):
        cached.cache_clear()


@lru_cache(maxsize=8)  # programs take memory maps, of which a process may have so many
def pair_of(variant: str) -> Pair:
    return make_pair(VARIANTS[variant], max_model_len=LENGTH, max_num_batched_tokens=BUDGET)


@cache
def hf_logits(variant: str) -> np.ndarray:
    """Hugging Face's logits of TOKENS [NUM_SEQUENCES, LENGTH, V]."""
    return pair_of(variant).hf_logits(TOKENS)


def check_steps(variant: str, steps: list[Step]) -> None:
    """Put the chunks of `steps`, and compare the logits after each with Hugging Face's."""
    engine, theirs = pair_of(variant).engine, hf_logits(variant)
    done: dict[int, int] = {}
    try:
        for step in steps:
            starts = {seq: done.get(seq, 0) for seq in step if done.get(seq, 0) < LENGTH}
            stops = {seq: min(start + step[seq], LENGTH) for seq, start in starts.items()}
            if stops:
                chunks = [TOKENS[seq, starts[seq] : stop].tolist() for seq, stop in stops.items()]
                ours = engine.put(list(stops), chunks)
                done |= stops
                assert_close(ours, np.stack([theirs[seq, stop - 1] for seq, stop in stops.items()]))
    finally:
        engine.flush(list(done))


@pytest.mark.parametrize("variant", VARIANTS, scope="module")
def test_whole_prompts_then_decode(variant):
    decode = [{0: 1, 1: 1, 2: 1, 3: 1}] * 6
    check_steps(variant, [{0: 1, 1: 2, 2: 4, 3: 9}, *decode])
    check_steps(variant, [{0: 16}, {1: 15}, {2: 5, 3: 11}, *decode])


@pytest.mark.parametrize("variant", VARIANTS, scope="module")
def test_a_context_to_its_end_in_chunks_then_decode(variant):
    """Past the windows of 8 and 21 tokens, and past the 16 and 32 positions that scaled ropes stretch."""
    check_steps(variant, [{0: 16}, {0: 16}, {0: 16}, {0: 11}, *[{0: 1}] * 5])


@pytest.mark.parametrize("variant", VARIANTS, scope="module")
def test_any_chunking_then_decode(variant):
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(CHUNKINGS)
    def check(steps):
        seen = sorted({seq for step in steps for seq in step})
        check_steps(variant, [*steps, *[dict.fromkeys(seen, 1)] * 2])

    check()


@pytest.mark.parametrize("variant", ["llama, rope yarn", "mistral, window 8", "opt"])
def test_every_position_of_a_context_fed_token_by_token(variant):
    check_steps(variant, [dict.fromkeys(range(NUM_SEQUENCES), 1)] * LENGTH)


@pytest.mark.parametrize("block_size", [1, 16])
def test_steps_of_different_buckets_and_block_sizes(block_size):
    prompt = TOKENS[0].tolist()
    sizes = {"max_num_batched_tokens": 24, "block_size": block_size, "num_blocks": LENGTH + 1}
    pair = make_pair(LLAMA, max_model_len=LENGTH, **sizes)
    theirs = pair.hf_logits(TOKENS[:1])[0]
    for start, stop in ((0, 24), (24, 26), (26, 42), (42, 64)):
        assert_close(pair.engine.put(["it"], [prompt[start:stop]])[0], theirs[stop - 1])


@pytest.mark.parametrize(
    "group",
    [
        [f"llama, rope {name}" for name in ROPE_VARIANTS],
        ["mistral, window 8", "mistral, window 21", "mistral, no window"],
        ["qwen2", "qwen2, window from layer 1", "qwen2, layer_types"],
        ["qwen3", "qwen3, window from layer 1"],
        ["mixtral", "mixtral, one expert a token", "mixtral, window 8"],
        ["qwen2_moe", "qwen2_moe, norm_topk_prob", "qwen2_moe, window below layer 1"],
        ["qwen3_moe", "qwen3_moe, window"],
        ["stablelm", "stablelm, head norms"],
        ["starcoder2", "starcoder2, window 8, no biases"],
        ["smollm3", "smollm3, no_rope_layers", "smollm3, window in layer 1"],
        ["phi3", "phi3, window 8, a part rotated", "phi3, longrope, short"],
        ["gemma2", "gemma2, no caps", "gemma2, windows in the other layers, attention_bias"],
        ["gpt_neox", "gpt_neox, not parallel"],
        ["phi", "phi, head norms"],
        ["exaone4", "exaone4, no window"],
        ["exaone", "exaone, llama3 rope"],
        ["gemma3_text", "gemma3_text, linear rope", "gemma3_text, new spelling"],
        ["cohere", "cohere, head norms"],
        ["olmo3", "olmo3, yarn"],
        ["olmoe", "olmoe, norm_topk_prob"],
        ["ministral", "ministral, layer_types"],
    ],
)
def test_the_variants_of_a_group_differ_by_far_more_than_the_tolerance(group):
    """Their weights are the same, so the tests above would see one taken for another."""
    logits = [hf_logits(variant) for variant in group]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert np.abs(one - other).max() > 100 * TOLERANCE * np.abs(one).max()


@pytest.mark.parametrize(
    "variant", {config["model_type"]: name for name, config in reversed(VARIANTS.items())}.values()
)
def test_greedy_tokens_are_hugging_faces(variant):
    """Through the scheduler, with prompts cut and decodes beside them."""
    pair, params = pair_of(variant), SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [TOKENS[i, : 12 * (i + 1)].tolist() for i in range(NUM_SEQUENCES)]
    for prompt, response in zip(prompts, pair.engine.generate(prompts, params), strict=True):
        tokens = prompt + list(response.token_ids)
        best = pair.hf_logits(np.array([tokens]))[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == list(response.token_ids)


DYNAMIC = LLAMA | {"max_position_embeddings": 24, "rope_scaling": {"type": "dynamic", "factor": 4.0}}


@cache
def dynamic_pair() -> Pair:
    return make_pair(DYNAMIC, max_model_len=96, max_num_batched_tokens=32)


@pytest.mark.parametrize("num_prompt_tokens", [10, 24, 25, 32])
def test_dynamic_rope_beyond_its_positions_is_that_of_a_prompt_run_whole_and_then_decoded(num_prompt_tokens):
    """Its frequencies change with the length, and the K of a token keep those it was computed with."""
    pair, tokens = dynamic_pair(), TOKENS[0, :48].tolist()
    theirs = pair.hf_logits_decoded(tokens, num_prompt_tokens)
    chunks = [tokens[:num_prompt_tokens], *([token] for token in tokens[num_prompt_tokens:])]
    ours = np.concatenate([pair.engine.put(["it"], [chunk]) for chunk in chunks])
    pair.engine.flush(["it"])
    assert_close(ours, theirs[num_prompt_tokens - 1 :])


def test_dynamic_rope_gives_split_prompts_the_logits_of_whole_ones():
    """Prompts within and beyond the model's positions, cut by the scheduler to fit its steps."""
    pair = dynamic_pair()
    prompts = [TOKENS[i, :n].tolist() for i, n in enumerate((10, 20, 45, 60))]
    wanted = SamplingParams(max_tokens=20, logprobs=20, prompt_logprobs=20)
    for prompt, response in zip(prompts, pair.engine.generate(prompts, wanted), strict=True):
        tokens = prompt + list(response.token_ids)
        theirs = pair.hf_logits_decoded(tokens, len(prompt))[:-1]
        scale, theirs = np.abs(theirs).max(), np.asarray(jax.nn.log_softmax(theirs))
        reported = response.prompt_logprobs[1:] + response.logprobs
        for row, token_id, report in zip(theirs, tokens[1:], reported, strict=True):
            assert report.token_id == token_id
            assert abs(report.logprob - row[token_id]) <= TOLERANCE * scale
            assert max(abs(logprob - row[i]) for i, logprob in report.top) <= TOLERANCE * scale


def test_dynamic_rope_matters_beyond_the_positions_only():
    plain = make_pair(DYNAMIC | {"rope_scaling": None}, max_model_len=24).hf_logits(TOKENS)
    dynamic = dynamic_pair()
    assert_close(dynamic.hf_logits(TOKENS[:, :24]), plain[:, :24])
    assert np.abs(dynamic.hf_logits(TOKENS) - plain).max() > 100 * TOLERANCE * np.abs(plain).max()
