"""No wait, arrive or commit of the GPU kernels can go without a test that fails."""

import functools

import jax
import pytest
from mutations import mutations, verdict
from test_attention import GPUS, Case, make_batch, on_tensor_cores, scale_of

# Every loop and branch of a kernel, and every stage of shared memory used again: masked and unmasked stages, values
# to clear at both ends of a window, work items that follow another in a thread block, one row split and one whole.
TILES, SPLITS = "kernel 0", "kernel 1"
CASES = [
    (TILES, Case("tiles", [(70, 900), (40, 40), (2, 5)], heads=(1, 1), head_dim=128, block_size=64, window=800)),
    (
        TILES,
        Case(
            "tiles, D 256",
            [(70, 500), (40, 90), (40, 40), (2, 5)],
            heads=(1, 1),
            head_dim=256,
            block_size=64,
            window=400,
        ),
    ),
    (SPLITS, Case("splits", [(1, 1300), (1, 700), (1, 90), (1, 5)], heads=(1, 1), head_dim=128, block_size=64)),
    (
        TILES,
        Case(
            "tiles, 8 bits",
            [(70, 900), (40, 90), (40, 40), (2, 5)],
            heads=(1, 1),
            head_dim=128,
            block_size=64,
            window=800,
            kv_scales=(0.5, 0.5),
        ),
    ),
    (
        SPLITS,
        Case(
            "splits, 8 bits",
            [(1, 1300), (1, 700), (1, 90), (1, 50), (1, 5)],
            heads=(1, 1),
            head_dim=128,
            block_size=64,
            kv_scales=(0.5, 0.5),
        ),
    ),
]


@pytest.mark.parametrize("backend", GPUS)
@pytest.mark.parametrize(("kernel", "case"), CASES, ids=[case.name for _, case in CASES])
def test_no_synchronisation_is_superfluous_or_untested(kernel: str, case: Case, backend: str):
    case = on_tensor_cores(case)
    batch = make_batch(case, backend)
    attend = functools.partial(GPUS[backend].ragged_attention, scale=scale_of(case), window=case.window)
    reference, mutants = mutations(jax.jit(functools.partial(attend, **batch.scales)), *batch.args)
    mutants = [(site, mutant) for site, mutant in mutants if site.startswith(kernel)]
    assert mutants
    assert [site for site, mutant in mutants if verdict(mutant, reference, atol=1e-2) is None] == []
