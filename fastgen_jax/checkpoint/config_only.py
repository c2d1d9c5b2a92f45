"""A model's config.json, for when nothing else of it is wanted."""

import difflib
from pathlib import Path
from typing import Any

from fastgen_jax.checkpoint import gguf_config
from fastgen_jax.checkpoint.aliases import ALIASES
from fastgen_jax.checkpoint.gguf_file import read_header
from fastgen_jax.checkpoint.quantized import with_quantization
from fastgen_jax.models.hf_config import read_json

_SHIPPED = Path(__file__).parent / "configs"
"""The config.json of every alias, without what says nothing of the model's shape."""


def read_config(name: str) -> dict[str, Any]:
    """The config of an alias or the Hub id it stands for, from this package; or of a folder, a .json or a .gguf file.

    Raises ValueError with one sentence.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json")
    if path.suffix == ".gguf" and path.is_file():
        return gguf_config.hf_config(read_header(path))
    if path.is_dir():
        path = path / "config.json"
    elif path.suffix != ".json" or not path.is_file():
        path = _SHIPPED / f"{_alias(name)}.json"
    value = read_json(path)
    return with_quantization(path.parent, value) if path.name == "config.json" else value


def _alias(name: str) -> str:
    by_hub_id = {target: alias for alias, target in ALIASES.items() if isinstance(target, str)}
    alias = by_hub_id.get(name, name.lower())
    if alias not in ALIASES:
        close = difflib.get_close_matches(alias, ALIASES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"{name!r} is no folder with a config.json, .json file, .gguf file or alias; "
            f"{hint}the aliases are {', '.join(ALIASES)}"
        )
    return alias
