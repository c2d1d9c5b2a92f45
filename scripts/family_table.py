"""The table of docs/models.md: a real model of every family, compiled for GPUs that need not be here.

python scripts/family_table.py            # in Markdown; takes the extra `plan`
python scripts/family_table.py falcon     # the lines of these families
"""

import argparse
import os
import runpy
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is first imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from plan_table import header, line

from fastgen_jax.gpus import GPUS

CONFIGS = runpy.run_path(str(Path(__file__).parent.parent / "tests" / "real_configs.py"))
CARDS = {"h200": "sm_90a", "a100-80": "sm_80"}
TOKENS, ROWS, NUM_BLOCKS = 512, 16, 200
"""Of the step, of the head, and of the pool."""


class Case(NamedTuple):
    family: str
    card: str


class Compiled(NamedTuple):
    """What the compiler makes of a family's step on one GPU, and of the head."""

    heads: tuple[int, int, int]
    num_layers: int
    attention: str
    temp_bytes: int
    in_place: bool
    num_kernels: int
    num_attention: int
    head_temp_bytes: int


def compiled(case: Case) -> Compiled:
    """In a process of its own: one compiles for one GPU only."""
    import jax

    from fastgen_jax.compiler_output import count_launches
    from fastgen_jax.deviceless import compile_only_devices
    from fastgen_jax.plan import MEM_FRACTION
    from fastgen_jax.sizing import Sizing
    from fastgen_jax.types import EngineConfig

    gpu = GPUS[case.card]
    devices = compile_only_devices(gpu, 1)
    config = CONFIGS["shortened"](case.family)
    engine = EngineConfig(max_num_batched_tokens=TOKENS)
    sizing = Sizing(config, gpu, engine, tp=1, mem_fraction=MEM_FRACTION, devices=devices)
    programs = sizing.programs(NUM_BLOCKS, sizing.wanted_len)
    with jax.default_device(devices[0]):
        step, head = programs.get("backbone", TOKENS), programs.get("sample_logprobs", ROWS)
    memory, counts, c = step.memory_analysis(), count_launches(step.as_text()), sizing.model_config
    return Compiled(
        heads=(c.num_heads, c.num_kv_heads, c.head_dim),
        num_layers=c.num_layers,
        attention=sizing.backend.NAME,
        temp_bytes=memory.temp_size_in_bytes,
        in_place=memory.alias_size_in_bytes == programs.reused_bytes(),
        num_kernels=counts["kernels"],
        num_attention=counts["custom_calls"],
        head_temp_bytes=head.memory_analysis().temp_size_in_bytes,
    )


HEAD = (
    *("family", "layers", "H / K / D", "attention", "temporaries MB", "pool in place"),
    *("kernels", "of which attention", "head MB"),
)


def row(family: str, found: list[Compiled]) -> tuple[Any, ...]:
    """A line of the table: figures that differ between the GPUs, in the order of CARDS."""
    first = found[0]

    def each(values: list[Any]) -> str:
        return " / ".join(map(str, values if len(set(values)) > 1 else values[:1]))

    return (
        family,
        first.num_layers,
        " / ".join(map(str, first.heads)),
        each([one.attention for one in found]),
        each([f"{one.temp_bytes / 1e6:.0f}" for one in found]),
        each(["yes" if one.in_place else "no" for one in found]),
        each([one.num_kernels for one in found]),
        each([one.num_attention for one in found]),
        each([f"{one.head_temp_bytes / 1e6:.0f}" for one in found]),
    )


def table(families: list[str]) -> Iterator[str]:
    yield from header(HEAD)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        found = pool.map(compiled, [Case(family, card) for family in families for card in CARDS])
        for family in families:
            yield line(row(family, [next(found) for _ in CARDS]))


def main() -> None:
    known = sorted((*CONFIGS["REAL"], *CONFIGS["SHIPPED"]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="all unless some are named")
    families = parser.parse_args().family or known
    if unknown := set(families) - set(known):
        parser.error(f"no family {unknown.pop()!r}; there are {', '.join(known)}")
    for text in table(families):
        print(text, flush=True)


if __name__ == "__main__":
    main()
