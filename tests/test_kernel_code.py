"""The GPU kernels as the assembler leaves them, for chips that are not here: what docs/kernels.md says of them."""

import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fastgen_jax import deviceless
from fastgen_jax.gpus import get_gpu
from fastgen_jax.kernels.mosaic_gpu import SMEM_BYTES, MosaicGpu, Target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing())),
]

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "kernel_table.py"))
EVERY = SCRIPT["VARIANTS"] + SCRIPT["NARROW"]
CHIPS = {"h200": "sm_90a", "a100-80": "sm_80", "b200": "sm_100a"}


@pytest.fixture(autouse=True, scope="module")
def no_cache_on_disk():
    """JAX writes programs for absent devices to its cache and cannot read them back."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def backend_for(chip: str) -> MosaicGpu:
    gpu = get_gpu(chip)
    return MosaicGpu(Target(gpu.capability, gpu.num_sms, gpu.limits.shared_per_block))


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[dict]]:
    """Records of the kernels of every variant, by chip."""
    compile_variants, variants = SCRIPT["compile_variants"], EVERY
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CHIPS, pool.map(lambda chip: compile_variants(chip, variants), CHIPS), strict=True))


@pytest.mark.parametrize("chip", CHIPS)
def test_nothing_is_spilled_and_shared_memory_fits(chip: str, kernels):
    assert {k["arch"] for k in kernels[chip]} == {CHIPS[chip]}
    assert len(kernels[chip]) == 2 * len(EVERY)
    bad = [k for k in kernels[chip] if k["spill_bytes"] or k["stack_bytes"]]
    # Addresses of barriers, three loads in a stage of 840 instructions or more.
    assert all(chip == "h200" and k["variant"].startswith("D 256") and "8-bit" in k["variant"] for k in bad)
    assert all(k["stack_bytes"] <= 16 for k in bad)
    limit = SMEM_BYTES[get_gpu(chip).capability]
    assert max(k["smem_bytes"] for k in kernels[chip]) <= limit
    assert min(k["blocks_per_sm"] for k in kernels[chip]) >= 1


@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernels_use_the_chips_own_instructions(chip: str, kernels):
    for kernel in kernels[chip]:
        has, lacks = {
            "h200": ({"HGMMA", "UTMALDG"}, {"HMMA", "LDGSTS"}),
            "a100-80": ({"HMMA", "LDGSTS.128", "LDSM"}, {"HGMMA", "UTMALDG", "LDGSTS"}),
            "b200": ({"HMMA", "UTMALDG", "LDSM"}, {"HGMMA", "LDGSTS"}),
        }[chip]
        if chip == "a100-80" and "D 80" in kernel["variant"] and "8-bit" in kernel["variant"]:
            has, lacks = has - {"LDGSTS.128"}, lacks - {"LDGSTS"}  # 32 keys are 24 bytes for each thread
        assert has <= kernel["opcodes"].keys(), (kernel["variant"], kernel["name"])
        assert not lacks & kernel["opcodes"].keys(), (kernel["variant"], kernel["name"])
        assert kernel["inner_mma"]


def test_warpgroups_ask_for_no_more_registers_than_their_block_has(kernels):
    """A warpgroup that does waits for ever: what it can get is what another of its block gave up."""
    tiles = [k for k in kernels["h200"] if k["set_registers"]]
    assert tiles
    for kernel in tiles:
        *others, consumer = kernel["set_registers"]
        warpgroups = kernel["threads"] // 128
        wanted = sum(others) + (warpgroups - len(others)) * consumer
        assert wanted <= warpgroups * kernel["registers"], kernel["variant"]


def test_as_many_thread_blocks_run_at_once_as_the_launch_counts_on(kernels):
    """The launch of a persistent kernel has num_ctas thread blocks; all of them must fit at once."""
    for chip in CHIPS:
        gpu, backend = get_gpu(chip), backend_for(chip)
        records = iter(kernels[chip])
        for variant in EVERY:
            for splits in (False, True):
                kernel = next(records)
                config = backend.config(
                    splits, variant.dtype, variant.head_dim, *variant.heads, variant.block_size,
                    window=variant.window, softcap=variant.softcap, kv_dtype=variant.kv_dtype,
                )  # fmt: skip
                assert kernel["blocks_per_sm"] * gpu.num_sms >= config.num_ctas, (kernel["variant"], kernel["name"])


@pytest.mark.parametrize("chip", CHIPS)
def test_a_few_variants_compile_without_spills(chip: str):
    """What `make oldest` runs of this file."""
    variants = [*(SCRIPT["VARIANTS"][i] for i in (1, 6)), SCRIPT["NARROW"][1]]
    kernels = SCRIPT["compile_variants"](chip, variants)
    assert len(kernels) == 2 * len(variants)
    assert not any(k["spill_bytes"] or k["stack_bytes"] for k in kernels)


@pytest.mark.parametrize("chip", ["h200", "a100-80"])
def test_attention_compiles_for_any_number_of_tokens(chip: str):
    """The last bucket is whatever the token budget is."""
    backend = backend_for(chip)
    pool, _ = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in backend.pool_shapes(10, 64, 3, 80))
    rows = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8,), (7,), (7, 5)))
    q = jax.ShapeDtypeStruct((509, 9, 80), jnp.bfloat16)
    with jax.default_device(deviceless.compile_only_device(get_gpu(chip))):
        compiled = (
            jax.jit(lambda *args: backend.ragged_attention(*args, scale=0.1)).lower(q, pool, pool, *rows).compile()
        )
    assert len(re.findall(r" custom-call\(", compiled.as_text())) == 3
