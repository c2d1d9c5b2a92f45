"""`fastgen plan`: what a model needs of a GPU and could do there, on a machine that has none."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastgen_jax.cli_flags import ENGINE_HELP, HelpFormatter
from fastgen_jax.gpus import GPUS
from fastgen_jax.plan import MEM_FRACTION, plan, size_text

DESCRIPTION = """\
Compile a model's steps for a GPU that need not be there, and print what they take: weights, temporaries, the KV
pool that is left, kernels, and the bounds of the speed. From the model's config alone.

Takes a few minutes for a 7B model on two quiet cores; --max-num-batched-tokens 16 compiles one bucket only, and is
quick.

It needs an extra: pip install 'fastgen-jax[plan]'"""

EXAMPLES = """\
examples:
  fastgen plan --model llama2-7b --gpu h200
  fastgen plan --model llama2-70b --gpu a100-80 --tp 4 --json > plan.json
  fastgen plan --model llama2-70b --gpu h200 --quantization int4
  fastgen plan --model ./my-checkpoint --gpu my_gpu.json --max-model-len 8192

exit status:
  0 if it fits, 3 if it does not; 1 if compiling broke down; 2 for a mistake in what you gave"""

DOES_NOT_FIT = 3
"""Exit status."""

CONFIG_FLAGS = (
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "gpu_memory_utilization",
    "backend",
    "quantization",
)
"""Fields of `EngineConfig` that change a plan."""

CAVEAT = (
    "A compile without the device does not autotune: there, XLA chooses its matmul kernels by timing them.\n"
    "Every figure here is an estimate until a device confirms it, and the roofline is a bound, not a forecast."
)


def add_command(commands: Any) -> None:
    """Add the command to `commands`, the subparsers of `fastgen`."""
    parser = commands.add_parser(
        "plan",
        usage="fastgen plan --model MODEL --gpu GPU [options]",
        help="what a model takes and could do on a GPU, without the GPU",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    text = "an alias such as llama2-7b, a folder, a config.json or a .gguf file"
    parser.add_argument("--model", metavar="MODEL", required=True, help=text)
    text = f"{', '.join(GPUS)}, or a .json file that describes another"
    parser.add_argument("--gpu", metavar="GPU", required=True, help=text)
    parser.add_argument("--tp", metavar="N", type=int, default=1, help="devices that share the model (default 1)")
    text = f"the share of the GPU's memory that JAX takes, XLA_CLIENT_MEM_FRACTION (default {MEM_FRACTION:g})"
    parser.add_argument("--mem-fraction", metavar="X", type=float, default=MEM_FRACTION, help=text)
    for name in CONFIG_FLAGS:
        kind, metavar = {
            "dtype": (str, "NAME"),
            "kv_cache_dtype": (str, "NAME"),
            "backend": (str, "NAME"),
            "quantization": (str, "NAME"),
            "gpu_memory_utilization": (float, "X"),
        }.get(name, (int, "N"))
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, metavar=metavar, type=kind, default=argparse.SUPPRESS, help=ENGINE_HELP[name])
    parser.add_argument("--json", action="store_true", help="one JSON object; docs/plan.md has its fields")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan that `args` ask for; `DOES_NOT_FIT` if it does not."""
    config = {name: getattr(args, name) for name in CONFIG_FLAGS if hasattr(args, name)}
    show = False if args.quiet else None
    found = plan(args.model, args.gpu, tp=args.tp, mem_fraction=args.mem_fraction, show_progress=show, **config)
    if sys.stdout is not None:
        print(json.dumps(found, indent=2) if args.json else "\n".join(describe(found)))
    return 0 if found["fits"] else DOES_NOT_FIT


def describe(found: dict[str, Any]) -> Iterator[str]:
    """The lines of a plan, for people."""
    each = f", on each of {found['tp']} devices" if found["tp"] > 1 else ""
    dtype = found["dtype"] + (f" with weights in {found['quantization']}" if found["quantization"] else "")
    yield f"{found['model']} in {dtype} on {found['gpu_name']}{each} ({found['backend']} attention)"
    if found["backend_reason"]:
        yield f"attention is not mosaic_gpu: {found['backend_reason']}"
    yield ""
    yield from table(None, memory_rows(found))
    yield ""
    if not found["fits"]:
        yield found["message"]
        return
    yield "A step, by its bucket of tokens; launches are per layer, those in a loop's body counted once:"
    yield ""
    yield from table(BUCKET_HEAD, [bucket_row(bucket, found) for bucket in found["buckets"]])
    last = found["head"]
    yield f"and for the logits and samples of {last['rows']} rows {size_text(last['temp_bytes'])} of temporaries"
    yield ""
    if found["kernels"]:
        yield from table(KERNEL_HEAD, map(kernel_row, found["kernels"]))
    else:
        yield "No Pallas kernel is in these programs."
    yield ""
    yield from table(BOUND_HEAD, map(bound_row, found["roofline"]))
    yield f"In steps of fewer than {found['knee_tokens']:.0f} tokens (the knee) reading the weights takes longest."
    yield ""
    if found["tp"] > 1:
        yield f"Between the {found['tp']} devices, at {found['link_gb_s']:g} GB/s in one direction:"
        yield ""
        yield from table(LINK_HEAD, [*map(link_row, found["buckets"]), link_row(last)])
        yield "The roofline leaves these out; they come on top of it."
        yield ""
    yield CAVEAT
    yield f"GPU figures: {found['gpu_source']}."


def memory_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What the memory goes to: name, size, remark."""
    limit = f"of {size_text(found['device_bytes'])}; JAX takes {size_text(found['limit_bytes'])}"
    yield "memory to use", size_text(found["budget_bytes"]), limit
    yield "weights", size_text(found["weights_bytes"]), ""
    if not found["fits"]:
        return
    yield "largest step", size_text(found["step_bytes"]), "temporaries and outputs"
    blocks = f"{found['pool_blocks']:,} blocks of {found['block_size']}: {found['pool_tokens']:,} tokens"
    if found["kv_dtype"] != found["dtype"]:
        blocks += f" in {found['kv_dtype']}"
    yield "KV pool", size_text(found["pool_bytes"]), blocks
    held = [f"{count:,} of {int(n) // 1024}k" for n, count in found["sequences"].items() if count is not None]
    yield "", "", f"sequences: {', '.join(held) or 'none of 1k'}; the longest, {found['max_model_len']:,} tokens"
    if found["window"]:
        most = f"{found['window_blocks']:,} blocks hold one as long as it gets"
        yield "", "", f"every layer has a window, the widest of {found['window']:,} tokens: {most}"


BUCKET_HEAD = (
    "tokens",
    "temporaries",
    "pool in place",
    "compiled in",
    "kernels",
    "fusions",
    "custom calls",
    "copies",
    "collectives",
    "loops",
)
KERNEL_HEAD = ("Pallas kernel", "for", "registers", "spilled bytes", "stack bytes", "shared bytes")
BOUND_HEAD = ("roofline", "GB moved", "TFLOP", "ms at least", "bound by", "tokens/s at most")


def bucket_row(bucket: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
    missing = found["reused_bytes"] - bucket["aliased_bytes"]
    return (
        str(bucket["tokens"]),
        size_text(bucket["temp_bytes"]),
        "yes" if missing == 0 else f"{size_text(missing)} copied",
        f"{bucket['compile_s']:.0f} s",
        *(f"{bucket[name]:g}" for name in ("kernels", "fusions", "custom_calls", "copies", "collectives", "loops")),
    )


LINK_HEAD = ("step", "all-reduces", "MB", "all-to-alls", "MB", "all-gathers", "MB", "ms at least")


def link_row(program: dict[str, Any]) -> tuple[str, ...]:
    cells = []
    for kind in ("all-reduce", "all-to-all", "all-gather"):
        found = program["exchanged"].get(kind, {"count": 0, "bytes": 0})
        cells += [str(found["count"]), f"{found['bytes'] / 1e6:.3f}"]
    name = f"{program['tokens']} tokens" if "tokens" in program else f"logits of {program['rows']} rows"
    return name, *cells, f"{program['link_s'] * 1e3:.3f}"


def kernel_row(kernel: dict[str, Any]) -> tuple[str, ...]:
    figures = [kernel[name] for name in ("registers", "spill_bytes", "stack_bytes", "smem_bytes")]
    return kernel["name"], kernel["arch"], *("-" if figure is None else f"{figure:,}" for figure in figures)


def bound_row(bound: dict[str, Any]) -> tuple[str, ...]:
    return (
        bound["step"],
        f"{bound['bytes'] / 1e9:.2f}",
        f"{bound['flops'] / 1e12:.3f}",
        f"{bound['seconds'] * 1e3:.3f}",
        bound["limit"],
        f"{bound['tokens_per_s']:,.0f}",
    )


def table(head: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Aligned columns: the first to the left, the others to the right, the last one as it is where there is no head."""
    lines = [*([head] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        if head is None:
            cells[-1] = rest[-1]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
