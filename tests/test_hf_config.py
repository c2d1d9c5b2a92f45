"""Reading config.json: real models are read right, and what is not understood is refused by name."""

from functools import partial
from typing import Any

import jax
import pytest
from hf import save_random_model
from real_configs import real_config
from test_models import VARIANTS

from fastgen_jax import checkpoint, kernels, models
from fastgen_jax.models import llama, opt
from fastgen_jax.models.moe import Mixture
from fastgen_jax.models.rope import Rope

# What every config.json says and no forward pass reads.
TRAILER = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
}
LLAMA_2_7B = TRAILER | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA_3_8B = LLAMA_2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_31_8B = LLAMA_3_8B | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": LLAMA3_SCALING,
}
LLAMA_32_1B = LLAMA_31_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA3_SCALING | {"factor": 32.0},
    "tie_word_embeddings": True,
}
SMOLLM2_135M = LLAMA_3_8B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_7B_V01 = TRAILER | {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_7B_V03 = MISTRAL_7B_V01 | {
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
OPT_125M = TRAILER | {
    "_name_or_path": "facebook/opt-125m",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M = OPT_125M | {
    "_remove_final_layer_norm": False,
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}
OPT_13B = OPT_125M | {
    "_remove_final_layer_norm": False,
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "word_embed_proj_dim": 5120,
}
QWEN25_05B = TRAILER | {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B = QWEN25_05B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
MIXTRAL_8X7B = MISTRAL_7B_V01 | {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_8B = TRAILER | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN15_MOE = TRAILER | real_config("qwen2_moe") | {"architectures": ["Qwen2MoeForCausalLM"]}
QWEN3_30B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def read(hf_config: dict[str, Any]) -> Any:
    return models.family(hf_config["model_type"]).from_hf(hf_config)


def rope(dim: int, theta: float, max_len: int) -> Rope:
    return Rope(dim=dim, theta=theta, original_max_len=max_len)


def llama3_rope(dim: int, factor: float) -> Rope:
    return Rope(dim, 500000.0, "llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


MIXTURES = {
    "mixtral": Mixture(8, 2, 14336, normalise=True, parts=("w1", "w3", "w2")),
    "qwen2_moe": Mixture(60, 4, 1408, normalise=False, shared=5632),
    "qwen3_moe": Mixture(128, 8, 768, normalise=True),
}

# config.json -> vocabulary, hidden, MLP, layers, heads, KV heads, head_dim, positions, rope, window of all layers
LLAMAS = [
    (LLAMA_2_7B, (32000, 4096, 11008, 32, 32, 32, 128, 4096, rope(128, 10000.0, 4096), None)),
    (LLAMA_3_8B, (128256, 4096, 14336, 32, 32, 8, 128, 8192, rope(128, 500000.0, 8192), None)),
    (LLAMA_31_8B, (128256, 4096, 14336, 32, 32, 8, 128, 131072, llama3_rope(128, 8.0), None)),
    (LLAMA_32_1B, (128256, 2048, 8192, 16, 32, 8, 64, 131072, llama3_rope(64, 32.0), None)),
    (SMOLLM2_135M, (49152, 576, 1536, 30, 9, 3, 64, 8192, rope(64, 100000.0, 8192), None)),
    (MISTRAL_7B_V01, (32000, 4096, 14336, 32, 32, 8, 128, 32768, rope(128, 10000.0, 32768), 4096)),
    (MISTRAL_7B_V03, (32768, 4096, 14336, 32, 32, 8, 128, 32768, rope(128, 1000000.0, 32768), None)),
    (QWEN25_05B, (151936, 896, 4864, 24, 14, 2, 64, 32768, rope(64, 1000000.0, 32768), None)),
    (QWEN25_7B, (152064, 3584, 18944, 28, 28, 4, 128, 131072, rope(128, 1000000.0, 131072), None)),
    (MIXTRAL_8X7B, (32000, 4096, 14336, 32, 32, 8, 128, 32768, rope(128, 1000000.0, 32768), None)),
    (QWEN15_MOE, (151936, 2048, 5632, 24, 16, 16, 128, 8192, rope(128, 1000000.0, 8192), None)),
    (QWEN3_8B, (151936, 4096, 12288, 36, 32, 8, 128, 40960, rope(128, 1000000.0, 40960), None)),
    (QWEN3_30B, (151936, 2048, 6144, 48, 32, 4, 128, 40960, rope(128, 1000000.0, 40960), None)),
]


@pytest.mark.parametrize(("hf_config", "expected"), LLAMAS)
def test_real_llamas_mistrals_and_qwens_are_read_right(hf_config, expected):
    vocab, hidden, mlp, layers, heads, kv_heads, head_dim, positions, rotations, window = expected
    assert read(hf_config) == llama.Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope=rotations,
        windows=(window,) * layers,
        norm_eps=hf_config["rms_norm_eps"],
        hidden_act="silu",
        qkv_bias=hf_config["model_type"].startswith("qwen2"),
        head_norm="rms" if hf_config["model_type"].startswith("qwen3") else None,
        mixture=MIXTURES.get(hf_config["model_type"]),
        tie_word_embeddings=hf_config["tie_word_embeddings"],
    )
    assert read(hf_config).max_positions == positions


# config.json -> hidden, embedding, MLP, layers, heads, whether norms come before, whether one comes last
OPTS = [
    (OPT_125M, (768, 768, 3072, 12, 12, True, True)),
    (OPT_350M, (1024, 512, 4096, 24, 16, False, False)),
    (OPT_13B, (5120, 5120, 20480, 40, 40, True, True)),
]


@pytest.mark.parametrize(("hf_config", "expected"), OPTS)
def test_real_opts_are_read_right(hf_config, expected):
    hidden, embed, mlp, layers, heads, norm_before, final_norm = expected
    assert read(hf_config) == opt.Config(
        vocab_size=50272,
        hidden_size=hidden,
        embed_dim=embed,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        max_position_embeddings=2048,
        norm_before=norm_before,
        final_norm=final_norm,
    )
    assert read(hf_config).max_positions == 2048


def test_qwen_windows_are_in_the_layers_from_max_window_layers_on():
    config = read(QWEN25_05B | {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 99})
    assert config.windows == (None,) * 20 + (99,) * 4


def test_scaling_lets_the_context_grow():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    assert read(QWEN25_05B | {"rope_scaling": yarn}).max_positions == 131072
    assert read(LLAMA_2_7B | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).max_positions == 8192


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_writes_reads_as_the_config_it_was_made_from(variant, tmp_path):
    save_random_model(VARIANTS[variant], tmp_path)
    (tmp_path / "config.transformers.json").replace(tmp_path / "config.json")
    assert read(checkpoint.resolve(tmp_path).hf_config) == read(VARIANTS[variant])


@pytest.mark.parametrize(
    "hf_config",
    [LLAMA_3_8B, MISTRAL_7B_V03, OPT_125M, QWEN25_7B, MIXTRAL_8X7B, QWEN15_MOE, QWEN3_8B, QWEN3_30B],
    ids=lambda hf_config: hf_config["model_type"],
)
def test_an_unknown_field_is_refused_by_family_name_and_value(hf_config):
    family = hf_config["model_type"]
    with pytest.raises(ValueError, match=f"this {family} model has unsupported fields: logit_scale=0.0625"):
        read(hf_config | {"logit_scale": 0.0625})


@pytest.mark.parametrize("field", ["logit_scale", "attn_logit_softcapping", "quantization_config"])
def test_a_field_that_is_null_says_nothing(field):
    assert read(LLAMA_3_8B | {field: None}) == read(LLAMA_3_8B)


def test_neutral_fields_change_nothing():
    neutral = {"id2label": {"0": "LABEL_0"}, "temperature": 0.6, "max_length": 20, "problem_type": "regression"}
    assert read(LLAMA_3_8B | neutral) == read(LLAMA_3_8B)


@pytest.mark.parametrize(
    ("hf_config", "sentence"),
    [
        (
            LLAMA_3_8B | {"model_type": "bloom"},
            "model_type='bloom' .* families are arcee, cohere, cohere2, ernie4_5,",
        ),
        (LLAMA_3_8B | {"model_type": "layers"}, "model_type='layers' is not supported"),
        (LLAMA_3_8B | {"rope_scaling": {"type": "su"}}, "'su' .*; choose default, linear, dynamic, yarn, llama3"),
        (LLAMA_3_8B | {"rope_interleaved": True}, "rope_interleaved=True .* not supported, only False"),
        (QWEN25_7B | {"use_mrope": True}, "use_mrope=True .* not supported, only False"),
        (OPT_125M | {"tie_word_embeddings": False}, "tie_word_embeddings=False .* not supported, only True"),
        (LLAMA_3_8B | {"hidden_act": "swish2"}, "activation 'swish2' is not supported; choose silu, relu"),
        (OPT_125M | {"activation_function": "tanh2"}, "activation 'tanh2' is not supported; choose silu"),
        (LLAMA_3_8B | {"hidden_size": None}, "this llama model lacks the field 'hidden_size'"),
        (LLAMA_3_8B | {"vocab_size": "big"}, "vocab_size='big' of this llama model must be a whole number"),
        (LLAMA_3_8B | {"num_key_value_heads": 0}, "num_key_value_heads=0 of this llama model must be"),
        (LLAMA_3_8B | {"num_key_value_heads": 5}, "attention_heads=32 is no multiple of num_key_value_heads=5"),
        (LLAMA_3_8B | {"num_attention_heads": 0}, "num_attention_heads=0 of this llama model must be"),
        (LLAMA_3_8B | {"num_attention_heads": 24}, "hidden_size=4096 is no multiple of num_attention_heads=24"),
        (LLAMA_3_8B | {"head_dim": 65}, "head_dim=65 must be even"),
        (OPT_125M | {"num_attention_heads": 7}, "hidden_size=768 is no multiple of num_attention_heads=7"),
        (QWEN25_05B | {"layer_types": ["full_attention"]}, "1 entries; it must have num_hidden_layers=24"),
        (QWEN25_05B | {"layer_types": ["linear_attention"] * 24}, "layer_types has 'linear_attention'; it can"),
        (MISTRAL_7B_V03 | {"layer_types": ["full_attention"] * 32}, "mistral .* unsupported fields: layer_types"),
        (MIXTRAL_8X7B | {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most the number of experts, 8"),
        (MIXTRAL_8X7B | {"num_local_experts": None}, "this mixtral model lacks the field 'num_local_experts'"),
        (MIXTRAL_8X7B | {"num_experts": 8}, "this mixtral model has unsupported fields: num_experts=8"),
        (
            QWEN15_MOE | {"num_experts_per_tok": 0},
            "num_experts_per_tok=0 of this qwen2_moe model must be",
        ),
        (QWEN15_MOE | {"moe_intermediate_size": 1.5}, "moe_intermediate_size=1.5 of this qwen2_moe model must be"),
        (QWEN3_30B | {"decoder_sparse_step": 0}, "decoder_sparse_step=0 of this qwen3_moe model must be"),
        (QWEN3_30B | {"shared_expert_intermediate_size": 8}, "qwen3_moe .* unsupported fields: shared_expert_intermed"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_sentence(hf_config, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(hf_config)


def llama_size(c: dict[str, Any]) -> int:
    """Parameters, counted from the config of a Llama, Mistral or Qwen2."""
    e, f, head_dim = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    qkv_bias = (q + 2 * kv) * (c["model_type"] == "qwen2")
    layer = e * (q + 2 * kv) + qkv_bias + q * e + 3 * e * f + 2 * e
    return c["vocab_size"] * e * (1 if c["tie_word_embeddings"] else 2) + c["num_hidden_layers"] * layer + e


def opt_size(c: dict[str, Any]) -> int:
    e, f, embed = c["hidden_size"], c["ffn_dim"], c["word_embed_proj_dim"]
    layer = 4 * (e * e + e) + (e * f + f) + (f * e + e) + 2 * 2 * e
    projections = 2 * e * embed if embed != e else 0
    last_norm = 2 * e if c["do_layer_norm_before"] else 0
    tables = c["vocab_size"] * embed + (c["max_position_embeddings"] + 2) * e
    return tables + projections + c["num_hidden_layers"] * layer + last_norm


@pytest.mark.parametrize(
    ("hf_config", "size"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (SMOLLM2_135M, llama_size(SMOLLM2_135M)),
        (QWEN25_05B, llama_size(QWEN25_05B)),
        (MISTRAL_7B_V01, llama_size(MISTRAL_7B_V01)),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN15_MOE, 14_315_784_192),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B, 30_532_122_624),
        (OPT_125M, opt_size(OPT_125M)),
        (OPT_350M, opt_size(OPT_350M)),
    ],
)
def test_real_models_have_their_number_of_parameters(hf_config, size):
    model = models.family(hf_config["model_type"]).Model(read(hf_config), kernels.get_backend("xla"))
    shapes = jax.eval_shape(partial(models.init_params, model), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == size
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jax.numpy.dtype("float32")}
