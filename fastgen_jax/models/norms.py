"""Norms, of hidden states and of the heads of queries and keys."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from fastgen_jax.sharding import WHOLE, Shards


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, the division in float32 (arXiv 1910.07467).

    offset: what the checkpoint's scale has to be added to. axis: the logical axis of x's last.
    """

    eps: float
    offset: float = 0.0
    axis: str = "embed"

    @nn.compact
    def __call__(self, x: Array, mean: Array | None = None) -> Array:
        """mean: `mean_square` of x where x is a part of what is normalised."""
        ones = nn.with_partitioning(nn.initializers.ones, (self.axis,))
        scale = _beside(self.param("scale", ones, (x.shape[-1],)), x)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt((mean_square(x) if mean is None else mean) + self.eps)
        if self.offset:  # added in float32: bfloat16 has few digits near 1
            return (y * (self.offset + scale.astype(jnp.float32))).astype(x.dtype)
        return y.astype(x.dtype) * scale


class LayerNorm(nn.Module):
    """(x - mean) / std * scale + bias over the last axis, in float32.

    affine: whether there are scale and bias. use_bias: whether there is a bias. each_head: x is [T, H, D], and every
    head has a scale of its own. offset: what the checkpoint's scale has to be added to.
    """

    eps: float = 1e-5
    affine: bool = True
    use_bias: bool = True
    each_head: bool = False
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(mean_square(y) + self.eps)
        if self.affine:
            shape, axes = (x.shape[-2:], ("heads", "embed")) if self.each_head else (x.shape[-1:], ("embed",))
            scale = self.param("scale", nn.with_partitioning(nn.initializers.ones, axes), shape)
            y = y * (self.offset + _beside(scale, y).astype(jnp.float32))
            if self.use_bias:
                y = y + _beside(self.param("bias", nn.with_partitioning(nn.initializers.zeros, axes), shape), y)
        return y.astype(x.dtype)


def mean_square(x: Array) -> Array:
    """float32 [..., 1]."""
    y = x.astype(jnp.float32)
    return jnp.mean(y * y, axis=-1, keepdims=True)


def _beside(weight: Array, x: Array) -> Array:
    """`weight` with as many axes as x."""
    return jnp.expand_dims(weight, range(x.ndim - weight.ndim))


NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": RMSNorm,
    "rms, less 1": partial(RMSNorm, offset=1.0),
    "layer": LayerNorm,
    "layer, less 1": partial(LayerNorm, offset=1.0),
    "layer, no bias": partial(LayerNorm, use_bias=False),
    "layer, no weights": partial(LayerNorm, affine=False),
}
"""The norms of hidden states, each to be called with its eps."""


HEAD_NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": RMSNorm,
    "rms, less 1": partial(RMSNorm, offset=1.0),
    "rms, all heads": partial(RMSNorm, axis="heads"),
    "layer": LayerNorm,
    "layer, each head": partial(LayerNorm, use_bias=False, each_head=True),
    "layer, each head apart": partial(LayerNorm, use_bias=False, each_head=True),
}
"""The norms of queries and keys: of each head, with one scale for all or one each (which the checkpoint has in one
tensor, or apart), or of all heads as one vector."""


def norm_heads(kind: str, eps: float, queries: Array, keys: Array, shards: Shards = WHOLE) -> tuple[Array, Array]:
    """Queries [T, H, D] and keys [T, K, D] through the modules `q_norm` and `k_norm`, which it makes.

    Of all heads as one vector, shards exchange two numbers a token.
    """
    q_norm, k_norm = (HEAD_NORMS[kind](eps, name=name) for name in ("q_norm", "k_norm"))
    if kind != "rms, all heads":
        return q_norm(queries), k_norm(keys)
    q, k = (x.reshape(x.shape[0], -1) for x in (queries, keys))
    means = shards.mean(jnp.concatenate((mean_square(q), mean_square(k)), axis=-1), "heads")
    q, k = q_norm(q, means[:, :1]), k_norm(k, means[:, 1:])
    return q.reshape(queries.shape), k.reshape(keys.shape)
