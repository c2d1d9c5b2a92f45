"""The product of activations with a quantised weight: which program computes it, on which GPU.

`mixed_xla` can run all of them, anywhere. On Hopper `mixed_hopper` has those whose weights have several scales a row,
which XLA does not fuse into its matmul.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fastgen_jax.kernels import mixed_xla

logger = logging.getLogger(__name__)

FIRST_WITH_FP8 = (8, 9)
"""The compute capability from which a GPU, and so XLA's matmul, converts fp8."""


@dataclass(frozen=True)
class Chip:
    """What of a GPU decides how a product is computed. capability: CUDA's, (9, 0) for Hopper.

    interpret: Mosaic GPU's `InterpretGPUParams`, to run the kernel on a CPU, for tests.
    """

    capability: tuple[int, int]
    num_sms: int
    interpret: Any = None

    @classmethod
    def here(cls) -> "Chip | None":
        """The GPU that JAX runs on; None on anything else."""
        device = jax.local_devices()[0]
        if device.platform != "gpu":
            return None
        major, minor = device.compute_capability.split(".")
        return cls((int(major), int(minor)), device.core_count)


def supported(
    chip: Chip | None, kind: str, num_outputs: int, num_inputs: int, num_groups: int, dtype: DTypeLike
) -> str | None:
    """None if the kernel for Hopper computes such a product, else the reason why XLA does."""
    if chip is None or chip.capability != (9, 0):
        has = "of no known GPU" if chip is None else "compute capability {}.{}".format(*chip.capability)
        return f"the kernel is for compute capability 9.0, and this is {has}"
    if num_groups == 1:
        return "with one scale a row, XLA converts the values within its matmul"
    from fastgen_jax.kernels import mixed_hopper  # slow to import

    return mixed_hopper.supported(kind, num_outputs, num_inputs, num_groups, dtype)


def product(
    x: Array, values: Array, scales: Array, zeros: Array | None, *, kind: str, chip: Chip | None, out_dtype: DTypeLike
) -> Array:
    """x [T, E] times the weight (value - zero) * scale [F, E], -> [T, F] in `out_dtype`; sums are in float32.

    chip: the GPU that this is for; None where that is not known.
    """
    num_outputs, num_groups = scales.shape
    reason = supported(chip, kind, num_outputs, x.shape[1], num_groups, x.dtype)
    if reason is not None or chip is None:
        if chip is not None and num_groups > 1:
            _log_refusal(str(reason))
        fuses = chip is None or kind != "fp8" or chip.capability >= FIRST_WITH_FP8
        return mixed_xla.product(x, values, scales, zeros, kind=kind, fuses=fuses).astype(out_dtype)
    from fastgen_jax.kernels import mixed_hopper

    y = mixed_hopper.product(x, values, scales, kind=kind, num_sms=chip.num_sms, interpret=chip.interpret)
    if zeros is not None:
        sums = jnp.sum(x.reshape(len(x), num_groups, -1), axis=2, dtype=jnp.float32)
        offsets = zeros.astype(jnp.float32) * scales.astype(jnp.float32)
        y = y - jnp.einsum("tg,fg->tf", sums, offsets, precision=jax.lax.Precision.HIGHEST)
    return y.astype(out_dtype)


@functools.cache
def _log_refusal(reason: str) -> None:
    """Say once why XLA multiplies with a weight whose rows have several scales."""
    logger.info("products with quantised weights of several scales a row run on XLA: %s", reason)
