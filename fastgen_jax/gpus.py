"""What a GPU is, in the figures that compiling for it and sizing a model on it need."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """What a compute capability fixes of an SM; shared memory in bytes."""

    shared_per_sm: int
    shared_per_block: int
    registers_per_sm: int
    threads_per_sm: int
    float32_lanes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Arithmetic Instructions".
LIMITS = {
    (8, 0): Limits(167_936, 166_912, 65_536, 2048, 64),
    (8, 6): Limits(102_400, 101_376, 65_536, 1536, 128),
    (8, 9): Limits(102_400, 101_376, 65_536, 1536, 128),
    (9, 0): Limits(233_472, 232_448, 65_536, 2048, 128),
    (10, 0): Limits(233_472, 232_448, 65_536, 2048, 128),
}


LINKS = {
    "NVIDIA A100-SXM4-80GB": 300e9,
    "NVIDIA H100 80GB HBM3": 450e9,
    "NVIDIA H200": 450e9,
    "NVIDIA B200": 900e9,
}
"""NVLink, bytes a second in one direction, half of the datasheets' figure; by the driver's name of the GPU."""

PCIE_LINK = 32e9
"""PCIe 4.0 x16, bytes a second in one direction: of every GPU without an NVLink above."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    name: as the driver says it.
    capability: compute capability, (major, minor), one of `LIMITS`.
    num_sms: streaming multiprocessors.
    clock_ghz: boost clock.
    l2_bytes: L2 cache.
    memory_bytes: what CUDA reports as the device's memory, which is less than the datasheet rounds it to.
    bandwidth_gb_s: of the memory, in 10^9 bytes a second.
    bf16_tflops, fp16_tflops: of the tensor cores, dense, accumulating in float32, in 10^12 operations a second.
    source: where the figures come from.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    bandwidth_gb_s: float
    bf16_tflops: float
    fp16_tflops: float
    source: str

    @property
    def limits(self) -> Limits:
        return LIMITS[self.capability]

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bandwidth_gb_s * 1e9

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second to another GPU of the host, in one direction."""
        return LINKS.get(self.name, PCIE_LINK)

    def flops(self, dtype: str) -> float:
        """Operations a second of matmuls: tensor cores for the 16-bit dtypes; true float32 has none."""
        if dtype == "float32":
            return self.num_sms * self.limits.float32_lanes * 2 * self.clock_ghz * 1e9
        return {"bfloat16": self.bf16_tflops, "float16": self.fp16_tflops}[dtype] * 1e12


# SMs, clock, L2 and memory: what the CUDA driver reports (for all but the two Ada chips also in OpenXLA's
# xla/backends/gpu/target_config/specs). Bandwidth and tensor TFLOP/s: NVIDIA's documents named in `source`; where
# a datasheet gives the figure with sparsity, half of it.
GPUS = {
    "a100-80": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        num_sms=108,
        clock_ghz=1.41,
        l2_bytes=41_943_040,
        memory_bytes=85_100_068_864,
        bandwidth_gb_s=2039,
        bf16_tflops=312,
        fp16_tflops=312,
        source="NVIDIA A100 80GB datasheet (SXM); A100 whitepaper",
    ),
    "a6000": Gpu(
        name="NVIDIA RTX A6000",
        capability=(8, 6),
        num_sms=84,
        clock_ghz=1.80,
        l2_bytes=6_291_456,
        memory_bytes=51_002_736_640,  # 47.5 GiB, by public out-of-memory messages; nominal are 48
        bandwidth_gb_s=768,
        bf16_tflops=154.8,
        fp16_tflops=154.8,
        source="NVIDIA Ampere GA102 whitepaper, appendix A (309.7 TFLOP/s with sparsity)",
    ),
    "l4": Gpu(
        name="NVIDIA L4",
        capability=(8, 9),
        num_sms=58,
        clock_ghz=2.04,
        l2_bytes=50_331_648,
        memory_bytes=23_670_554_624,
        bandwidth_gb_s=300,
        bf16_tflops=121,
        fp16_tflops=121,
        source="NVIDIA L4 datasheet (242 TFLOP/s with sparsity)",
    ),
    "rtx4090": Gpu(
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        num_sms=128,
        clock_ghz=2.52,
        l2_bytes=75_497_472,
        memory_bytes=25_393_692_672,
        bandwidth_gb_s=1008,
        bf16_tflops=165.2,
        fp16_tflops=165.2,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A",
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        num_sms=132,
        clock_ghz=1.98,
        l2_bytes=52_428_800,
        memory_bytes=84_942_979_072,
        bandwidth_gb_s=3350,
        bf16_tflops=989.4,
        fp16_tflops=989.4,
        source="NVIDIA H100 datasheet (SXM); H100 whitepaper",
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        num_sms=132,
        clock_ghz=1.98,
        l2_bytes=52_428_800,
        memory_bytes=150_109_106_995,  # 139.80 GiB, by public out-of-memory messages; nominal are 141
        bandwidth_gb_s=4800,
        bf16_tflops=989.4,
        fp16_tflops=989.4,
        source="NVIDIA H200 datasheet (SXM)",
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        num_sms=148,
        clock_ghz=1.965,
        l2_bytes=132_644_864,
        memory_bytes=191_514_411_008,
        bandwidth_gb_s=8000,
        bf16_tflops=2250,
        fp16_tflops=2250,
        source="NVIDIA DGX B200 datasheet, an eighth of it (36 PFLOP/s with sparsity, 64 TB/s)",
    ),
}


def get_gpu(name: str) -> Gpu:
    """A GPU of `GPUS`, or one described by a .json file that has every field of `Gpu`.

    Raises ValueError with one sentence.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if not name.endswith(".json"):
        close = _closest(name.lower())
        hint = f"did you mean {close!r}? " if close else ""
        raise ValueError(
            f"gpu={name!r} is not known; {hint}the GPUs are {', '.join(GPUS)}, or a .json file that describes one"
        )
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"gpu={name!r} does not exist; give a .json file, or one of {', '.join(GPUS)}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a JSON {type(fields).__name__}, not an object")
    return _from_fields(str(path), fields)


def _closest(name: str) -> str | None:
    """The GPU that may be meant: the first whose name goes on from this one, else one spelled alike."""
    longer = [gpu for gpu in GPUS if name and gpu.startswith(name)]
    return next(iter(longer or difflib.get_close_matches(name, GPUS, n=1)), None)


def _from_fields(path: str, fields: Mapping[str, Any]) -> Gpu:
    kinds = {field.name: field.type for field in dataclasses.fields(Gpu)}
    if unknown := sorted(set(fields) - set(kinds)):
        raise ValueError(f"{path} has the unknown field {unknown[0]!r}; the fields are {', '.join(kinds)}")
    if missing := sorted(set(kinds) - set(fields)):
        raise ValueError(f"{path} lacks the field {missing[0]!r}; the fields are {', '.join(kinds)}")
    capability = fields["capability"]
    if not _is_pair_of_ints(capability) or tuple(capability) not in LIMITS:
        known = ", ".join(str(list(pair)) for pair in LIMITS)
        raise ValueError(f"capability={capability!r} in {path} is not supported; it must be one of {known}")
    for name, kind in kinds.items():
        value = fields[name]
        if kind is str and not isinstance(value, str):
            raise ValueError(f"{name}={value!r} in {path} must be a string")
        if kind in (int, float):
            _check_number(path, name, value, whole=kind is int)
    return Gpu(**{**fields, "capability": tuple(capability)})


def _is_pair_of_ints(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [int, int]


def _check_number(path: str, name: str, value: Any, *, whole: bool) -> None:
    """Above 0, and what fits into XLA's description of a GPU: 64 bits for sizes, 32 for the rest. NaN is neither."""
    bits = 63 if name.endswith("_bytes") else 31
    wanted: Any = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted) or not 0 < value < 2**bits:
        kind = "whole number" if whole else "number"
        raise ValueError(f"{name}={value!r} in {path} must be a {kind} above 0 and below 2**{bits}")
