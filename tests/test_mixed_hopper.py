"""The kernel for Hopper that multiplies with quantised weights, in Mosaic GPU's interpreter, against NumPy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import extended_interpreter, interpret_params
from mutations import survivors
from test_quantization import close, some_matrix

from fastgen_jax.kernels import mixed_hopper
from fastgen_jax.kernels.mixed import Chip, supported
from fastgen_jax.quantization import KINDS, dequantize, quantized_matmul

E = 1024


@pytest.fixture(autouse=True)
def few_stages(monkeypatch):
    """So that each is used again."""
    monkeypatch.setattr(mixed_hopper, "MAX_STAGES", 2)


def chip(num_sms: int) -> Chip:
    return Chip((9, 0), num_sms, interpret_params())


INPUTS = {32: 1024, 64: 320, 128: 1024, 192: 576, 256: 1024}  # by group; not all multiples of 128
# Of one block of outputs and of several, of one warpgroup and of two, of one block of tokens and of two.
CASES = [
    pytest.param(kind, group, rows, tokens, num_sms, id=f"{kind}-{group}-{rows}x{tokens}-{num_sms}")
    for kind in KINDS
    for group, rows, tokens, num_sms in (
        (32, 64, 1, 1),
        (64, 256, 10, 1),
        (128, 192, 70, 8),
        (192, 64, 8, 1),
        (256, 128, 140, 3),
    )
]


@pytest.mark.parametrize(("kind", "group", "rows", "tokens", "num_sms"), CASES)
def test_the_product_is_that_of_the_weights_it_stands_for(kind, group, rows, tokens, num_sms):
    zeros = kind != "fp8"
    inputs = INPUTS[group]
    matrix, expected = some_matrix(kind, inputs // group, zeros=zeros, shape=(rows, inputs))
    matrix = replace(matrix, chip=chip(num_sms))
    x = np.random.default_rng(0).standard_normal((tokens, inputs)).astype(jnp.bfloat16)
    with extended_interpreter() as session:
        y = quantized_matmul(jnp.asarray(x), matrix, out_dtype=jnp.float32)
        close(y, x, expected, "float32")
    assert session.calls == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_16_bits(dtype):
    matrix, _ = some_matrix("int4", E // 128, zeros=True, shape=(64, E))
    matrix = replace(matrix, chip=chip(1), scales=matrix.scales.astype(dtype))
    x = np.random.default_rng(0).standard_normal((3, E)).astype(jnp.bfloat16)
    with extended_interpreter():
        y = quantized_matmul(jnp.asarray(x), matrix, out_dtype=jnp.float32)
        close(y, x, np.asarray(dequantize(matrix, jnp.float32)), "float32")


def test_no_synchronisation_is_superfluous_or_untested():
    matrix, _ = some_matrix("int8", E // 128, zeros=False, shape=(128, E))
    matrix = replace(matrix, chip=chip(1))
    x = np.random.default_rng(0).standard_normal((8, E)).astype(jnp.bfloat16)
    assert survivors(quantized_matmul, jnp.asarray(x), matrix, atol=1e-2) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 8, 16, 100, 512])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 11008), (22016, 4096), (12288, 4096), (64, 576)])
def test_every_stage_belongs_to_one_split(kind, tokens, outputs, inputs):
    for group in (32, 64, 192 if inputs == 576 else 128):
        c = mixed_hopper.config(kind, tokens, outputs, inputs, inputs // group, num_sms=132)
        stages = inputs // c.inputs
        assert (c.splits - 1) * c.stages_of_a_split < stages <= c.splits * c.stages_of_a_split
        assert c.tokens % 8 == 0 and outputs % c.rows == 0 and 1 <= c.num_stages <= c.stages_of_a_split


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chip": None}, "of no known GPU"),
        ({"chip": Chip((8, 0), 108)}, "compute capability 8.0"),
        ({"num_groups": 1}, "with one scale a row"),
        ({"dtype": "float32"}, "activations are float32"),
        ({"num_outputs": 100}, "[100, 4096] is not a multiple"),
        ({"num_inputs": 4128, "num_groups": 129}, "[4096, 4128] is not a multiple"),
        ({"num_inputs": 576, "num_groups": 6}, "96 of 576 inputs share a scale, and it takes 32, 64 or a multiple"),
        ({"num_groups": 256}, "16 of 4096 inputs share"),
    ],
)
def test_what_it_does_not_run_it_says(change, reason):
    shape = {"kind": "int4", "num_outputs": 4096, "num_inputs": 4096, "num_groups": 32, "dtype": "bfloat16"}
    assert supported(**({"chip": Chip((9, 0), 132)} | shape)) is None
    assert reason in str(supported(**({"chip": Chip((9, 0), 132)} | shape | change)))


def test_what_it_does_not_run_xla_does():
    matrix, expected = some_matrix("int4", 8, zeros=False, shape=(40, E))
    x = np.random.default_rng(0).standard_normal((3, E)).astype(jnp.bfloat16)
    close(jax.jit(quantized_matmul)(jnp.asarray(x), replace(matrix, chip=chip(132))), x, expected, "bfloat16")
