"""The README's table of families: their files' first lines, short names, and what the configs of these have.

python scripts/model_table.py           # print it, in Markdown
python scripts/model_table.py --write   # put it into README.md
python scripts/model_table.py --check   # fail if README.md has another
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastgen_jax import models
from fastgen_jax.checkpoint import ALIASES
from fastgen_jax.checkpoint.config_only import read_config

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- python scripts/model_table.py --write -->\n\n", "\n<!-- end of the table -->"
TUNED = re.compile("-(instruct|chat|it)$")


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each family: its `model_type`, the models, their short names, what these have."""
    hf_configs = {alias: read_config(alias) for alias in ALIASES}
    for name in models.families():
        family = models.family(name)
        known = {alias: hf for alias, hf in hf_configs.items() if hf["model_type"] == name}
        title = (family.__doc__ or "").splitlines()[0].partition(": ")[0]
        base = [alias for alias in known if not (TUNED.search(alias) and TUNED.sub("", alias) in known)]
        has = features([family.from_hf(hf) for hf in known.values()])
        yield f"`{name}`", title, ", ".join(base), ", ".join(has)


def features(configs: Sequence[Any]) -> Iterator[str]:
    """What some models of a family have that not every model has, in words of the field."""

    def some(has: Callable[[Any], Any]) -> bool:
        return any(has(config) for config in configs)

    ropes = dict.fromkeys(rope for config in configs for rope in getattr(config, "ropes", ()))
    scalings = dict.fromkeys(rope.rope_type for rope in ropes if rope is not None)
    found = {
        "MHA": some(lambda c: c.num_heads == c.num_kv_heads),
        "GQA": some(lambda c: c.num_heads > c.num_kv_heads > 1),
        "MQA": some(lambda c: c.num_kv_heads == 1),
        "windows": some(lambda c: any(window and window < c.max_positions for window in c.windows)),
        "learned positions": some(lambda c: not hasattr(c, "ropes")),
        **{f"{scaling} rope": scaling != "default" for scaling in scalings},
        "layers without rope": None in ropes,
        "two ropes": some(lambda c: getattr(c, "window_rope", None)),
        "partial rope": some(lambda c: any(rope and rope.dim < c.head_dim for rope in getattr(c, "ropes", ()))),
        "parallel block": some(lambda c: getattr(c, "parallel", False)),
        "q and k norms": some(lambda c: getattr(c, "head_norm", None)),
        "soft caps": some(lambda c: getattr(c, "logits_softcap", None)),
        "experts": some(lambda c: getattr(c, "mixture", None)),
        "tied": some(lambda c: c.tie_word_embeddings),
    }
    yield from (name for name, is_there in found.items() if is_there)


def table() -> str:
    head = ("`model_type`", "models", "short names", "attention, positions and more")
    lines = [head, ("---",) * len(head), *rows()]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def with_table(text: str) -> str:
    """The README with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README.md lacks {BEGIN.strip()!r} and, behind it, {END.strip()!r}")
    return before + BEGIN + table() + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    parser.add_argument("--check", action="store_true", help="fail if README.md has another")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    if args.write:
        README.write_text(with_table(text), encoding="utf-8")
    elif args.check:
        if with_table(text) != text:
            sys.exit("README.md has another table of families; python scripts/model_table.py --write puts it right")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
