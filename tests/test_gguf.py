"""GGUF files against what made them: transformers' own reading of SmolLM2, and files written here."""

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML
from test_checkpoint import run_python

from fastgen_jax.checkpoint import resolve
from fastgen_jax.checkpoint.gguf_config import hf_config
from fastgen_jax.checkpoint.gguf_file import _IN_LAYER, _TOP_LEVEL, GGUFSource, read_header
from fastgen_jax.checkpoint.gguf_tokenizer import build_tokenizer

RNG = np.random.default_rng(0)
TEXTS = (
    "Hello, world!",
    "It's 12:45 on 2024-01-31; they'll   pay $3.50.\n\n\tdef f(x):\n    return x**2\n",
    "naïve café, Straße, 日本語のテキスト, Привет, 🤖👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    " leading and trailing ",
    "",
)
E, F, V, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 12, 4, 2, 8
BASE = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": E,
    "feed_forward_length": F,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 0.5,
    "rope.freq_base": 5e5,
}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve("smollm2-135m").path


def write(path: Path, arch: str = "llama", tensors: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """A GGUF file; a tensor is float32 or a pair (quantised bytes, type), metadata keys have "." as "__"."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (BASE | {key.replace("__", "."): value for key, value in metadata.items()}).items():
        key = key if key.startswith("tokenizer.") else f"{arch}.{key}"
        match value:
            case str():
                writer.add_string(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
    for name, tensor in ({"token_embd.weight": np.ones((V, E), np.float32)} | (tensors or {})).items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


# Tensors


@pytest.mark.slow
def test_config_and_tensors_of_smollm2_are_what_transformers_loads(smollm2):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    found = resolve(smollm2)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**found.hf_config))
    theirs = load_gguf_checkpoint(smollm2, return_tensors=True, model_to_load=model)

    assert {"hidden_size", "num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"} <= set(
        theirs["config"]
    )
    config = {key: value for key, value in theirs["config"].items() if not key.startswith(("_", "unk_"))}
    assert {key: found.hf_config[key] for key in config} == config

    source = found.open()
    assert sorted(source.names()) == sorted(theirs["tensors"])
    for name, tensor in theirs["tensors"].items():
        np.testing.assert_array_equal(source.read(name), tensor.numpy(), err_msg=name)
    assert source.bytes_read == sum(tensor.nbytes for tensor in read_header(smollm2).tensors.values())


def test_the_names_are_those_of_the_gguf_package():
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    for theirs, ours in _TOP_LEVEL.items():
        assert names.get_name(ours) == theirs
    for theirs, ours in _IN_LAYER.items():
        assert names.get_name(f"model.layers.3.{ours}") == f"blk.3.{theirs}"


@pytest.mark.parametrize("kind", [GGML.F32, GGML.F16, GGML.BF16, GGML.Q8_0, GGML.Q4_0, GGML.Q4_1, GGML.Q5_1])
def test_every_row_is_decoded_as_the_gguf_package_does(tmp_path, kind):
    data = gguf.quantize(normal(1000, 640), kind)
    source = GGUFSource(read_header(write(tmp_path / "m.gguf", tensors={"output.weight": (data, kind)})))
    expected = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(source.read("lm_head.weight"), expected)
    transposed = np.empty((640, 1000), ml_dtypes.bfloat16)
    source.read_into("lm_head.weight", transposed.T)
    np.testing.assert_array_equal(transposed, expected.astype(ml_dtypes.bfloat16).T)


def llama_cpp_permute(w: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return w.reshape(num_heads, 2, w.shape[0] // num_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_rows_of_q_and_k_are_put_back_for_a_llama(tmp_path, arch):
    hf = {
        "model.layers.0.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, E),
        "model.layers.0.self_attn.q_proj.bias": normal(HEADS * HEAD_DIM),
        "model.layers.0.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, E),
        "model.layers.0.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, E),
    }
    stored = {}
    for name, tensor in hf.items():
        part, kind = name.split(".")[-2:]
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(part) if arch == "llama" else None
        stored[f"blk.0.attn_{part[0]}.{kind}"] = llama_cpp_permute(tensor, heads) if heads else tensor
    source = GGUFSource(read_header(write(tmp_path / "m.gguf", arch, stored)))
    for name, tensor in hf.items():
        np.testing.assert_array_equal(source.read(name), tensor, err_msg=name)


def test_embeddings_are_tied_unless_the_output_really_differs(tmp_path):
    embedding = normal(V, E)
    quantised = (gguf.quantize(embedding, GGML.Q8_0), GGML.Q8_0)
    for output, tied in [(None, True), (embedding.copy(), True), (embedding + 1, False), (quantised, False)]:
        tensors = {"token_embd.weight": embedding} | ({} if output is None else {"output.weight": output})
        header = read_header(write(tmp_path / "m.gguf", tensors=tensors))
        assert hf_config(header)["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in GGUFSource(header).names()) is not tied


def test_a_tensor_no_model_has_is_named(tmp_path):
    header = read_header(write(tmp_path / "m.gguf", tensors={"blk.0.ffn_gate_inp.weight": normal(4, E)}))
    with pytest.raises(ValueError, match=r"holds tensor 'blk.0.ffn_gate_inp.weight'"):
        GGUFSource(header)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:10], "is not a GGUF file: it has only 10 bytes"),
        (lambda data: b"GGML" + data[4:], "is not a GGUF file: it does not begin with GGUF"),
        (lambda data: data[:4] + (99).to_bytes(4, "little") + data[8:], "is GGUF version 99"),
        (lambda data: data[:200], "is damaged: its GGUF header does not parse"),
        (lambda data: data[:-100], "is cut short: tensor 'token_embd.weight'"),
        (lambda data: data.replace(b"token_embd", b"token_emba"), "has no token_embd.weight"),
        (lambda data: data.replace(b"llama", b"gemma"), "holds the architecture 'gemma'; .* llama, qwen2"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(tmp_path, damage, sentence):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"m.gguf {sentence}"):
        resolve(path)


# Config


@pytest.mark.parametrize(
    ("arch", "metadata", "expected"),
    [
        ("llama", {}, {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 0.5}),
        ("qwen2", {}, {"model_type": "qwen2", "rope_theta": 5e5, "hidden_size": E, "vocab_size": V}),
        ("llama", {"attention__sliding_window": 16}, {"model_type": "mistral", "sliding_window": 16}),
        ("llama", {"attention__key_length": 16, "rope__dimension_count": 16}, {"head_dim": 16}),
        (
            "llama",
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            "qwen2",
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
            },
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        ),
    ],
)
def test_metadata_becomes_config(tmp_path, arch, metadata, expected):
    config = hf_config(read_header(write(tmp_path / "m.gguf", arch, **metadata)))
    assert {key: config.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("arch", "metadata", "sentence"),
    [
        ("llama", {"expert_count": 8}, "is a mixture of experts"),
        ("llama", {"rope__scaling__type": "longrope"}, "scales its rotary embedding by 'longrope'"),
        ("llama", {"rope__dimension_count": 4}, "has rope.dimension_count 4, not the 8"),
        ("qwen2", {"attention__sliding_window": 16}, "has a sliding window"),
    ],
)
def test_metadata_that_changes_the_maths_and_is_not_understood_is_refused(tmp_path, arch, metadata, sentence):
    with pytest.raises(ValueError, match=sentence):
        hf_config(read_header(write(tmp_path / "m.gguf", arch, **metadata)))


def llama_cpp_rope_freqs(factor: float, low: float = 1.0) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors` of llama.cpp's convert_hf_to_gguf.py, for heads of 64."""
    divisors = []
    for freq in 1.0 / 5e5 ** (np.arange(0, 64, 2) / 64):
        wavelength = 2 * np.pi / freq
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (4.0 - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rotary_scaling_is_recovered_from_its_divisors(tmp_path, factor):
    tensors = {"rope_freqs.weight": llama_cpp_rope_freqs(factor)}
    header = read_header(write(tmp_path / "m.gguf", tensors=tensors, attention__key_length=64))
    assert hf_config(header)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in GGUFSource(header).names()


def test_other_rotary_divisors_are_refused(tmp_path):
    tensors = {"rope_freqs.weight": llama_cpp_rope_freqs(8.0, low=2.0)}
    header = read_header(write(tmp_path / "m.gguf", tensors=tensors, attention__key_length=64))
    with pytest.raises(ValueError, match=r"has a rope_freqs.weight that is not Llama 3.1's"):
        hf_config(header)


def test_every_token_that_ends_a_text_is_in_the_generation_config(tmp_path):
    ids = {"tokenizer__ggml__eos_token_id": 3, "tokenizer__ggml__eot_token_id": 7}
    assert resolve(write(tmp_path / "m.gguf", **ids)).generation_config == {"eos_token_id": [3, 7]}


# Tokenizer


@pytest.mark.slow
def test_the_tokenizer_of_smollm2_is_what_transformers_makes_of_it(smollm2):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = resolve(smollm2).tokenizer()
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


def test_smollm2_splits_digits_off_as_its_vocabulary_was_learned(smollm2):
    """The file says so ("smollm"); transformers does not know that word and gives the second space to the 1."""
    ours = resolve(smollm2).tokenizer()
    assert ours.convert_ids_to_tokens(ours("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]


def test_a_text_survives_the_tokenizer(smollm2):
    tokenizer = resolve(smollm2).tokenizer()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


SENTENCEPIECE = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__tokens": [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "<0xC3>",
        "<0xA9>",
        "▁",
        "a",
        "b",
        "ab",
        "▁ab",
        "▁a",
    ],
    "tokenizer__ggml__scores": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -7.0, -8.0, -1.0, -2.0, -3.0],
    "tokenizer__ggml__token_type": [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1],
    "tokenizer__ggml__bos_token_id": 1,
    "tokenizer__ggml__eos_token_id": 2,
    "tokenizer__ggml__unknown_token_id": 0,
}


def test_a_sentencepiece_vocabulary_is_what_transformers_makes_of_it(tmp_path):
    from transformers import AutoTokenizer

    path = write(tmp_path / "m.gguf", **SENTENCEPIECE)
    ours, theirs = (
        build_tokenizer(read_header(path)),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"),
    )
    assert ours("ab a")["input_ids"] == [1, 10, 11]
    for text in ("ab", "ab ab a\nb", "abé", " ab", "b</s>a", ""):
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"tokenizer__ggml__model": "bert"}, "has a tokenizer of kind 'bert'; gpt2 and llama"),
        ({}, "has a tokenizer of kind None"),
        (
            {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "odd"},
            "splits text by 'odd'; supported are",
        ),
    ],
)
def test_a_tokenizer_that_is_not_understood_is_refused(tmp_path, metadata, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_tokenizer(read_header(write(tmp_path / "m.gguf", **metadata)))


# Without torch


def test_no_torch_is_needed_and_nothing_is_said_about_it(smollm2):
    script = """if True:
        import sys
        sys.modules["torch"] = None
        sys.stderr = sys.stdout
        from fastgen_jax.checkpoint import resolve
        found = resolve("smollm2-135m")
        print(found.hf_config["num_hidden_layers"], len(found.open().names()))
        print(found.tokenizer()("Hello")["input_ids"])
    """
    assert run_python(script) == "30 272\n[19556]\n"
