"""What the compilers print of a program, in figures: ptxas and Mosaic of a kernel, XLA of a whole program."""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Kernel:
    """What ptxas says of one Pallas kernel.

    spill_bytes: stores and loads together. smem_bytes: shared memory of a block, None where it was not recorded.
    """

    name: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int | None


_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>\S+?)(?:_mosaic_gpu_kernel)?' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def parse_ptxas(output: str, smem_bytes: dict[str, int]) -> list[Kernel]:
    """The kernels in what a process printed under MOSAIC_GPU_DUMP_PTXAS=1, each once. smem_bytes: by name."""
    return sorted(
        {
            Kernel(
                name=match["name"],
                arch=match["arch"],
                registers=int(match["registers"]),
                spill_bytes=int(match["stores"]) + int(match["loads"]),
                stack_bytes=int(match["stack"]),
                smem_bytes=smem_bytes.get(match["name"]),
            )
            for match in _PTXAS.finditer(output)
        }
    )


def shared_memory(resources: str) -> int:
    """Bytes of shared memory in Mosaic's printed `Resources`: the scratch, and 8 for each barrier."""
    scratch = re.search(r"smem_scratch_bytes=(\d+)", resources)
    barriers = re.findall(r"num_barriers=(\d+)[^}]*?\): (\d+)", resources)
    return (int(scratch[1]) if scratch else 0) + 8 * sum(int(size) * int(count) for size, count in barriers)


# What takes no launch: naming, plumbing, and what only runs other computations.
_NO_LAUNCH = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("while", "conditional", "call", "async-start", "opt-barrier"),
}
_RUNS_OTHERS = ("while", "conditional", "call", "async-start")
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_BITS = {"pred": 8, "s8": 8, "u8": 8, "f16": 16, "bf16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "f64": 64}
_KINDS = ("kernels", "fusions", "copies", "collectives", "custom_calls", "loops")


def count_launches(hlo: str) -> dict[str, int]:
    """What one run of a compiled program (`compiled.as_text()`) launches, by kind.

    fusions, copies, collectives and custom_calls, Pallas kernels among these; `kernels` is all of them and the few
    operations left unfused; `loops` are loops, whose bodies are counted once, whatever their trip count.
    """
    computations, entry = _computations(hlo)

    @functools.cache
    def launches(name: str) -> Counter[str]:
        counts = Counter[str]()
        for opcode, line in computations[name]:
            callees = _callees(line) if opcode in (*_RUNS_OTHERS, "fusion") else []
            counts["loops"] += opcode == "while"
            if opcode in _RUNS_OTHERS:
                for callee in callees:
                    counts.update(launches(callee))
            if opcode in _NO_LAUNCH or opcode.endswith(("-done", "-update")):
                continue
            # XLA wraps a custom call that takes a slice of an array in a fusion.
            wraps = any(inner == "custom-call" for callee in callees for inner, _ in computations[callee])
            counts["kernels"] += 1
            counts["custom_calls"] += wraps or opcode == "custom-call"
            counts["fusions"] += opcode == "fusion" and not wraps
            counts["copies"] += opcode in ("copy", "copy-start")
            counts["collectives"] += opcode.startswith(_COLLECTIVES)
        return counts

    return {kind: launches(entry)[kind] for kind in _KINDS}


def entry(hlo: str) -> str:
    """The computation of a compiled program that runs; the others are the insides of its kernels and loops."""
    return hlo[hlo.index("\nENTRY ") :]


def results(hlo: str, dtype: str = r"\w+") -> list[tuple[tuple[int, ...], str]]:
    """Shape and line of every array that an instruction of a program makes; views and arguments make none."""
    found = []
    for line in hlo.splitlines():
        if instruction := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(", line):
            if instruction[2] in ("parameter", "bitcast", "get-tuple-element", "tuple", "while"):
                continue
            for dims in re.findall(rf"\b{dtype}\[([\d,]*)\]", instruction[1]):
                found.append((tuple(int(n) for n in dims.split(",") if n), line))
    return found


def exchanged(hlo: str) -> dict[str, tuple[int, int]]:
    """Collective -> how often a compiled program has it, and the bytes of all its results on one device.

    Instructions are counted, so those of a loop's body once.
    """
    found: dict[str, tuple[int, int]] = {}
    for result, kind, is_async in re.findall(rf" = (.*?) ({'|'.join(_COLLECTIVES)})(-start)?\(", hlo):
        sizes = [
            _BITS[dtype] * math.prod(int(n) for n in dims.split(",") if n) // 8
            for dtype, dims in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", result)
        ]
        count, total = found.get(kind, (0, 0))
        # What is begun has its operand in its result, too.
        found[kind] = count + 1, total + (max(sizes) if is_async else sum(sizes))
    return found


def link_seconds(exchanged: Mapping[str, tuple[int, int]], num_devices: int, bandwidth: float) -> float:
    """The least time of collectives around a ring of devices, each of which sends `bandwidth` bytes a second.

    An all-reduce is a reduce-scatter and an all-gather; the others pass a device's part on to all the rest.
    """
    rounds = {"all-reduce": 2.0}
    moved = sum(rounds.get(kind, 1.0) * total for kind, (_, total) in exchanged.items())
    return moved * (num_devices - 1) / num_devices / bandwidth


def _computations(hlo: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Computation -> (opcode, line) of its instructions, and the entry's name."""
    found: dict[str, list[tuple[str, str]]] = {}
    entry, body = "", found.setdefault("", [])
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif instruction := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(", line):
            body.append((instruction[1], line))
    return found, entry


def _callees(line: str) -> list[str]:
    """The computations that a while, conditional, call, async-start or fusion runs."""
    lists = re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", line)
    single = re.findall(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line)
    return single + [name.strip().lstrip("%") for names in lists for name in names.split(",")]
