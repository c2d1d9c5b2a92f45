"""A mixture of experts in the place of a layer's MLP: every token takes a few of them (arXiv 2101.03961).

T tokens, X experts, k experts a token, R = T * k rows (a token on its way through one expert), E embed, F MLP.

The rows are sorted by expert, so that an expert's lie side by side: its group. No row is dropped, whatever the groups'
sizes are, and the tokens that pad a bucket are in no group, so that nothing is computed for them.

`lax.ragged_dot` is made for this and is not used. On a CPU it is one dense product over all experts, X times the work
and a copy of all weights. So it is on an NVIDIA GPU, by XLA's source (`RaggedDotRewriter`), unless a flag that is off
(xla_gpu_experimental_use_ragged_dot_fusion) lets cuDNN do it, in 16 bits. JAX's own grouped matmul in Pallas
(jax.experimental.pallas.ops.gpu.ragged_dot_mgpu, with another file for Blackwell) is an example to read, not to call:
it is made for a GPU of 132 multiprocessors, imports JAX's tests, and goes through all experts in each tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from fastgen_jax.models.layers import GatedMLP, Linear, activation, matmul, normal
from fastgen_jax.sharding import WHOLE, ShardingRules, Shards


@dataclass(frozen=True)
class Mixture:
    """The experts of a model's layers.

    top_k: experts that a token takes. hidden: F of each. normalise: whether a token's weights are made to add up to 1.
    shared: F of an expert that every token takes besides; None: there is none.
    dense_layers: the layers that have a plain MLP instead.
    parts: what the checkpoint calls an expert's gate, up and down.
    """

    num_experts: int
    top_k: int
    hidden: int
    normalise: bool
    shared: int | None = None
    dense_layers: tuple[int, ...] = ()
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.top_k} must be at most the number of experts, {self.num_experts}"
            )

    def fused(self, embed: int, shards: Shards = WHOLE) -> dict[str, dict[str, int]]:
        """As `llama.Config.fused`: which of the checkpoint's modules make up the stacks of experts."""
        gate, up, down = (f"experts.{{}}.{part}" for part in self.parts)
        hidden = shards.local(self.hidden, "expert_mlp")
        fused = {"experts.gate_up_proj": {gate: hidden, up: hidden}, "experts.down_proj": {down: embed}}
        if self.shared is not None:
            parts = ("shared_expert.gate_proj", "shared_expert.up_proj")
            fused["shared_expert.gate_up_proj"] = dict.fromkeys(parts, shards.local(self.shared, "mlp"))
        return fused

    def widths(self, rules: ShardingRules) -> dict[str, int]:
        """What has to be divisible by the number of shards, by name."""
        found = {"experts": self.num_experts} if rules.experts else {"experts of": self.hidden}
        return found | ({} if self.shared is None else {"shared expert": self.shared})


class MixtureMLP(nn.Module):
    """x [T, E], real bool [T] -> [T, E]; what comes out for a token that is not real means nothing."""

    mixture: Mixture
    act: str
    shards: Shards = WHOLE

    @nn.compact
    def __call__(self, x: Array, real: Array) -> Array:
        """Each shard has a part of every expert, or some experts whole: what they come to is added up once."""
        y = self._of_one(x, real)
        return self.shards.sum(y, "experts" if self.shards.cuts("experts") else "expert_mlp")

    def _of_one(self, x: Array, real: Array) -> Array:
        m, shards = self.mixture, self.shards
        with jax.named_scope("route"):
            weights, experts = route(Linear(m.num_experts, name="gate")(x), m.top_k, normalise=m.normalise)
        y = Experts(m.num_experts, m.hidden, self.act, shards, name="experts")(x, weights, experts, real)
        if m.shared is None:
            return y
        with jax.named_scope("shared_expert"):
            share = jax.nn.sigmoid(Linear(1, name="shared_expert_gate")(x))
            shared = GatedMLP(m.shared, self.act, shards=shards, adds_up=False, name="shared_expert")
            return y + share * shared(x)


def route(logits: Array, top_k: int, *, normalise: bool) -> tuple[Array, Array]:
    """logits [T, X] -> the weights, float32, and the numbers, int32, of each token's experts, both [T, k].

    The softmax is in float32 and over all experts, those not taken too (Hugging Face's routers).
    """
    weights, experts = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), top_k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


class Stack(nn.Module):
    """The matrices of all experts, [X, outputs, inputs], each as `Linear` has it."""

    shape: tuple[int, int, int]
    axes: tuple[str, str, str]

    @nn.compact
    def __call__(self) -> Array:
        return self.param("weight", nn.with_partitioning(normal, self.axes), self.shape)


class Experts(nn.Module):
    """The sum of what a token's experts make of it, weighted in float32: x [T, E] -> [T, E]; of a shard, its part."""

    num_experts: int
    hidden: int
    act: str
    shards: Shards = WHOLE

    @nn.compact
    def __call__(self, x: Array, weights: Array, experts: Array, real: Array) -> Array:
        (num_tokens, embed), shards = x.shape, self.shards
        num_experts, hidden = shards.local(self.num_experts, "experts"), shards.local(self.hidden, "expert_mlp")
        gate_up = Stack((num_experts, 2 * hidden, embed), ("experts", "expert_mlp", "embed"), name="gate_up_proj")()
        down = Stack((num_experts, embed, hidden), ("experts", "embed", "expert_mlp"), name="down_proj")()
        if shards.cuts("experts"):
            experts = experts - shards.index() * num_experts
        taken = real[:, None] & (experts >= 0) & (experts < num_experts)  # by experts of this shard
        with jax.named_scope("sort"):
            order, sizes = by_expert(jnp.where(taken, experts, num_experts), num_experts)
            rows = x[order // experts.shape[1]]
        with jax.named_scope("experts"):
            rows = grouped_mlp(rows, sizes, gate_up, down, act=activation(self.act), most=num_tokens)
        with jax.named_scope("combine"):
            back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
            y = rows[back].reshape(num_tokens, -1, embed).astype(jnp.float32)
            return jnp.sum(jnp.where(taken, weights, 0)[:, :, None] * y, axis=1).astype(x.dtype)


def by_expert(experts: Array, num_experts: int) -> tuple[Array, Array]:
    """experts int32 [T, k] -> the rows in the order of their experts, int32 [R], and the size of each group, int32 [X].

    Row r is token r // k; rows whose expert is `num_experts` come last and are in no group.
    """
    expert = experts.reshape(-1)
    sizes = jnp.sum(expert[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    return jnp.argsort(expert).astype(jnp.int32), sizes


def grouped_mlp(
    rows: Array, sizes: Array, gate_up: Array, down: Array, *, act: Callable[[Array], Array], most: int
) -> Array:
    """Each group of rows through the MLP of its expert: [R, E] -> [R, E]; what is in no group comes out as anything.

    rows: [R, E], group after group. sizes: int32 [X], each at most `most`. gate_up: [X, 2F, E]. down: [X, E, F].
    """
    tiles, rounds = partial(by_tiles, act=act, most=most), partial(by_rounds, act=act, most=most)
    return lax.platform_dependent(rows, sizes, gate_up, down, cpu=tiles, default=rounds)


_TILES = (16, 8)
"""Rows that are multiplied at once on a CPU: as many of the first as a group fills, and the rest by the second."""


def by_tiles(
    rows: Array, sizes: Array, gate_up: Array, down: Array, *, act: Callable[[Array], Array], most: int
) -> Array:
    """`grouped_mlp` tile after tile, in loops whose lengths are worked out on the device.

    The work is that of R rows, and for each expert of less than one small tile besides. An expert's weights are copied
    out of the stacks once, which XLA does for an index that it does not know.
    """
    num_rows, tiles = rows.shape[0], sorted({min(tile, most) for tile in _TILES}, reverse=True)
    rows = jnp.pad(rows, ((0, tiles[0]), (0, 0)))  # the last tile may reach beyond the end
    starts = jnp.cumsum(sizes) - sizes
    hit = jnp.argsort(sizes == 0)  # experts that have rows, in their order

    def one_expert(i: Array, out: Array) -> Array:
        expert = hit[i]
        weights = gate_up[expert], down[expert]
        start, end = starts[expert], starts[expert] + sizes[expert]
        for tile in tiles:
            count = (end - start) // tile if tile > tiles[-1] else -(-(end - start) // tile)

            def one_tile(j: Array, out: Array, start: Array = start, tile: int = tile) -> Array:
                at = start + j * tile
                y = _mlp(lax.dynamic_slice_in_dim(rows, at, tile), *weights, act)
                # What it writes into the next group is overwritten by that group's own tiles.
                return lax.dynamic_update_slice_in_dim(out, y, at, 0)

            out = lax.fori_loop(0, count, one_tile, out)
            start = start + count * tile
        return out

    return lax.fori_loop(0, jnp.sum(sizes > 0), one_expert, jnp.zeros_like(rows))[:num_rows]


def _mlp(x: Array, gate_up: Array, down: Array, act: Callable[[Array], Array]) -> Array:
    gate, up = jnp.split(matmul(x, gate_up), 2, axis=-1)
    return matmul(act(gate) * up, down)


_ROUND = 128
"""Rows of an expert in a round on a GPU: so many take little longer than reading the expert's weights does."""


def by_rounds(
    rows: Array, sizes: Array, gate_up: Array, down: Array, *, act: Callable[[Array], Array], most: int
) -> Array:
    """`grouped_mlp` as a batched matmul over all experts, with an equal number of rows of each: a round.

    There are as many rounds as the largest group takes: one where no group can be larger than `_ROUND`, and about one
    where groups are of like size, for a round has room for a quarter more than the mean. Nothing is copied.
    """
    num_experts, num_rows = sizes.shape[0], rows.shape[0]
    quarter_more = -(-5 * num_rows // (4 * num_experts))
    room = min(most, max(_ROUND, -(-quarter_more // 16) * 16))
    ends = jnp.cumsum(sizes)
    dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None)

    def one_round(i: Array | int, out: Array) -> Array:
        index = (ends - sizes + i * room)[:, None] + jnp.arange(room)[None, :]
        index = jnp.where(index < ends[:, None], index, num_rows)
        x = jnp.take(rows, index, axis=0, mode="fill", fill_value=0)
        gate, up = jnp.split(dot("xce,xfe->xcf", x, gate_up), 2, axis=-1)
        y = dot("xcf,xef->xce", act(gate) * up, down)
        return out.at[index].set(y, mode="drop")

    out = jnp.zeros_like(rows)
    if room == most:
        return one_round(0, out)
    return lax.fori_loop(0, -(-jnp.max(sizes) // room), one_round, out)
