"""What the interpreter takes on trust of the portable attention kernel."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


def registers_of_threads(layout, x: np.ndarray) -> np.ndarray:
    """x as the threads of a warpgroup hold it: [registers, warps * lanes * values of a register]."""
    for tile in layout.tiling.tiles:
        outer, tiled = x.shape[: -len(tile)], x.shape[-len(tile) :]
        x = x.reshape(*outer, *(n for size, t in zip(tiled, tile, strict=True) for n in (size // t, t)))
        first = len(outer)
        x = x.transpose(*range(first), *range(first, x.ndim, 2), *range(first + 1, x.ndim, 2))
    of_a_thread = [d for d in (*layout.warp_dims, *layout.lane_dims, layout.vector_dim) if isinstance(d, int)]
    size = np.prod([x.shape[d] for d in of_a_thread])
    return np.moveaxis(x, of_a_thread, range(-len(of_a_thread), 0)).reshape(-1, size)


@pytest.mark.parametrize("num_keys", [16, 32, 64])
def test_an_accumulator_and_a_left_operand_are_the_same_registers(num_keys: int):
    x = np.arange(64 * num_keys).reshape(64, num_keys)
    accumulator, operand = (
        registers_of_threads(layout(jnp.bfloat16).to_mgpu(), x)
        for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS)
    )
    np.testing.assert_array_equal(accumulator, operand)
