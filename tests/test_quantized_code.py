"""Products with quantised weights, compiled for GPUs that are not here: no weight is written out in another form."""

import re
import runpy
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fastgen_jax import deviceless
from fastgen_jax.compiler_output import _BITS
from fastgen_jax.gpus import get_gpu
from fastgen_jax.kernels.mixed import Chip
from fastgen_jax.kernels.mixed_hopper import blocks_per_sm
from fastgen_jax.quantization import QuantizedMatrix, quantized_matmul

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing())),
]

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "mixed_kernel_table.py"))
DTYPES = {"int8": jnp.int8, "int4": jnp.uint8, "fp8": jnp.float8_e4m3fn}
SQUARE, DOWN = (4096, 4096), (4096, 11008)  # of Llama-2-7B
PRODUCTS = [(1, SQUARE), (16, SQUARE), (128, SQUARE), (512, SQUARE), (1, DOWN), (16, DOWN), (512, DOWN)]
KINDS = [("int8", False), ("int8", True), ("int4", False), ("int4", True), ("fp8", False)]
"""And whether there are zeros."""


@pytest.fixture(autouse=True, scope="module")
def no_cache_on_disk():
    """JAX writes programs for absent devices to its cache and cannot read them back."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def compiled(gpu: str, kind: str, group: int | None, zeros: bool, tokens: int, shape: tuple[int, int]):
    (outputs, inputs), chip = shape, Chip(get_gpu(gpu).capability, get_gpu(gpu).num_sms)
    groups = 1 if group is None else inputs // group
    matrix = QuantizedMatrix(
        jax.ShapeDtypeStruct((outputs, inputs // 2 if kind == "int4" else inputs), DTYPES[kind]),
        jax.ShapeDtypeStruct((outputs, groups), jnp.float32),
        jax.ShapeDtypeStruct((outputs, groups), jnp.int8) if zeros else None,
        kind,
        chip,
    )
    with jax.default_device(deviceless.compile_only_device(get_gpu(gpu))):
        return jax.jit(quantized_matmul).lower(jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16), matrix).compile()


def made(hlo: str) -> list[int]:
    """Bytes of each array that a kernel of a program writes; what is inside of one kernel is not written."""
    found, fused, counts = [], set(re.findall(r"\bcalls=%?([\w.\-]+)", hlo)), True
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            counts = head[1] not in fused
        elif result := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) (fusion|custom-call|dot|copy|convert)\(", line):
            for dtype, dims in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", result[1]) if counts else ():
                found.append(_BITS[dtype] * prod(int(n) for n in dims.split(",") if n) // 8)
    assert found
    return found


@pytest.mark.parametrize(("tokens", "shape"), PRODUCTS)
@pytest.mark.parametrize(
    ("gpu", "kind", "zeros"), [("h200", *kind) for kind in KINDS] + [("a100-80", *kind) for kind in KINDS[:-1]]
)
def test_with_one_scale_a_row_xla_converts_within_its_matmul(gpu, kind, zeros, tokens, shape):
    program = compiled(gpu, kind, None, zeros, tokens, shape)
    sums = 4 * 8 * tokens * shape[0]  # float32, of at most 8 splits of the inputs
    assert max(made(program.as_text())) <= sums
    assert program.memory_analysis().temp_size_in_bytes <= 1.1 * sums
    assert len(re.findall("__triton_nested_gemm_fusion", program.as_text())) == 1


@pytest.mark.parametrize(("tokens", "shape"), PRODUCTS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_with_several_the_kernel_for_hopper_does(kind, group, zeros, tokens, shape):
    program = compiled("h200", kind, group, zeros, tokens, shape)
    hlo = program.as_text()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', hlo)) == 1
    assert not re.search(r"= \S+ (copy|while)\(", hlo)
    values, scales = prod(shape) // (2 if kind == "int4" else 1), 4 * prod(shape) // group
    sums = 4 * 32 * max(tokens, 8) * shape[0]
    assert max(made(hlo)) <= max(min(sums, values), 4 * tokens * shape[0], scales)


@pytest.mark.parametrize(("tokens", "shape"), PRODUCTS)
@pytest.mark.parametrize(("kind", "group"), [(kind, group) for kind in DTYPES for group in (32, 128)] + [("fp8", None)])
def test_on_an_older_gpu_at_most_a_block_is_written_out(kind, group, tokens, shape):
    """As bfloat16, or as the sums of the groups, which are less than half of the weight would be."""
    program = compiled("a100-80", kind, group, False, tokens, shape)
    limit = max(8 << 20, prod(shape), 4 * tokens * shape[0])
    assert max(made(program.as_text())) <= limit
    assert program.memory_analysis().temp_size_in_bytes <= 1.2 * limit + 4 * tokens * shape[0]


def test_scales_of_16_bits_are_read_as_they_are():
    matrix = QuantizedMatrix(
        jax.ShapeDtypeStruct((4096, 2048), jnp.uint8), jax.ShapeDtypeStruct((4096, 32), jnp.float16), None, "int4",
        Chip((9, 0), 132),
    )  # fmt: skip
    with jax.default_device(deviceless.compile_only_device(get_gpu("h200"))):
        x = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
        hlo = jax.jit(quantized_matmul).lower(x, matrix).compile().as_text()
    assert not re.search(r"f32\[4096,32\]", hlo)


@pytest.fixture(scope="module")
def kernels() -> list[dict]:
    return SCRIPT["compile_variants"](SCRIPT["VARIANTS"])


def test_nothing_is_spilled_and_shared_memory_fits(kernels):
    for kernel in kernels:
        assert kernel["arch"] == "sm_90a" and kernel["name"] == "hopper_mixed_matmul"
        assert not kernel["spill_bytes"] and not kernel["stack_bytes"], kernel["variant"]
        assert kernel["blocks_per_sm"] >= kernel["counted_on"], kernel["variant"]


def test_values_come_by_tma_and_are_multiplied_from_registers(kernels):
    for kernel in kernels:
        assert {"HGMMA", "UTMALDG"} <= kernel["opcodes"].keys(), kernel["variant"]
        assert not {"HMMA", "LDGSTS"} & kernel["opcodes"].keys(), kernel["variant"]


def test_warpgroups_ask_for_no_more_registers_than_their_block_has(kernels):
    for kernel in kernels:
        if kernel["set_registers"]:
            producer, consumer = kernel["set_registers"]
            assert producer + 2 * consumer <= 3 * kernel["registers"], kernel["variant"]


def test_two_blocks_share_a_multiprocessor_where_tokens_are_few():
    assert (blocks_per_sm(128, 8), blocks_per_sm(128, 32)) == (2, 1)
