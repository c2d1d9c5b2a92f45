"""What ptxas makes of the kernel that multiplies with quantised weights on Hopper: the table of
docs/quantized-matmul.md.

python scripts/mixed_kernel_table.py            # in Markdown, in a minute
python scripts/mixed_kernel_table.py --json     # with the counts of instructions

Needs the extra `plan` (pip install 'fastgen-jax[plan]').
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

GPU = "h200"
KINDS = ("int4", "int8", "fp8")


class Variant(NamedTuple):
    """A product. group: inputs that share a scale. shape: outputs and inputs."""

    kind: str
    group: int
    tokens: int
    shape: tuple[int, int] = (4096, 4096)

    def __str__(self) -> str:
        return f"{self.kind}, groups of {self.group}, T {self.tokens}, {self.shape[0]} x {self.shape[1]}"


VARIANTS = [
    *[Variant(kind, 128, tokens) for kind in ("int4", "int8", "fp8") for tokens in (1, 16, 32, 64, 128, 512)],
    *[
        Variant(kind, group, tokens)
        for kind in ("int4", "int8", "fp8")
        for group in (32, 64)
        for tokens in (8, 16, 512)
    ],
    *[Variant("int4", 128, tokens, (4096, 11008)) for tokens in (1, 16, 128, 512)],
    *[Variant("int4", 128, tokens, (22016, 4096)) for tokens in (1, 512)],
    Variant("int4", 64, 300, (64, 4096)),
    *[Variant(kind, 64, tokens, (576, 576)) for kind in KINDS for tokens in (8, 128)],
]


def compile_variants(variants: list[Variant]) -> list[dict[str, Any]]:
    """A record for each variant: what ptxas says, and counts of instructions. In a process of its own, whose standard
    output the compilers talk to."""
    table = runpy.run_path(str(Path(__file__).with_name("kernel_table.py")))
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **{f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTXAS", "RESOURCES", "SASS")},
    }
    request = json.dumps([variant._asdict() for variant in variants])
    command = [sys.executable, __file__, "--worker"]
    done = subprocess.run(command, input=request, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"compiling ended with status {done.returncode}: {done.stderr[-2000:]}")
    launches = json.loads(done.stderr.splitlines()[-1])
    kernels = table["read_kernels"](done.stdout)
    records = []
    for variant, launch, kernel in zip(variants, launches, kernels, strict=True):
        per_sm = table["blocks_per_sm"](GPU, launch["threads"], kernel["registers"], launch["smem_bytes"])
        records.append({"variant": str(variant), **launch, **kernel, "blocks_per_sm": per_sm})
    return records


def worker() -> None:
    """Compile what standard input asks for; how each is launched goes to standard error."""
    import jax
    import jax.numpy as jnp
    import nvidia
    from jax.experimental.mosaic.gpu import core  # noqa: F401 (it sets the variable below)

    from fastgen_jax.deviceless import compile_only_device, record_shared_memory
    from fastgen_jax.gpus import get_gpu
    from fastgen_jax.kernels import mixed_hopper

    (nvdisasm, *_) = (path for folder in nvidia.__path__ for path in Path(folder).glob("*/bin/nvdisasm"))
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(nvdisasm.parent.parent)
    recorded, launches = record_shared_memory(), []
    gpu = get_gpu(GPU)
    device = compile_only_device(gpu)
    for fields in json.load(sys.stdin):
        v = Variant(**fields)
        (outputs, inputs), groups = v.shape, v.shape[1] // v.group
        stored = (outputs, inputs // 2) if v.kind == "int4" else (outputs, inputs)
        args = (
            jax.ShapeDtypeStruct((v.tokens, inputs), jnp.bfloat16),
            jax.ShapeDtypeStruct(stored, jnp.uint8 if v.kind == "int4" else mixed_hopper.VALUES[v.kind]),
            jax.ShapeDtypeStruct((outputs, groups), jnp.float32),
        )

        def product(x, values, scales, kind=v.kind):
            return mixed_hopper.product(x, values, scales, kind=kind, num_sms=gpu.num_sms)

        with jax.default_device(device):
            jax.jit(product).lower(*args).compile()
        c = mixed_hopper.config(v.kind, v.tokens, outputs, inputs, groups, num_sms=gpu.num_sms)
        num_blocks = outputs // c.rows * -(-v.tokens // c.tokens) * c.splits
        launches.append(
            {
                "threads": 128 * (c.num_warpgroups + 1),
                "num_blocks": num_blocks,
                "counted_on": min(mixed_hopper.blocks_per_sm(v.group, c.tokens), -(-num_blocks // gpu.num_sms)),
                "stages": c.num_stages,
                "splits": c.splits,
                "smem_bytes": recorded.pop("hopper_mixed_matmul"),
            }
        )
    print(json.dumps(launches), file=sys.stderr)


def markdown(records: list[dict[str, Any]]) -> str:
    columns = ("variant", "registers", "smem_bytes", "blocks_per_sm", "num_blocks", "splits", "stages", "instructions")
    lines = ["| " + " | ".join(column.replace("_", " ") for column in columns) + " |", "|---" + "|---:" * 7 + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(record[c]) for c in columns) + " |" for record in records])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="as JSON, with the counts of every opcode")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return
    records = compile_variants(VARIANTS)
    print(json.dumps(records, indent=1) if args.json else markdown(records))


if __name__ == "__main__":
    main()
