"""Families that are Llama or OPT with other settings: real configs, what is refused, and checkpoints laid out anew."""

import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hf import assert_close, auto_class, load_model, make_pair, save_random_model
from real_configs import REAL as TEXT
from real_configs import SHIPPED, real_config, shortened
from safetensors.numpy import load_file, save_file
from test_models import EXAONE45_VISION, LONGROPE, PHI3, PIXTRAL, TOKENS, VARIANTS
from transformers import AutoConfig

from fastgen_jax import kernels, models
from fastgen_jax.checkpoint.laid_out import LaidOut
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.models.layout import Layout, in_turn
from fastgen_jax.models.rope import Rope
from fastgen_jax.types import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

LOGPROBS = SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1, ignore_eos=True)

REAL = TEXT | {
    "exaone4_5": TEXT["exaone4_5"] | {"vision_config": EXAONE45_VISION},
    "mistral3": TEXT["mistral3"] | {"tie_word_embeddings": False, "vision_feature_layer": -1, "vision_config": PIXTRAL},
}


def read(hf_config: dict[str, Any]) -> Any:
    return models.family(hf_config["model_type"]).from_hf(hf_config)


def test_there_is_a_real_model_of_every_family():
    assert sorted((*REAL, *SHIPPED)) == models.families()
    assert all(real_config(name)["model_type"] == name for name in models.families())
    assert [
        len(set(read(shortened(name)).windows)) for name in ("gemma2", "gemma3", "cohere2", "exaone4", "olmo3")
    ] == [2] * 5


@pytest.mark.parametrize("name", REAL)
def test_real_models_have_hugging_faces_parameters(name, tmp_path):
    config = read(REAL[name])
    model = models.family(name).Model(config, kernels.get_backend("xla"))
    shapes = jax.eval_shape(partial(models.init_params, model), jax.random.key(0))
    with torch.device("meta"):
        theirs = auto_class(REAL[name]).from_config(AutoConfig.for_model(**REAL[name])).named_parameters()
    of_text = (parameter for name, parameter in theirs if not re.search("vision|visual|multi_modal", name))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == sum(parameter.numel() for parameter in of_text)


def test_layers_differ_where_the_config_says_so():
    windows, smollm3 = read(REAL["gemma2"]).windows, read(REAL["smollm3"])
    assert windows == (4096, None) * 21
    assert smollm3.no_rope_layers == tuple(range(3, 36, 4)) and smollm3.windows == (None,) * 36
    for name, layers in (("cohere2", 32), ("exaone4", 64)):
        config = read(REAL[name])
        assert config.windows == (4096, 4096, 4096, None) * (layers // 4)
        assert config.no_rope_layers == tuple(range(3, layers, 4))
    by_pattern = {key: value for key, value in REAL["exaone4"].items() if key != "layer_types"}
    assert read(by_pattern) == read(by_pattern | {"sliding_window_pattern": 4}) == read(REAL["exaone4"])
    assert read(by_pattern | {"sliding_window": None}).no_rope_layers == ()


def test_layers_with_a_window_may_have_a_rope_of_their_own():
    gemma3, olmo3 = read(REAL["gemma3"]), read(REAL["olmo3"])
    assert gemma3.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert [(rope.theta, rope.factor) for rope in gemma3.ropes[4:7]] == [(1e4, 1), (1e6, 8), (1e4, 1)]
    assert [rope.rope_type for rope in olmo3.ropes[2:5]] == ["default", "yarn", "default"]
    assert {rope.theta for rope in olmo3.ropes} == {5e5}
    # The outcome of the scaling, not what it began with.
    assert (gemma3.max_positions, olmo3.max_positions) == (131072, 65536)
    by_type = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e4}}
    assert [rope.theta for rope in read(REAL["gemma3_text"] | {"rope_parameters": by_type}).ropes[4:6]] == [3e4, 2e6]


def test_command_rs_context_is_what_the_model_was_made_for():
    assert REAL["cohere"]["max_position_embeddings"] == 8192
    assert read(REAL["cohere"]).max_positions == 131072
    assert read(REAL["cohere2"] | {"model_max_length": 262144}).max_positions == 262144
    assert read(REAL["cohere"] | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).rope.original_max_len == 8192


@pytest.mark.parametrize("name", [name for name in models.families() if "text_config" not in real_config(name)])
def test_what_a_config_leaves_out_is_what_transformers_takes(name):
    whole = AutoConfig.for_model(name).to_dict()
    for field in whole.keys() - {"model_type"}:
        try:
            found = read({key: value for key, value in whole.items() if key != field})
        except ValueError as error:
            assert "lacks the field" in str(error)
        else:
            assert found == read(whole), field


@pytest.mark.parametrize(
    ("name", "field", "sentence"),
    [
        ("olmo2", {"clip_qkv": 8.0}, "this olmo2 model has unsupported fields: clip_qkv=8.0"),
        ("granite", {"num_local_experts": 8}, "this granite model has unsupported fields: num_local_experts=8"),
        ("stablelm", {"partial_rotary_factor": 0.02}, "the rotated part of head_dim=3 must be even"),
        ("stablelm", {"rms_norm_eps": 1e-5}, "this stablelm model has unsupported fields: rms_norm_eps"),
        (
            "starcoder2",
            {"mlp_type": "gated"},
            "mlp_type='gated' of this starcoder2 model is not supported",
        ),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type='rms_norm' .* not supported, only 'layer_norm'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries; it must have num_hidden_layers=36"),
        ("smollm3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; it must have"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, "'linear' has unsupported fields"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "short_factor has 1 entries; it must",
        ),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True of this phi3 model is not supported, only False"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2 of this phi3 model is not supported, only 1"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True .* not supported"),
        ("gemma2", {"sliding_window_size": 99}, "sliding_window_size=99 .* not supported, only 4096"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 42}, "layer_types has 'chunked_attention'; it can have"),
        ("gpt_neox", {"num_key_value_heads": 8}, "num_key_value_heads=8 of this gpt_neox model is not supported"),
        ("gpt_neox", {"rope_scaling": {"type": "mystery"}}, "rope_type='mystery' is not supported; choose default"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings=True of this phi model is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True .* only False"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False .* not supported, only True"),
        ("gpt2", {"n_head": 7}, "n_embd=768 is no multiple of n_head=7"),
        ("gpt2", {"activation_function": "tanh"}, "activation 'tanh' is not supported; choose"),
        ("falcon", {"alibi": True}, "alibi=True of this falcon model is not supported, only False"),
        (
            "falcon",
            {"apply_residual_connection_post_layernorm": True},
            "post_layernorm=True .* only False",
        ),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False .* only True"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True of this cohere2 model is not supported, only False"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block=False .* not supported, only True"),
        ("cohere2", {"layer_switch": 2}, "layer_switch=2 .* not supported, only 4"),
        ("glm4", {"rope_scaling": {"type": "mystery"}}, "rope_type='mystery' is not supported; choose default"),
        ("exaone4", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; it must have"),
        (
            "exaone4_5",
            {"text_config": None},
            "text_config of this exaone4_5 model has model_type=None, not 'exaone4'",
        ),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True .* not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True .* not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 .* not supported, only None"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window=0 of this gemma3_text model must be a whole number"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters has 'rope_theta'; it can have",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "rope_type='dynamic' of sliding_attention is not supported",
        ),
        ("gemma3_text", {"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks the field 'factor'"),
        ("gemma3_text", {"max_position_embeddings": None}, "lacks the field 'max_position_embeddings'"),
        ("gemma3", {"text_config": {"model_type": "gemma2"}}, "has model_type='gemma2', not 'gemma3_text'"),
        ("cohere2", {"sliding_window": 0}, "sliding_window=0 of this cohere2 model must be a whole number from 1"),
        ("starcoder2", {"sliding_window": -1}, "sliding_window=-1 of this starcoder2 model must be a whole number"),
        ("glm", {"head_dim": 128.5}, "head_dim=128.5 of this glm model must be a whole number from 1"),
        ("olmo", {"clip_qkv": 8.0}, "this olmo model has unsupported fields: clip_qkv=8.0"),
        ("olmoe", {"num_experts_per_tok": 65}, "num_experts_per_tok=65 must be at most the number of experts, 64"),
        ("arcee", {"hidden_act": "relu3"}, "activation 'relu3' is not supported; choose"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_sentence(name, field, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(REAL[name] | field)


@pytest.mark.parametrize("name", REAL)
def test_an_unknown_field_is_refused(name):
    with pytest.raises(ValueError, match=f"this {name} model has unsupported fields: qk_twist=2"):
        read(REAL[name] | {"qk_twist": 2})


# Longrope


def test_longrope_turns_long_contexts_otherwise_and_is_read_by_its_old_names():
    config = read(REAL["phi3"])
    assert config.max_positions == 131072
    assert config.rope.attention_factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
    for old in ("su", "yarn"):
        assert read(REAL["phi3"] | {"rope_scaling": REAL["phi3"]["rope_scaling"] | {"type": old}}) == config
    rope = Rope(4, rope_type="longrope", original_max_len=8, short_factor=(1.0, 2.0), long_factor=(4.0, 5.0))
    _, sin = rope.cos_sin(np.array([1, 1]), np.array([8, 9]))
    np.testing.assert_allclose(np.arcsin(sin), [[1.0, 0.01 / 2], [1 / 4, 0.01 / 5]], rtol=1e-5)


@pytest.mark.parametrize("num_prompt_tokens", [10, 16, 17, 40])
def test_longrope_beyond_its_positions_is_that_of_a_prompt_run_whole_and_then_decoded(num_prompt_tokens):
    """Prompts are cut into steps of 16 tokens."""
    pair = make_pair(PHI3 | LONGROPE | {"original_max_position_embeddings": 16}, max_num_batched_tokens=16)
    tokens = TOKENS[0, :48].tolist()
    ours = []
    for response in pair.engine.generate([tokens[:num_prompt_tokens]], LOGPROBS):
        tokens = tokens[:num_prompt_tokens] + list(response.token_ids)
        ours = [report.logprob for report in response.prompt_logprobs[1:] + response.logprobs]
    theirs = jax.nn.log_softmax(pair.hf_logits_decoded(tokens, num_prompt_tokens)[:-1])
    assert_close(np.array(ours), np.asarray(theirs)[np.arange(len(tokens) - 1), tokens[1:]])


# Checkpoints laid out otherwise


class Arrays:
    """A `TensorSource` of arrays."""

    bytes_read = 0

    def __init__(self, **arrays: np.ndarray) -> None:
        self._arrays = arrays

    def names(self) -> list[str]:
        return list(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def read_into(self, name: str, out: np.ndarray, region: tuple[slice, ...] | None = None) -> None:
        out[...] = self._arrays[name][region or ()]

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]


TABLE = np.arange(24.0).reshape(12, 2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_modules_that_share_a_tensor_get_their_rows(times, transposed):
    rows = in_turn(times=times, q=6 // times, k=6 // times)
    layout = Layout({"^old": "new"}, {"qk": rows}, ("qk",) if transposed else (), unread="mask")
    source = LaidOut(Arrays(**{"old.qk.weight": TABLE.T if transposed else TABLE, "mask.bias": TABLE}), layout)
    by_turn = TABLE.reshape(times, 2, 6 // times, 2)
    assert source.names() == ["new.q.weight", "new.k.weight"]
    for i, name in enumerate(source.names()):
        whole = by_turn[:, i].reshape(6, 2)
        assert source.shape(name) == (6, 2)
        np.testing.assert_array_equal(source.read(name), whole)
        for region in (None, (slice(1, 5), slice(0, 2)), (slice(2, 3), slice(1, 2)), (slice(4, 4), slice(0, 1))):
            wanted = whole[region or ()]
            out = np.zeros(wanted.shape)
            source.read_into(name, out, region)
            np.testing.assert_array_equal(out, wanted)


def test_a_shared_tensor_of_another_size_is_refused_by_its_own_name():
    with pytest.raises(ValueError, match=r"^tensor 'a.qk.weight' has 12 outputs; the model expects 9$"):
        LaidOut(Arrays(**{"a.qk.weight": TABLE}), Layout(shared={"qk": in_turn(q=6, k=3)}))


@pytest.mark.parametrize(
    ("variant", "prefix", "mask", "names"),
    [
        ("gpt2", "transformer.", "h.0.attn.bias", {}),
        ("falcon", "transformer.", None, {}),
        ("gpt_neox", "gpt_neox.", "gpt_neox.layers.0.attention.masked_bias", {"lm_head.": "embed_out."}),
        ("gemma3", None, None, {"language_model.model.": "model.language_model.", "vision_": "model.vision_"}),
    ],
)
def test_other_checkpoints_of_the_same_model_read_alike(variant, prefix, mask, names, tmp_path):
    """Older ones, without the outermost module, as GPT-2's on the Hub, with old names or with masks; and newer ones."""
    save_random_model(VARIANTS[variant], tmp_path)
    _, expected = load_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in names.items():
        tensors = {name.replace(new, old): value for name, value in tensors.items()}
    if not names:
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    if mask is not None:
        tensors[mask] = np.ones((1, 1, 4, 4), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    _, found = load_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_leaf_is_read_once(tmp_path):
    """Shared and transposed tensors cost the bytes that they have."""
    save_random_model(VARIANTS["gpt2"], tmp_path)
    model = models.family("gpt2")
    source = LaidOut(SafetensorsSource(tmp_path), model.layout(model.from_hf(VARIANTS["gpt2"])))
    nbytes = 0
    for name in source.names():
        out = np.zeros(source.shape(name), np.float32)
        source.read_into(name, out)
        nbytes += out.nbytes
    assert source.bytes_read == nbytes
