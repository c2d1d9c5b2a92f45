"""Stage `peaks`: what the device is, and the bandwidth and the operations a second that it reaches."""

from functools import partial

import jax
import jax.numpy as jnp

from fastgen_jax.bench.device.record import Stage
from fastgen_jax.bench.device.sizes import Sizes
from fastgen_jax.bench.device.timing import random_array, seconds_per_call


def measure(stage: Stage, sizes: Sizes) -> None:
    """Rows `device`, `copy` and `matmul`: what everything else is held against."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    stage.add(
        of="device",
        kind=device.device_kind,
        platform=device.platform,
        capability=str(getattr(device, "compute_capability", "")),
        num_sms=getattr(device, "core_count", 0),
        bytes_limit=stats.get("bytes_limit", 0),
        jax=jax.__version__,
        runtime=device.client.platform_version.splitlines()[-1],
    )
    copy = partial(jax.jit(jnp.negative), jnp.ones(sizes.copy_bytes // 2, jnp.bfloat16))
    stage.add(of="copy", bytes=2 * sizes.copy_bytes, seconds=seconds_per_call(copy, sizes.min_time_s))
    n = sizes.matmul_dim
    # Random and of steady size: a GPU's clock, and so its peak, depends on the bits that it multiplies.
    matmul = partial(jax.jit(jnp.matmul), random_array(0, (n, n)), random_array(1, (n, n), n**-0.5))
    stage.add(of="matmul", flops=2 * n**3, seconds=seconds_per_call(matmul, sizes.min_time_s))
