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
from fastgen_jax.kernels.fp8 import FP8
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.norms import norm_heads
from fastgen_jax.models.rope import rotate
from fastgen_jax.quantization import QuantizedMatrix, quantized_matmul
from fastgen_jax.sharding import WHOLE, Shards

Params = dict[str, Any]
"""A nested dict of arrays, named as the checkpoint names its modules."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_fast": partial(jax.nn.gelu, approximate=True),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}

KV_SCALES = ("k_scale", "v_scale")
"""Params [] that an `Attention` may have."""

normal = nn.initializers.normal(0.02)


def activation(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; choose {', '.join(ACTIVATIONS)}")
    return partial(_in_float32, ACTIVATIONS[name])


def _in_float32(act: Callable[[Array], Array], x: Array) -> Array:
    """act(x) rounded to x's dtype once, as torch does, instead of after each of its operations."""
    return act(x.astype(jnp.float32)).astype(x.dtype)


def scaled(x: Array, by: float) -> Array:
    """x times a number of the config, in x's dtype."""
    return x if by == 1 else x * jnp.asarray(by, x.dtype)


def softcap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap): nearly x where it is small, and never beyond `cap`; None caps nothing."""
    return x if cap is None else cap * jnp.tanh(x / cap)


_FEW_ROWS = 32  # so many float32 rows XLA:CPU multiplies faster weight first: docs/performance.md, "What was tried"


def matmul(x: Array, weight: Array | QuantizedMatrix, *, out_dtype: Any = None) -> Array:
    """x [T, E] times weight [F, E], -> [T, F]. A float32 model multiplies in true float32, not in a GPU's TF32."""
    if isinstance(weight, QuantizedMatrix):
        return quantized_matmul(x, weight, out_dtype=out_dtype)
    dot = partial(
        jnp.einsum,
        precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )

    def x_first(x: Array, weight: Array) -> Array:
        return dot("te,fe->tf", x, weight)

    def weight_first(x: Array, weight: Array) -> Array:
        # Without the barrier XLA would turn it round.
        return jax.lax.optimization_barrier(dot("fe,te->ft", weight, x)).T

    def summed(x: Array, weight: Array) -> Array:
        # XLA:CPU's product of one row makes a copy of the weight in float32; this reads it as it is.
        y = jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32), axis=1)
        return y[None].astype(out_dtype or x.dtype)

    if weight.dtype == jnp.float32:
        on_cpu = weight_first if x.shape[0] <= _FEW_ROWS else x_first
    else:
        on_cpu = summed if x.shape[0] == 1 else x_first
    if on_cpu is x_first:
        return x_first(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=x_first)


class Linear(nn.Module):
    """x [T, E] -> [T, features]. The weight lies [out, in], as in the checkpoint, and may be a `QuantizedMatrix`.

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
        weight = self.get_variable("params", "weight")
        if not isinstance(weight, QuantizedMatrix):  # whose arrays have shapes of their own
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


class Attention(nn.Module):
    """Self-attention over the paged pool: project, rotate, write the new K/V, attend, project back.

    out_name: what the checkpoint calls the output projection. window: in tokens; None is all. scale: of the scores,
    None is head_dim ** -0.5. softcap: scores s become softcap * tanh(s / softcap). head_norm: one of `HEAD_NORMS`, of
    queries and keys before they are rotated; None is none. rope_interleaved: as `rotate` has it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    backend: Backend
    qkv_bias: bool = False
    out_bias: bool = False
    out_name: str = "o_proj"
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    head_norm: str | None = None
    norm_eps: float = 1e-6
    rope_interleaved: bool = False
    shards: Shards = WHOLE

    @nn.compact
    def __call__(
        self, x: Array, batch: RaggedBatch, kv: LayerKV, cos_sin: tuple[Array, Array] | None
    ) -> tuple[Array, LayerKV]:
        """cos_sin: None for a layer that rotates nothing."""
        d, shards = self.head_dim, self.shards
        h, k = shards.local(self.num_heads, "heads"), shards.local_kv_heads(self.num_kv_heads)
        with jax.named_scope("qkv"):
            project = Linear((h + 2 * k) * d, self.qkv_bias, axes=("heads", "embed"), shards=shards, name="qkv_proj")
            qkv = project(x).reshape(-1, h + 2 * k, d)
            queries, keys, values = jnp.split(qkv, (h, h + k), axis=1)
            if self.head_norm is not None:
                queries, keys = norm_heads(self.head_norm, self.norm_eps, queries, keys, shards)
        if cos_sin is not None:
            with jax.named_scope("rope"):
                turn = partial(rotate, cos=cos_sin[0], sin=cos_sin[1], interleaved=self.rope_interleaved)
                queries, keys = turn(queries), turn(keys)
        with jax.named_scope("write_kv"):
            kv_scales = self._kv_scales(kv)
            kv = self.backend.write_kv(*kv, keys, values, batch.slot_mapping, **kv_scales)
        with jax.named_scope("attention"):
            out = self.backend.ragged_attention(
                queries,
                *kv,
                batch.cu_q_lens,
                batch.kv_lens,
                batch.block_tables,
                scale=d**-0.5 if self.scale is None else self.scale,
                window=self.window,
                softcap=self.softcap,
                num_splits=batch.num_splits,
                **kv_scales,
            )
        with jax.named_scope("out"):
            project = Linear(x.shape[-1], self.out_bias, axes=("embed", "heads"), shards=shards, name=self.out_name)
            return project(out.reshape(-1, h * d)), kv

    def _kv_scales(self, kv: LayerKV) -> dict[str, Array]:
        """What a stored K and V are multiplied by, of a pool of 8 bits: such params as a checkpoint brought."""
        names = [name for name in KV_SCALES if kv[0].dtype == FP8 and self.has_variable("params", name)]
        return {name: self.get_variable("params", name).astype(jnp.float32) for name in names}


class MLP(nn.Module):
    """down(act(up(x)))."""

    hidden: int
    act: str
    use_bias: bool = False
    shards: Shards = WHOLE

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden, shards = self.shards.local(self.hidden, "mlp"), self.shards
        up = Linear(hidden, self.use_bias, axes=("mlp", "embed"), shards=shards, name="up_proj")
        down = Linear(x.shape[-1], self.use_bias, axes=("embed", "mlp"), shards=shards, name="down_proj")
        return down(activation(self.act)(up(x)))


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
