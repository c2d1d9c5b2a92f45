"""Attention over a paged KV pool for ragged batches, and the backends that run it.

A backend owns the pool's layout, its allocation, the write of new K and V and the attention over it; `Backend` is
what it offers. This package imports JAX only, so it serves outside the engine too.
"""

import functools
import importlib
import logging
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fastgen_jax.kernels.backend import Backend
from fastgen_jax.kernels.fp8 import FP8

BACKENDS = ("mosaic_gpu", "xla", "reference")  # the best first
DTYPES = ("float32", "bfloat16", "float16")

logger = logging.getLogger(__name__)


def get_backend(name: str) -> Backend:
    """The backend called `name`; "mosaic_gpu" for the GPU that JAX runs on."""
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} does not exist; the backends are {', '.join(BACKENDS)}")
    module = importlib.import_module(f"{__name__}.{name}")
    return cast(Backend, module.here() if name == "mosaic_gpu" else module)


def choose_backend(
    name: str | None = None,
    *,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int | None = None,
    dtype: DTypeLike,
    kv_dtype: DTypeLike | None = None,
    platform: str | None = None,
) -> Backend:
    """The backend called `name`, or the best that can run this model; never another than the one named.

    block_size: None is each backend's own default. dtype: of queries and output. kv_dtype: of the pools, `FP8` or the
    same; None is the same. platform: "cpu" or "gpu"; None is JAX's default.
    """
    sizes = {"head_dim": head_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for size_name, size in (sizes if block_size is None else sizes | {"block_size": block_size}).items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{size_name}={size!r} is out of range; it must be a whole number from 1")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    _check_dtype("dtype", dtype)
    if kv_dtype is not None and jnp.dtype(kv_dtype) not in (FP8, jnp.dtype(dtype)):
        raise ValueError(f"kv_dtype is {jnp.dtype(kv_dtype)}; it must be {FP8} or dtype, {jnp.dtype(dtype)}")
    refusals: list[str] = []
    platform = platform or jax.default_backend()
    for candidate in BACKENDS if name is None else (name,):
        if name is None and candidate == "mosaic_gpu" and platform != "gpu":  # its kernels are slow to import
            refusals.append(f"backend={candidate!r} cannot run: it needs an NVIDIA GPU, and this is {platform!r}")
            continue
        backend = get_backend(candidate)
        reason = backend.supported(
            head_dim,
            num_heads,
            num_kv_heads,
            backend.DEFAULT_BLOCK_SIZE if block_size is None else block_size,
            dtype,
            platform,
            kv_dtype,
        )
        if reason is None:
            _log_choice(candidate, "; ".join(refusals))
            return backend
        refusals.append(f"backend={candidate!r} cannot run: {reason}")
    raise ValueError("; ".join(refusals))


@functools.cache
def _log_choice(name: str, refusals: str) -> None:
    """Say which backend runs and why no better one does, once each."""
    logger.info("attention runs on backend=%r%s", name, f" ({refusals})" if refusals else "")


def ragged_attention(
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
    backend: str | None = None,
) -> Array:
    """Causal attention of a ragged batch of query tokens over a paged KV pool; a building block of its own.

    q: [T, H, D], float32, bfloat16 or float16; the pools have the same dtype, or both are float8_e4m3fn.
    k_pool, v_pool: the backend's own layout (`Backend.allocate`), the new tokens' K and V already written.
    cu_q_lens: int32 [S + 1], rising from 0; row s owns the tokens cu_q_lens[s] : cu_q_lens[s + 1], the last
        of its sequence. Unused rows at the end repeat the last value.
    kv_lens: int32 [S]; row s's sequence has kv_lens[s] tokens, its new ones included.
    block_tables: int32 [S, P]; position p of row s lives in block block_tables[s, p // B], offset p % B.
        Entries beyond the sequence, or wholly outside every query's window, may be anything.
    scale: multiplies q . k; more than 0.
    window: a query at position p sees keys p - window + 1 to p (Hugging Face's `sliding_window`); None is
        all.
    softcap: scores s become softcap * tanh(s / softcap) before masking; None is off.
    num_splits: int32 [S], into how many splits of its keys a GPU kernel cuts each row of one query (Dynamic
        SplitKV, `fastgen_jax.scheduler.split_plan`); None is kv_len // 512, at most 16. Changes no result.
    k_scale, v_scale: float32 [], of float8_e4m3fn pools: a stored number times it is the key's or the value's; None
        is 1. `Backend.write_kv` takes the same.
    backend: one of `BACKENDS`; None is the best whose layout the pools have.

    Returns [T, H, D] in q's dtype, zeros for tokens past cu_q_lens[-1]. Slots that no query sees and padding
    tokens may hold NaN: none of it reaches the result. Lengths are the caller's to keep right; they are
    values on the device and not checked.

    One sequence of 3 tokens in block 1, whose last 2 are new:

    >>> import jax.numpy as jnp
    >>> from fastgen_jax.kernels import choose_backend, ragged_attention
    >>> kv = choose_backend(head_dim=16, num_heads=4, num_kv_heads=2, block_size=8, dtype="float32")
    >>> pools = kv.allocate(num_blocks=4, block_size=8, num_kv_heads=2, head_dim=16, dtype="float32")
    >>> k = v = jnp.ones((3, 2, 16))
    >>> pools = kv.write_kv(*pools, k, v, slot_mapping=jnp.array([8, 9, 10]))
    >>> q = jnp.ones((2, 4, 16))
    >>> ragged_attention(q, *pools, jnp.array([0, 2]), jnp.array([3]), jnp.array([[1]]), scale=0.25).shape
    (2, 4, 16)
    """
    _check_rank("q", q, 3, "[T, H, D]")
    _check_rank("k_pool", k_pool, 4, "a backend's layout")
    _check_rank("v_pool", v_pool, 4, "a backend's layout")
    _check_dtype("q", q.dtype)
    if k_pool.dtype not in (q.dtype, FP8):
        raise ValueError(f"k_pool is {k_pool.dtype}; it must be q's dtype, {q.dtype}, or {FP8}")
    if v_pool.dtype != k_pool.dtype:
        raise ValueError(f"v_pool is {v_pool.dtype}; it must be k_pool's dtype, {k_pool.dtype}")
    for scale_name, kv_scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_kv_scale(scale_name, kv_scale, k_pool.dtype)
    _check_rows(cu_q_lens, kv_lens, block_tables)
    if num_splits is not None and (num_splits.shape, num_splits.dtype) != (kv_lens.shape, jnp.int32):
        raise ValueError(
            f"num_splits is {num_splits.dtype}{list(num_splits.shape)}; it must be int32{list(kv_lens.shape)}"
        )
    if not _is_positive(scale):
        raise ValueError(f"scale={scale!r} is out of range; it must be a number more than 0")
    if window is not None and (not isinstance(window, int) or not 1 <= window < 2**31):
        raise ValueError(f"window={window!r} is out of range; it must be at least 1, or None for no window")
    if softcap is not None and not _is_positive(softcap):
        raise ValueError(f"softcap={softcap!r} is out of range; it must be more than 0, or None for no cap")
    chosen = _choose_for(backend, q, k_pool, v_pool)
    return chosen.ragged_attention(
        q,
        k_pool,
        v_pool,
        cu_q_lens,
        kv_lens,
        block_tables,
        scale=scale,
        window=window,
        softcap=softcap,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _choose_for(name: str | None, q: Array, k_pool: Array, v_pool: Array) -> Backend:
    """The backend called `name`, or the best one, that can run q over pools of this shape."""
    _, num_heads, head_dim = q.shape
    refusals = []
    for candidate in BACKENDS if name is None else (name,):
        backend = get_backend(candidate)
        num_blocks, block_size, num_kv_heads, _ = backend.pool_dims(k_pool, v_pool)
        expected = backend.pool_shapes(num_blocks, block_size, num_kv_heads, head_dim)
        if (k_pool.shape, v_pool.shape) != expected:
            reason: str | None = (
                f"k_pool {k_pool.shape} and v_pool {v_pool.shape} do not have its layout for D={head_dim}, "
                f"such as {expected[0]} and {expected[1]}"
            )
        elif num_kv_heads < 1 or num_heads % num_kv_heads:
            reason = f"q's {num_heads} heads are not a multiple of the pools' {num_kv_heads}"
        else:
            platform = jax.default_backend()
            reason = backend.supported(head_dim, num_heads, num_kv_heads, block_size, q.dtype, platform, k_pool.dtype)
        if reason is None:
            return backend
        refusals.append(f"backend={candidate!r} cannot run: {reason}")
    raise ValueError("; ".join(refusals))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        found = str(dtype) if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        found = repr(dtype)
    if found not in DTYPES:
        raise ValueError(f"{name} is {found}; it must be one of {', '.join(DTYPES)}")


def _check_kv_scale(name: str, scale: Any, kv_dtype: Any) -> None:
    if scale is None:
        return
    if kv_dtype != FP8:
        raise ValueError(f"{name} is for pools of {FP8}; these are {kv_dtype}")
    if (getattr(scale, "shape", None), getattr(scale, "dtype", None)) != ((), jnp.float32):
        raise ValueError(f"{name} is {scale!r:.60}; it must be an array, float32[]")


def _check_rank(name: str, array: Array, rank: int, form: str) -> None:
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} is {type(array).__name__}; it must be an array, {form}")
    if len(array.shape) != rank:
        plural = "dimension" if rank == 1 else "dimensions"
        raise ValueError(f"{name} has shape {array.shape}; it must have {rank} {plural}, {form}")
    if 0 in array.shape:
        raise ValueError(f"{name} has shape {array.shape}; none of its dimensions may be 0")


def _check_rows(cu_q_lens: Array, kv_lens: Array, block_tables: Array) -> None:
    """Raise unless the three agree on S and are int32."""
    _check_rank("cu_q_lens", cu_q_lens, 1, "[S + 1]")
    _check_rank("kv_lens", kv_lens, 1, "[S]")
    _check_rank("block_tables", block_tables, 2, "[S, P]")
    num_rows = kv_lens.shape[0]
    if cu_q_lens.shape[0] != num_rows + 1:
        raise ValueError(
            f"cu_q_lens has {cu_q_lens.shape[0]} entries; it must have {num_rows + 1}, one more than kv_lens"
        )
    if block_tables.shape[0] != num_rows:
        raise ValueError(f"block_tables has {block_tables.shape[0]} rows; it must have {num_rows}, as kv_lens has")
    for name, array in (("cu_q_lens", cu_q_lens), ("kv_lens", kv_lens), ("block_tables", block_tables)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}; it must be int32")
