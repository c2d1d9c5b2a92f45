"""Rotary embeddings: transformers' own frequencies, at the sizes of real models."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.rope import Rope, rotate

# rope_scaling, rope_theta, head_dim, max_position_embeddings
REAL = {
    "Llama-2": (None, 10000.0, 128, 4096),
    "Llama-3": (None, 500000.0, 128, 8192),
    "Llama-3.1": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        500000.0,
        128,
        131072,
    ),
    "Llama-3.2": (
        {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        500000.0,
        64,
        131072,
    ),
    "vicuna-7b-v1.5-16k": ({"factor": 4.0, "type": "linear"}, 10000.0, 128, 4096),
    "dynamic": ({"factor": 2.0, "type": "dynamic"}, 10000.0, 128, 2048),
    "Qwen2.5 with yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        1000000.0,
        128,
        32768,
    ),
    "yarn, mscale": (
        {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        10000.0,
        64,
        163840,
    ),
    "yarn, attention_factor": (
        {"factor": 8.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "attention_factor": 1.3},
        10000.0,
        128,
        32768,
    ),
    "yarn, not truncated": (
        {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        150000.0,
        64,
        131072,
    ),
}


def rope_of(scaling=None, theta=10000.0, dim=64, max_len=2048) -> Rope:
    fields = HFConfig({"model_type": "llama", "rope_scaling": scaling, "rope_theta": theta})
    return Rope.from_hf(fields, dim=dim, max_len=max_len)


def hf_rope(scaling=None, theta=10000.0, dim=64, max_len=2048) -> LlamaRotaryEmbedding:
    heads = {"hidden_size": dim * 2, "num_attention_heads": 2, "head_dim": dim}
    return LlamaRotaryEmbedding(
        LlamaConfig(**heads, max_position_embeddings=max_len, rope_scaling=scaling, rope_theta=theta)
    )


def hf_cos_sin(rope: LlamaRotaryEmbedding, positions: list[int]) -> np.ndarray:
    """[2, T, D / 2] of tokens that are all there is: the context's length is the last position + 1."""
    cos, sin = rope(torch.zeros(1), torch.tensor([positions]))
    return np.stack((cos[0].numpy(), sin[0].numpy()))[..., : cos.shape[-1] // 2]


@pytest.mark.parametrize("model", REAL)
def test_frequencies_are_those_of_transformers(model):
    ours, theirs = rope_of(*REAL[model]), hf_rope(*REAL[model])
    np.testing.assert_allclose(ours.inv_freq(), theirs.inv_freq.numpy(), rtol=1e-6)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("model", REAL)
def test_cos_and_sin_are_those_of_transformers(model):
    positions = [0, 1, 2, 77, 256, 257, 1000, 2047]
    cos_sin = rope_of(*REAL[model]).cos_sin(jnp.array(positions), jnp.full(8, 2048))
    np.testing.assert_allclose(np.stack(cos_sin), hf_cos_sin(hf_rope(*REAL[model]), positions), atol=5e-4)


@pytest.mark.parametrize("length", [2048, 2049, 3000, 4096])
def test_dynamic_frequencies_follow_the_length_of_the_context(length):
    args = REAL["dynamic"]
    positions = [0, 5, 700, length - 1]
    cos_sin = rope_of(*args).cos_sin(jnp.array(positions), jnp.full(4, length))
    np.testing.assert_allclose(np.stack(cos_sin), hf_cos_sin(hf_rope(*args), positions), atol=2e-3)


def test_dynamic_angles_of_a_token_depend_on_its_own_context_only():
    rope = rope_of(*REAL["dynamic"])
    together = np.stack(rope.cos_sin(jnp.array([9, 9, 9]), jnp.array([10, 2048, 4000])))
    np.testing.assert_array_equal(together[:, 0], together[:, 1])
    assert np.abs(together[:, 0] - together[:, 2]).max() > 0.1


def test_angles_are_float32_whatever_the_position():
    """In bfloat16 the positions 256 and 257 would be the same."""
    cos, sin = rope_of().cos_sin(jnp.array([256, 257]), jnp.array([257, 258]))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[:, 0], np.cos([256.0, 257.0]), atol=1e-4)


def test_rotate_turns_the_halves_of_a_head_against_each_other():
    """Dimensions (0, 2) turn by 90 degrees, (1, 3) not at all."""
    x = jnp.array([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 0.0]])
    np.testing.assert_array_equal(rotate(x, cos, sin), [[[-3.0, 2.0, 1.0, 4.0]]])


def test_rotate_is_that_of_transformers():
    x = np.random.default_rng(0).normal(size=(5, 3, 64)).astype(np.float32)
    cos, sin = hf_rope()(torch.zeros(1), torch.arange(5)[None])
    theirs, _ = apply_rotary_pos_emb(torch.tensor(x)[None], torch.tensor(x)[None], cos, sin, unsqueeze_dim=2)
    ours = rotate(jnp.array(x), *rope_of().cos_sin(jnp.arange(5), jnp.full(5, 5)))
    np.testing.assert_allclose(ours, theirs[0], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rotate_keeps_the_dtype_and_computes_in_float32(dtype):
    x = jnp.ones((1, 1, 4), dtype)
    out = rotate(x, jnp.full((1, 2), 0.6), jnp.full((1, 2), 0.8))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, jnp.array([[[0.6 - 0.8, 0.6 - 0.8, 1.4, 1.4]]]).astype(dtype))


# rope_scaling, max_position_embeddings -> longest context
REACH = [
    (None, 2048, 2048),
    ({"rope_type": "linear", "factor": 2.5}, 2048, 5120),
    ({"rope_type": "dynamic", "factor": 4.0}, 2048, 8192),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 2048, 8192),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192, 8192),
    (REAL["Llama-3.1"][0], 131072, 131072),
]


@pytest.mark.parametrize(("scaling", "max_len", "longest"), REACH)
def test_scaling_stretches_the_positions(scaling, max_len, longest):
    assert rope_of(scaling, max_len=max_len).max_positions(max_len) == longest


def read(**fields) -> Rope:
    return Rope.from_hf(HFConfig({"model_type": "llama", **fields}), dim=64, max_len=2048)


def test_every_spelling_of_a_scaling_reads_the_same():
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"type": "linear", "factor": 2.0}},
    ]
    assert {read(**spelling) for spelling in spellings} == {Rope(64, 5e5, "linear", factor=2.0, original_max_len=2048)}


@pytest.mark.parametrize("fields", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_no_scaling_is_the_default(fields):
    assert read(**fields) == Rope(64, 10000.0, "default", original_max_len=2048)


def test_null_entries_of_a_scaling_count_as_absent():
    scaling = {"rope_type": "linear", "factor": 2.0, "attention_factor": None, "beta_fast": None}
    assert read(rope_scaling=scaling) == read(rope_scaling={"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        (
            {"rope_type": "proportional", "factor": 4.0},
            "rope_type='proportional' is not supported; choose default, linear, dynamic, yarn, llama3",
        ),
        ({"type": "su"}, "rope_type='su' is not supported"),
        ({"rope_type": "linear"}, "rope scaling 'linear' lacks the field 'factor'"),
        ({"rope_type": "yarn", "attention_factor": 1.0}, "rope scaling 'yarn' lacks the field 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope scaling 'llama3' lacks the field 'low_freq_factor'"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "'linear' has unsupported fields: beta_fast"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "'default' has unsupported fields: mrope_section"),
    ],
)
def test_a_scaling_that_is_not_understood_is_refused(scaling, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(rope_scaling=scaling)


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="head_dim=5 must be even"):
        Rope.from_hf(HFConfig({}), dim=5, max_len=16)
