"""Ragged paged attention on NVIDIA GPUs: Pallas kernels through Mosaic GPU.

One launch takes the rows of several query tokens in tiles of queries, a second the rows of one query token in
splits of their keys, and a third combines the splits of a row (Dynamic SplitKV). Each launch walks a work list
that is worked out on the device (`work`), so that any mix of rows runs the same program.

Pools are [N, K, B, D], so that a block of one KV head is one contiguous box to copy, with D padded to a multiple
of 32 (80 becomes 96).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fastgen_jax.kernels import mosaic_gpu_hopper, mosaic_gpu_portable, work
from fastgen_jax.kernels.fp8 import FP8, to_stored
from fastgen_jax.kernels.mosaic_gpu_combine import combine
from fastgen_jax.kernels.mosaic_gpu_common import LSE_COLUMNS, Config

NAME = "mosaic_gpu"
DEFAULT_BLOCK_SIZE = 64
HEADS_AXIS = 1
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
MAX_GROUP = 16
"""Query heads of a KV head that a launch takes; of more, it takes equal parts one after the other."""
MAX_EXTRA_WAVES = 8
"""Splits beyond one a row, in waves of one work item for each SM, that a launch has room for."""


@dataclass(frozen=True)
class Target:
    """What of a GPU decides how its kernels are built.

    capability: CUDA compute capability, (9, 0) for Hopper. num_sms: its streaming multiprocessors.
    smem_bytes: shared memory that one thread block may use.
    """

    capability: tuple[int, int]
    num_sms: int
    smem_bytes: int

    @classmethod
    def of_device(cls, device: jax.Device) -> "Target":
        """That of a GPU which JAX sees."""
        major, minor = device.compute_capability.split(".")
        capability = int(major), int(minor)
        return cls(capability, device.core_count, SMEM_BYTES.get(capability, 0))


SMEM_BYTES = {(8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448}
"""Shared memory a thread block may use, by compute capability (CUDA C++ programming guide, table 30): also the
capabilities there are kernels for."""


@dataclass(frozen=True)
class MosaicGpu:
    """The backend for one kind of GPU.

    target: None where there is no GPU. interpret: Mosaic GPU's `InterpretGPUParams`, to run on a CPU, for tests.
    """

    target: Target | None
    interpret: Any = None

    NAME = NAME
    DEFAULT_BLOCK_SIZE = DEFAULT_BLOCK_SIZE
    HEADS_AXIS = HEADS_AXIS

    def supported(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: DTypeLike,
        platform: str,
        kv_dtype: DTypeLike | None = None,
    ) -> str | None:
        """None if it can run this, else the reason why not."""
        if self.target is None or (platform != "gpu" and self.interpret is None):
            return f"it needs an NVIDIA GPU, and this is for platform={platform!r}"
        if self.target.capability not in SMEM_BYTES:
            has, *known = ("{}.{}".format(*c) for c in (self.target.capability, *SMEM_BYTES))
            return f"there are no kernels for compute capability {has}, only for {', '.join(known)}"
        if jnp.dtype(dtype).name not in DTYPES:
            return f"its kernels are for {' and '.join(DTYPES)}, not {jnp.dtype(dtype).name}, which runs on 'xla'"
        if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
            return f"head_dim={head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
        if block_size not in BLOCK_SIZES:
            return f"block_size={block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}"
        if kv_dtype is not None and jnp.dtype(kv_dtype) == FP8:
            sizes = (dtype, head_dim, num_heads, num_kv_heads, block_size)
            if any(self.config(splits, *sizes, kv_dtype=FP8).tile_columns < 32 for splits in (False, True)):
                chip = "{}.{}".format(*self.target.capability)
                return f"block_size={block_size} with head_dim={head_dim} is not for K and V of 8 bits on a {chip}"
        return None

    def config(
        self,
        splits: bool,
        dtype: DTypeLike,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        *,
        kv_dtype: DTypeLike | None = None,
        scale: float = 1.0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Config:
        """The variant of the kernel for tiles or for splits that a model gets.

        kv_dtype: of the pools; None is `dtype`.
        """
        assert self.target is not None
        return self.kernels.config(
            self.target.capability,
            self.target.num_sms,
            self.target.smem_bytes,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype is None else kv_dtype,
            head_dim=padded_dim(head_dim),
            group=part_of(num_heads // num_kv_heads),
            block_size=block_size,
            scale=scale,
            window=window,
            softcap=softcap,
            splits=splits,
        )

    @property
    def kernels(self) -> ModuleType:
        """The module of this GPU's attention kernels."""
        assert self.target is not None
        return mosaic_gpu_hopper if self.target.capability == (9, 0) else mosaic_gpu_portable

    def split_limits(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: DTypeLike,
        kv_dtype: DTypeLike | None = None,
    ) -> tuple[int, int] | None:
        """The thread blocks that read side by side, and how many splits beyond one a row a launch has room for."""
        assert self.target is not None
        config = self.config(True, dtype, head_dim, num_heads, num_kv_heads, block_size, kv_dtype=kv_dtype)
        return config.num_ctas, max_extra_splits(num_kv_heads, self.target.num_sms)

    def pool_shapes(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the K and the V pool."""
        shape = (num_blocks, num_kv_heads, block_size, padded_dim(head_dim))
        return shape, shape

    def pool_dims(self, k_pool: Array, v_pool: Array) -> tuple[int, int, int, int]:
        """(N, B, K, padded D) of pools made by `allocate`."""
        num_blocks, num_kv_heads, block_size, head_dim = k_pool.shape
        return num_blocks, block_size, num_kv_heads, head_dim

    def allocate(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[Array, Array]:
        """Empty K and V pools."""
        k_shape, v_shape = self.pool_shapes(num_blocks, block_size, num_kv_heads, head_dim)
        return jnp.zeros(k_shape, dtype), jnp.zeros(v_shape, dtype)

    def write_kv(
        self,
        k_pool: Array,
        v_pool: Array,
        k: Array,
        v: Array,
        slot_mapping: Array,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
    ) -> tuple[Array, Array]:
        """Put token t's k[t], v[t] [K, D] at slot_mapping[t] = block * B + offset; other slots are dropped.

        In place when the pools are donated.
        """
        num_blocks, block_size, _, _ = self.pool_dims(k_pool, v_pool)
        # A negative index would count from the end.
        block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
        offset = slot_mapping % block_size

        def write(pool: Array, new: Array, scale: Array | None) -> Array:
            new = to_stored(_pad_dim(new, pool.shape[-1]), pool.dtype, scale)
            # Unique, so plain stores: otherwise they are atomic.
            return pool.at[block, :, offset, :].set(new, mode="drop", unique_indices=True)

        return write(k_pool, k, k_scale), write(v_pool, v, v_scale)

    # One trace and one lowering serve all layers of a kind.
    @partial(jax.jit, static_argnames=("self", "scale", "window", "softcap"))
    def ragged_attention(
        self,
        q: Array,
        k_pool: Array,
        v_pool: Array,
        cu_q_lens: Array,
        kv_lens: Array,
        block_tables: Array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        num_splits: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
    ) -> Array:
        """Attention of each query token over its sequence: `fastgen_jax.kernels.ragged_attention`'s contract."""
        assert self.target is not None
        num_tokens, num_heads, head_dim = q.shape
        _, num_kv_heads, block_size, pool_dim = k_pool.shape
        group, kernels = num_heads // num_kv_heads, self.kernels
        if group > MAX_GROUP:
            attend = partial(
                self.ragged_attention, k_pool=k_pool, v_pool=v_pool, cu_q_lens=cu_q_lens, kv_lens=kv_lens,
                block_tables=block_tables, scale=scale, window=window, softcap=softcap, num_splits=num_splits,
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
            return _in_parts(attend, q, num_kv_heads)
        sizes = (q.dtype, head_dim, num_heads, num_kv_heads, block_size)
        configure = partial(self.config, kv_dtype=k_pool.dtype, scale=scale, window=window, softcap=softcap)
        # [K, T * G, D]: a tile of queries and the heads that share its keys are rows that lie together. The rows
        # behind the end are what the last tile may read beyond it.
        q = _pad_dim(q.reshape(num_tokens, num_kv_heads, group, head_dim), pool_dim)
        q = q.swapaxes(0, 1).reshape(num_kv_heads, num_tokens * group, pool_dim)
        q = jnp.pad(q, ((0, 0), (0, kernels.QUERY_PADDING), (0, 0)))
        kv_scales = None
        if k_pool.dtype == FP8:
            kv_scales = jnp.stack([jnp.float32(1) if one is None else one for one in (k_scale, v_scale)])
        given = (q, k_pool, v_pool, kv_scales)

        with jax.named_scope("tiles"):
            config = configure(False, *sizes)
            tiles = work.tiles(
                cu_q_lens, kv_lens, num_tokens, tile_tokens=config.tile_tokens, block_size=block_size, window=window
            )
            out_shape = (num_tokens, num_kv_heads, group, config.out_dim)
            out = kernels.launch(
                config, *given, tiles, block_tables,
                out_type=jax.ShapeDtypeStruct(out_shape, q.dtype), interpret=self.interpret,
            )  # fmt: skip
        out_ref = jax.new_ref(out)
        with jax.named_scope("splits"):
            max_items = len(kv_lens) + max_extra_splits(num_kv_heads, self.target.num_sms)
            splits = work.splits(
                cu_q_lens, kv_lens, num_splits, max_items=max_items, block_size=block_size, window=window
            )
            partials = (
                jax.ShapeDtypeStruct((max_items, *out_shape[1:]), jnp.float32),
                jax.ShapeDtypeStruct((max_items, num_kv_heads, LSE_COLUMNS), jnp.float32),
            )
            partial_out, partial_lse = kernels.launch(
                configure(True, *sizes), *given, splits.work, block_tables, out_ref,
                out_type=partials, interpret=self.interpret,
            )  # fmt: skip
        with jax.named_scope("combine"):
            combine(partial_out, partial_lse, splits.rows, splits.num_rows, out_ref, interpret=self.interpret)
        return out_ref[...][..., :head_dim].reshape(num_tokens, num_heads, head_dim)


def here() -> MosaicGpu:
    """The backend for the GPU that JAX runs on, or one that says why it cannot run."""
    device = jax.local_devices()[0]
    return MosaicGpu(Target.of_device(device) if device.platform == "gpu" else None)


def max_extra_splits(num_kv_heads: int, num_sms: int) -> int:
    """How many splits beyond one a row a launch has room for."""
    return math.ceil(MAX_EXTRA_WAVES * num_sms / num_kv_heads)


def part_of(group: int) -> int:
    """How many of `group` query heads a launch takes: the most that make equal parts, the last one padded."""
    return -(-group // -(-group // MAX_GROUP))


def _in_parts(attend: Callable[[Array], Array], q: Array, num_kv_heads: int) -> Array:
    """Attention of q [T, H, D] by that of `part_of` the query heads of each KV head at a time."""
    num_tokens, _, head_dim = q.shape
    q_heads = q.reshape(num_tokens, num_kv_heads, -1, head_dim)
    group = q_heads.shape[2]
    size = part_of(group)
    q_heads = jnp.pad(q_heads, ((0, 0), (0, 0), (0, -group % size), (0, 0)))
    outs = []
    for first in range(0, group, size):
        part = q_heads[:, :, first : first + size].reshape(num_tokens, num_kv_heads * size, head_dim)
        outs.append(attend(part).reshape(num_tokens, num_kv_heads, size, head_dim))
    return jnp.concatenate(outs, axis=2)[:, :, :group].reshape(q.shape)


def padded_dim(head_dim: int) -> int:
    """D in the pool: shared memory is swizzled in rows of 64 bytes."""
    return -(-head_dim // 32) * 32


def _pad_dim(x: Array, head_dim: int) -> Array:
    """x [.., D] with zeros behind, up to `head_dim`."""
    missing = head_dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
