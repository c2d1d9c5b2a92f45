"""The layers that families are made of.

T tokens, S sequences, H query heads, K KV heads, D head dim, E embed, F MLP, V vocab.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from fastgen_jax.batch import RaggedBatch
from fastgen_jax.kernels import Backend
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.rope import rotate
from fastgen_jax.sharding import WHOLE, Shards

Params = dict[str, Any]
"""A nested dict of arrays, named as the checkpoint names its modules."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}

normal = nn.initializers.normal(0.02)


def activation(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; choose {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


_FEW_ROWS = 32  # beyond them `x_first` is faster in float32: docs/performance.md, "What was tried"


def matmul(x: Array, weight: Array, *, out_dtype: Any = None) -> Array:
    """x [T, E] times weight [F, E], -> [T, F]. A float32 model multiplies in true float32, not in a GPU's TF32."""
    dot = partial(
        jnp.einsum,
        precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )

    def weight_first(x: Array, weight: Array) -> Array:
        # The same product, which XLA:CPU computes faster for few rows. Without the barrier it would turn it round.
        return jax.lax.optimization_barrier(dot("fe,te->ft", weight, x)).T

    def x_first(x: Array, weight: Array) -> Array:
        return dot("te,fe->tf", x, weight)

    if weight.dtype == jnp.float32 and x.shape[0] > _FEW_ROWS:
        return x_first(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=weight_first, default=x_first)


class Linear(nn.Module):
    """x [T, E] -> [T, features]. The weight lies [out, in], as in the checkpoint.

    axes: the logical axes of out and in. features: of this shard, as x is. Where `axes` has the inputs cut, every
    shard gets the sum over all, unless it `adds_up` elsewhere.
    """

    features: int
    use_bias: bool = False
    out_dtype: Any = None
    axes: tuple[str, str] = ("embed", "embed")
    shards: Shards = WHOLE
    adds_up: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.with_partitioning(normal, self.axes), (self.features, x.shape[-1]))
        y = matmul(x, weight, out_dtype=self.out_dtype)
        if self.adds_up:
            y = self.shards.sum(y, self.axes[1])
        if self.use_bias:
            zeros = nn.with_partitioning(nn.initializers.zeros, self.axes[:1])
            y = y + self.param("bias", zeros, (self.features,))[None, :]
        return y


class Embed(nn.Module):
    """A table [num_embeddings, features], read by row, or multiplied with as tied output weights.

    axes: the logical axes of both. Where the rows are cut, a shard has `shards.local` of them.
    """

    num_embeddings: int
    features: int
    axes: tuple[str, str] = ("embed", "embed")
    shards: Shards = WHOLE

    def setup(self) -> None:
        self.rows = self.shards.local(self.num_embeddings, self.axes[0])
        table = nn.with_partitioning(normal, self.axes)
        self.embedding = self.param("embedding", table, (self.rows, self.features))

    def __call__(self, token_ids: Array) -> Array:
        if not self.shards.cuts(self.axes[0]):
            return jnp.take(self.embedding, token_ids, axis=0, mode="clip")
        row = token_ids - self.shards.index() * self.rows
        mine = (row >= 0) & (row < self.rows)
        found = jnp.take(self.embedding, row, axis=0, mode="clip")
        return self.shards.sum(jnp.where(mine[:, None], found, 0), self.axes[0])

    def attend(self, x: Array) -> Array:
        """x [S, E] -> float32 logits [S, V], of a shard those of its rows."""
        return matmul(x, self.embedding, out_dtype=jnp.float32)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, the division in float32 (arXiv 1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * scale[None, :]


class LayerNorm(nn.Module):
    """(x - mean) / std * scale + bias over the last axis, in float32; without `affine` no scale and bias."""

    eps: float = 1e-5
    affine: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        if self.affine:
            y = y * self.param("scale", nn.initializers.ones, (x.shape[-1],))[None, :]
            y = y + self.param("bias", nn.initializers.zeros, (x.shape[-1],))[None, :]
        return y.astype(x.dtype)


class Attention(nn.Module):
    """Self-attention over the paged pool: project, rotate, write the new K/V, attend, project back.

    `out_name` is what the checkpoint calls the output projection; `window` is in tokens, None is all.
    `qk_norm_eps`: of an RMSNorm on each head of q and k before they are rotated; None has none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    backend: Backend
    qkv_bias: bool = False
    out_bias: bool = False
    out_name: str = "o_proj"
    window: int | None = None
    qk_norm_eps: float | None = None
    shards: Shards = WHOLE

    @nn.compact
    def __call__(
        self, x: Array, batch: RaggedBatch, kv: LayerKV, cos_sin: tuple[Array, Array] | None
    ) -> tuple[Array, LayerKV]:
        d, shards = self.head_dim, self.shards
        h, k = shards.local(self.num_heads, "heads"), shards.local_kv_heads(self.num_kv_heads)
        with jax.named_scope("qkv"):
            project = Linear((h + 2 * k) * d, self.qkv_bias, axes=("heads", "embed"), shards=shards, name="qkv_proj")
            qkv = project(x).reshape(-1, h + 2 * k, d)
            queries, keys, values = jnp.split(qkv, (h, h + k), axis=1)
            if self.qk_norm_eps is not None:
                queries = RMSNorm(self.qk_norm_eps, name="q_norm")(queries.reshape(-1, d)).reshape(queries.shape)
                keys = RMSNorm(self.qk_norm_eps, name="k_norm")(keys.reshape(-1, d)).reshape(keys.shape)
        if cos_sin is not None:
            with jax.named_scope("rope"):
                queries, keys = rotate(queries, *cos_sin), rotate(keys, *cos_sin)
        with jax.named_scope("write_kv"):
            kv = self.backend.write_kv(*kv, keys, values, batch.slot_mapping)
        with jax.named_scope("attention"):
            out = self.backend.ragged_attention(
                queries,
                *kv,
                batch.cu_q_lens,
                batch.kv_lens,
                batch.block_tables,
                scale=d**-0.5,
                window=self.window,
                num_splits=batch.num_splits,
            )
        with jax.named_scope("out"):
            project = Linear(x.shape[-1], self.out_bias, axes=("embed", "heads"), shards=shards, name=self.out_name)
            return project(out.reshape(-1, h * d)), kv


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one matmul."""

    hidden: int
    act: str
    use_bias: bool = False
    shards: Shards = WHOLE
    adds_up: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden, shards = self.shards.local(self.hidden, "mlp"), self.shards
        gate_up = Linear(2 * hidden, self.use_bias, axes=("mlp", "embed"), shards=shards, name="gate_up_proj")
        down = Linear(
            x.shape[-1], self.use_bias, None, ("embed", "mlp"), shards, adds_up=self.adds_up, name="down_proj"
        )
        gate, up = jnp.split(gate_up(x), 2, axis=-1)
        return down(activation(self.act)(gate) * up)


class Layer(nn.Module):
    """The module `kind(*fields)`, traced and lowered once however many layers are made alike."""

    kind: Callable[..., nn.Module]
    fields: tuple[Any, ...]

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        if self.is_initializing():
            for name, value in _init(self.kind, self.fields, self.make_rng("params"), *args).items():
                self.put_variable("params", name, value)
        return _apply(self.kind, self.fields, self.variables["params"], *args)


@partial(jax.jit, static_argnums=(0, 1))
def _init(kind: Callable[..., nn.Module], fields: tuple[Any, ...], key: Array, *args: Any) -> Params:
    return kind(*fields, parent=None).init(key, *args)["params"]


@partial(jax.jit, static_argnums=(0, 1))
def _apply(kind: Callable[..., nn.Module], fields: tuple[Any, ...], params: Params, *args: Any) -> Any:
    return kind(*fields, parent=None).apply({"params": params}, *args)
