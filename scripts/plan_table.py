"""The tables of docs/plan.md: what five models take and could do on four GPUs, and the GPUs' figures.

python scripts/plan_table.py               # the models' table, in Markdown: twenty minutes on two cores
python scripts/plan_table.py --card h200   # its lines of one GPU
python scripts/plan_table.py --gpus        # the GPUs' table
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is first imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from fastgen_jax.gpus import GPUS
from fastgen_jax.plan import MEM_FRACTION, Request

MODELS = {"llama2-7b": 1, "mistral-7b": 1, "opt-13b": 1, "qwen2.5-0.5b": 1, "llama2-70b": 4}
"""And the devices that share each."""

CARDS = ("l4", "a100-80", "h200", "b200")
HEAD = (
    *("model", "tp", "GPU", "to use GB", "weights GB", "step MB", "pool GB", "blocks", "tokens", "1k / 4k / 16k"),
    *("decode 1 ms", "tokens/s", "decode n", "ms", "tokens/s", "prompt 512 ms", "tokens/s", "knee"),
)


def row(found: dict[str, Any]) -> tuple[Any, ...]:
    """A line of the models' table."""
    start = (found["model"], found["tp"], found["gpu"], gb(found["budget_bytes"]), gb(found["weights_bytes"]))
    if not found["fits"]:
        would = ", ".join(f"{name} {value}" for change in found["would_fit"] for name, value in change.items())
        lacks = f"lacks {gb(found['short_bytes'])}; {would or 'nothing'} would fit"
        return *start, "", lacks, *[""] * (len(HEAD) - len(start) - 2)
    *decodes, prompt = found["roofline"]  # of one sequence, and of as many as there may be: of one, if that is all
    one, most = decodes[0], decodes[-1]
    return (
        *start,
        f"{found['step_bytes'] / 1e6:.1f}",
        gb(found["pool_bytes"]),
        found["pool_blocks"],
        found["pool_tokens"],
        " / ".join(str("-" if count is None else count) for count in found["sequences"].values()),
        *(ms(one), rate(one)),
        *(most["tokens"], ms(most), rate(most)),
        *(ms(prompt), rate(prompt)),
        f"{found['knee_tokens']:.1f}",
    )


def models_table(cards: Sequence[str]) -> Iterator[str]:
    requests = [Request(model, card, tp, MEM_FRACTION, {}) for model, tp in MODELS.items() for card in cards]
    yield from header(HEAD)
    # A process compiles for one GPU only, see `fastgen_jax.deviceless`.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for report in pool.map(sizes, requests):
            yield line(row(report))


def sizes(request: Request) -> dict[str, Any]:
    """A plan without what only the smaller buckets tell."""
    from fastgen_jax.plan_worker import make_report

    return make_report(request, every_bucket=False)


def gpus_table() -> Iterator[str]:
    yield from header(("--gpu", "name", "capability", "SMs", "memory GB", "GB/s", "bf16 TFLOP/s", "source"))
    for name, gpu in GPUS.items():
        capability = ".".join(map(str, gpu.capability))
        figures = (gb(gpu.memory_bytes), f"{gpu.bandwidth_gb_s:g}", f"{gpu.bf16_tflops:g}")
        yield line((name, gpu.name, capability, gpu.num_sms, *figures, gpu.source))


def gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f}"


def ms(bound: dict[str, Any]) -> str:
    return f"{bound['seconds'] * 1e3:.4g}"


def rate(bound: dict[str, Any]) -> str:
    return f"{bound['tokens_per_s']:.0f}"


def line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def header(cells: Sequence[str]) -> Iterator[str]:
    yield line(cells)
    yield "|" + "---|" * len(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true", help="print the GPUs' table instead")
    parser.add_argument("--card", choices=CARDS, help="this GPU's lines only")
    args = parser.parse_args()
    for text in gpus_table() if args.gpus else models_table([args.card] if args.card else CARDS):
        print(text, flush=True)


if __name__ == "__main__":
    main()
