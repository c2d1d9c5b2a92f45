"""What ptxas makes of the GPU attention kernels, for GPUs that need not be here: the table of docs/kernels.md.

python scripts/kernel_table.py                      # every variant for every chip, in Markdown, in a few minutes
python scripts/kernel_table.py --gpu h200 --json    # one chip's, with the counts of instructions

Needs the extra `plan` (pip install 'fastgen-jax[plan]').
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from fastgen_jax.compiler_output import parse_ptxas
from fastgen_jax.gpus import get_gpu

CHIPS = ("h200", "a100-80", "rtx4090", "b200")


class Variant(NamedTuple):
    """What an engine can ask of the kernels. heads: query and KV heads."""

    heads: tuple[int, int]
    head_dim: int
    block_size: int = 64
    window: int | None = None
    softcap: float | None = None
    dtype: str = "bfloat16"
    kv_dtype: str | None = None

    def __str__(self) -> str:
        parts = [f"D {self.head_dim}", f"G {self.heads[0] // self.heads[1]}", f"B {self.block_size}"]
        parts += ["window"] if self.window else []
        parts += ["softcap"] if self.softcap else []
        parts += ["8-bit K and V"] if self.kv_dtype else []
        return ", ".join([*parts, self.dtype])


# Each D with and without a window, each G, block size, cap and dtype with several of the others.
VARIANTS = [
    Variant((32, 32), 128),
    Variant((32, 8), 128),
    Variant((32, 8), 128, window=4096),
    Variant((64, 8), 128, dtype="float16"),
    Variant((16, 1), 128, block_size=16),
    Variant((28, 4), 128, block_size=128, window=1024),
    Variant((32, 16), 128, block_size=32, softcap=50.0, window=4096),
    Variant((9, 3), 64),
    Variant((14, 2), 64, block_size=32, window=4096),
    Variant((12, 12), 64, block_size=16, dtype="float16"),
    Variant((32, 32), 80),
    Variant((40, 8), 80, block_size=128, window=512, softcap=30.0),
    Variant((32, 32), 96, dtype="float16"),
    Variant((24, 4), 96, block_size=32, window=2048),
    Variant((16, 16), 256),
    Variant((8, 4), 256, window=4096, softcap=50.0),
    Variant((24, 8), 256, block_size=16, window=512, dtype="float16"),
    Variant((16, 2), 256, block_size=128, softcap=30.0),
]
NARROW = [
    Variant((32, 32), 128, kv_dtype="float8_e4m3fn"),
    Variant((32, 8), 128, kv_dtype="float8_e4m3fn"),
    Variant((28, 4), 128, block_size=16, window=1024, dtype="float16", kv_dtype="float8_e4m3fn"),
    Variant((9, 3), 64, kv_dtype="float8_e4m3fn"),
    Variant((40, 8), 80, block_size=128, window=512, softcap=30.0, kv_dtype="float8_e4m3fn"),
    Variant((8, 8), 192, kv_dtype="float8_e4m3fn"),
    Variant((16, 16), 256, kv_dtype="float8_e4m3fn"),
    Variant((8, 4), 256, block_size=32, window=4096, softcap=50.0, kv_dtype="float8_e4m3fn"),
]
"""Of pools of 8 bits a number."""


def compile_variants(gpu: str, variants: list[Variant]) -> list[dict[str, Any]]:
    """A record for each kernel of each variant: what ptxas says, and counts of instructions.

    In a process of its own: what the compilers say goes to its standard output.
    """
    request = json.dumps([gpu, [variant._asdict() for variant in variants]])
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--worker"], input=request, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ChildProcessError(f"compiling for {gpu} ended with status {done.returncode}: {done.stderr[-2000:]}")
    smem_bytes = json.loads(done.stderr.splitlines()[-1])
    records, variant = [], -1
    for kernel in read_kernels(done.stdout):
        variant += kernel["name"].endswith("_tiles")
        smem = smem_bytes[variant][kernel["name"]]
        threads = threads_of(kernel["name"], variants[variant])
        occupancy = blocks_per_sm(gpu, threads, kernel["registers"], smem)
        figures = {"threads": threads, "smem_bytes": smem, "blocks_per_sm": occupancy}
        records.append({"variant": str(variants[variant]), **kernel, **figures})
    if variant + 1 != len(variants):
        raise ValueError(f"{len(variants)} variants were compiled for {gpu} and {variant + 1} were reported")
    return records


def blocks_per_sm(gpu: str, threads: int, registers: int, smem_bytes: int) -> int:
    """How many thread blocks of a kernel run on an SM at once."""
    limits = get_gpu(gpu).limits
    by_registers = limits.registers_per_sm // (threads * -(-registers // 8) * 8)
    by_smem = limits.shared_per_sm // (smem_bytes + 1024)  # what the driver takes of a block's
    return min(by_registers, by_smem, limits.threads_per_sm // threads, 32)


def worker() -> None:
    """Compile what standard input asks for, the compilers talking to standard output; shared memory to stderr."""
    import jax
    import jax.numpy as jnp
    import nvidia
    from jax.experimental.mosaic.gpu import core  # noqa: F401 (it sets the variable below)

    from fastgen_jax.deviceless import compile_only_device, record_shared_memory
    from fastgen_jax.kernels import work
    from fastgen_jax.kernels.mosaic_gpu import MosaicGpu, Target
    from fastgen_jax.kernels.mosaic_gpu_common import LSE_COLUMNS

    (nvdisasm, *_) = (path for folder in nvidia.__path__ for path in Path(folder).glob("*/bin/nvdisasm"))
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(nvdisasm.parent.parent)
    recorded, smem_bytes = record_shared_memory(), []
    name, variants = json.load(sys.stdin)
    gpu = get_gpu(name)
    backend = MosaicGpu(Target(gpu.capability, gpu.num_sms, gpu.limits.shared_per_block))

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    device = compile_only_device(gpu)
    for v in (Variant(**fields) for fields in variants):
        num_heads, num_kv_heads = v.heads
        group = num_heads // num_kv_heads
        pool, _ = (
            jax.ShapeDtypeStruct(shape, v.kv_dtype or v.dtype)
            for shape in backend.pool_shapes(1000, v.block_size, num_kv_heads, v.head_dim)
        )
        q = jax.ShapeDtypeStruct((num_kv_heads, 512 * group + backend.kernels.QUERY_PADDING, pool.shape[-1]), v.dtype)
        sizes = (v.dtype, v.head_dim, num_heads, num_kv_heads, v.block_size)
        for splits in (False, True):
            config = backend.config(
                splits, *sizes, kv_dtype=v.kv_dtype, scale=v.head_dim**-0.5, window=v.window, softcap=v.softcap
            )
            out = jax.ShapeDtypeStruct((512, num_kv_heads, group, config.out_dim), v.dtype)
            partials = (
                jax.ShapeDtypeStruct((300, *out.shape[1:]), jnp.float32),
                jax.ShapeDtypeStruct((300, num_kv_heads, LSE_COLUMNS), jnp.float32),
            )

            def attend(q, pool, items, num_items, tables, out, c=config, partials=partials, splits=splits):
                out_ref = jax.new_ref(out)
                refs, out_type = ((out_ref,), partials) if splits else ((), jax.typeof(out))
                work_list = work.Work(items, num_items)
                kv_scales = jnp.ones(2) if c.widens else None
                result = backend.kernels.launch(
                    c, q, pool, pool, kv_scales, work_list, tables, *refs, out_type=out_type
                )
                return result, out_ref[...]

            with jax.default_device(device):
                jax.jit(attend).lower(q, pool, ints(300, 7), ints(1), ints(256, 64), out).compile()
        smem_bytes.append(dict(recorded))
        recorded.clear()
    print(json.dumps(smem_bytes), file=sys.stderr)


def read_kernels(printed: str) -> list[dict[str, Any]]:
    """The kernels in what a worker printed, in order: what ptxas says of each, then its code."""
    found = []
    for part in re.split(r"(?=ptxas info    : Compiling entry function)", printed)[1:]:
        (kernel,) = parse_ptxas(part, {})
        found.append(
            {
                "name": kernel.name,
                "arch": kernel.arch,
                "registers": kernel.registers,
                "spill_bytes": kernel.spill_bytes,
                "stack_bytes": kernel.stack_bytes,
                **count_instructions(part),
            }
        )
    return found


_MMA = ("HGMMA", "HMMA")


def count_instructions(sass: str) -> dict[str, Any]:
    """How many instructions there are, of each opcode, and in the loop over the keys that need no mask.

    set_registers: what warpgroups set their registers to, the one that gives up some first.

    opcodes: with the width of LDGSTS, a copy to shared
    memory, as in "LDGSTS.128".
    """
    opcodes: list[str] = []
    set_registers = [int(n, 16) for n in re.findall(r"USETMAXREG\S+ (?:UP\d+, )?(0x[0-9a-f]+)", sass)]
    targets: dict[int, str] = {}  # of branches
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)(.*)", line):
            opcode, rest = found.groups()
            if opcode == "BRA" and (target := re.search(r"\.L_x_\d+", rest)):
                targets[len(opcodes)] = target[0]
            opcodes.append(opcode)
    loops = [opcodes[labels[label] : i + 1] for i, label in targets.items() if labels[label] <= i]
    # There are two, of as many multiplications: the other masks.
    half = _count_mma(opcodes) // 2
    inner = min((loop for loop in loops if half and _count_mma(loop) >= half), key=len, default=[])
    names = (
        ".".join([op.split(".")[0], *re.findall(r"\b128\b", op)]) if "LDGSTS" in op else op.split(".")[0]
        for op in opcodes
    )
    return {
        "instructions": len(opcodes),
        "set_registers": set_registers,
        "inner_loop": len(inner),
        "inner_mma": _count_mma(inner),
        "opcodes": dict(sorted(Counter(names).items())),
    }


def _count_mma(opcodes: list[str]) -> int:
    return sum(opcode.startswith(_MMA) for opcode in opcodes)


def threads_of(name: str, variant: Variant) -> int:
    """Threads of a block: Hopper's have a warpgroup that only copies, two that compute for tiles up to D 128, and one
    that makes 16 bits of 8."""
    if not name.startswith("hopper"):
        return 128
    computing = 2 if name.endswith("_tiles") and variant.head_dim <= 128 else 1
    return 128 * (computing + (2 if variant.kv_dtype else 1))


def markdown(records: list[dict[str, Any]]) -> str:
    """The table: a row for each variant, chip and kernel."""
    lines = [
        "| chip | kernel | variant | registers | shared memory | blocks per SM | instructions | inner loop | mma |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in records:
        cells = (r["arch"], r["name"], r["variant"], r["registers"], f"{r['smem_bytes']:,}", r["blocks_per_sm"])
        lines.append("| " + " | ".join(map(str, (*cells, r["instructions"], r["inner_loop"], r["inner_mma"]))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=CHIPS, help="one chip only")
    parser.add_argument("--json", action="store_true", help="as JSON, with the counts of every opcode")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return
    chips = [args.gpu] if args.gpu else CHIPS
    records = [record for chip in chips for record in compile_variants(chip, VARIANTS + NARROW)]
    print(json.dumps(records, indent=1) if args.json else markdown(records))


if __name__ == "__main__":
    main()
