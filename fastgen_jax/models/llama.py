"""LLaMA, Llama-2 and Llama-3.x: the decoder that most families are, each with settings of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from fastgen_jax.batch import RaggedBatch
from fastgen_jax.kernels import Backend
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layers import (
    MLP,
    Attention,
    Embed,
    GatedMLP,
    Layer,
    Linear,
    Params,
    activation,
    scaled,
    softcap,
)
from fastgen_jax.models.moe import Mixture, MixtureMLP
from fastgen_jax.models.norms import NORMS
from fastgen_jax.models.rope import Rope
from fastgen_jax.sharding import WHOLE, Shards


class LayerNorms(NamedTuple):
    """What the checkpoint calls the norms of a layer, None where it has none: of what attention reads and gives, and of
    what the MLP reads and gives. Without a norm of its own, the MLP of a parallel block reads what attention does."""

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


BEFORE = LayerNorms()


@dataclass(frozen=True)
class Config:
    """Sizes and switches of a decoder. `windows` has one entry a layer: tokens a query sees, None for all.

    norm: one of `NORMS`. head_norm, attention_scale, attention_softcap: as `Attention` has them.
    window_rope: of the layers with a window, where it is not `rope`. no_rope_layers: those that rotate nothing.
    parallel: attention and MLP read the same and are added together.
    logits_scale, embedding_scale, residual_scale: what logits, embeddings and what a layer adds are multiplied by.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope
    windows: tuple[int | None, ...]
    window_rope: Rope | None = None
    norm: str = "rms"
    norm_eps: float = 1e-6
    layer_norms: LayerNorms = BEFORE
    parallel: bool = False
    hidden_act: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_norm: str | None = None
    no_rope_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    tie_word_embeddings: bool = False
    mixture: Mixture | None = None

    @property
    def max_positions(self) -> int:
        """The longest context: `max_position_embeddings`, or what rope scaling stretches it to."""
        return self.rope.max_positions(self.max_position_embeddings)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """How each layer rotates its heads; None: not at all."""
        ropes = (self.rope if window is None else self.window_rope or self.rope for window in self.windows)
        return tuple(None if layer in self.no_rope_layers else rope for layer, rope in enumerate(ropes))

    @property
    def embed_dim(self) -> int:
        """Width of the hidden states that `logits` takes."""
        return self.hidden_size

    @property
    def mixtures(self) -> tuple[Mixture | None, ...]:
        """Of each layer, the experts that it has in the place of an MLP."""
        dense = range(self.num_layers) if self.mixture is None else self.mixture.dense_layers
        return tuple(None if layer in dense else self.mixture for layer in range(self.num_layers))

    def fused(self, shards: Shards = WHOLE) -> dict[str, dict[str, int]]:
        """Module -> the checkpoint's modules it is made of, with their output widths, of one shard."""
        q = shards.local(self.num_heads, "heads") * self.head_dim
        kv = shards.local_kv_heads(self.num_kv_heads) * self.head_dim
        fused = {"qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv}}
        if self.gated_mlp:
            fused["gate_up_proj"] = dict.fromkeys(("gate_proj", "up_proj"), shards.local(self.intermediate_size, "mlp"))
        if self.head_norm == "layer, each head apart":
            fused |= {f"{x}_norm": {f"{x}_layernorm.norms.{{}}": self.head_dim} for x in "qk"}
        return fused | ({} if self.mixture is None else self.mixture.fused(self.hidden_size, shards))


def from_hf(hf: Mapping[str, Any]) -> Config:
    """From a `config.json`; a field that is not understood raises."""
    fields = HFConfig(hf)
    fields.only("rope_interleaved", False)
    bias = fields.take("attention_bias", False)
    config = read_config(
        fields,
        windows=(None,) * fields.count("num_hidden_layers"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.take("mlp_bias", False),
    )
    fields.finish()
    return config


def read_config(
    fields: HFConfig,
    *,
    windows: tuple[int | None, ...],
    norm_eps: float | None = None,
    rotary: float | None = None,
    rope_interleaved: bool = False,
    ropes: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    **switches: Any,
) -> Config:
    """What most families read alike; the caller takes its own fields and calls `finish`.

    norm_eps: None is `rms_norm_eps`. rotary: as `Rope.from_hf` has it. ropes: the `rope_parameters` of layers without
    and with a window, where these have their own.
    """
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
    head_dim = fields.count_or_none("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}")
    head_dim = head_dim or hidden_size // num_heads
    max_len = fields.count("max_position_embeddings")
    hidden_act = fields.take("hidden_act", "silu")
    activation(hidden_act)
    of = partial(Rope.from_hf, dim=head_dim, max_len=max_len, rotary=rotary, interleaved=rope_interleaved)
    rope, *window_rope = [of(fields)] if ropes is None else [of(HFConfig({"rope_parameters": one})) for one in ropes]
    return Config(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        rope=rope,
        windows=windows,
        window_rope=window_rope[0] if window_rope else None,
        norm_eps=fields.take("rms_norm_eps", 1e-6) if norm_eps is None else norm_eps,
        hidden_act=hidden_act,
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        **switches,
    )


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)), the MLP of one expert or of a mixture; norms as in the config."""

    config: Config
    backend: Backend
    window: int | None
    mixture: Mixture | None
    shards: Shards = WHOLE

    @nn.compact
    def __call__(
        self, x: Array, batch: RaggedBatch, kv: LayerKV, cos_sin: tuple[Array, Array] | None
    ) -> tuple[Array, LayerKV]:
        c, norms = self.config, self.config.layer_norms
        read = self._norm(norms.attention_in, x)
        y, kv = self._attention()(read, batch, kv, cos_sin)
        y = scaled(self._norm(norms.attention_out, y), c.residual_scale)
        if c.parallel:
            read = read if norms.mlp_in is None else self._norm(norms.mlp_in, x)
            return x + y + scaled(self._norm(norms.mlp_out, self._mlp(read, batch)), c.residual_scale), kv
        x = x + y
        y = self._mlp(self._norm(norms.mlp_in, x), batch)
        return x + scaled(self._norm(norms.mlp_out, y), c.residual_scale), kv

    def _norm(self, name: str | None, x: Array) -> Array:
        return x if name is None else NORMS[self.config.norm](self.config.norm_eps, name=name)(x)

    def _attention(self) -> Attention:
        c = self.config
        return Attention(
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            self.backend,
            c.qkv_bias,
            c.out_bias,
            window=self.window,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            head_norm=c.head_norm,
            norm_eps=c.norm_eps,
            rope_interleaved=c.rope.interleaved,
            shards=self.shards,
            name="self_attn",
        )

    def _mlp(self, x: Array, batch: RaggedBatch) -> Array:
        c = self.config
        with jax.named_scope("mlp"):
            if self.mixture is not None:
                experts = MixtureMLP(self.mixture, c.hidden_act, self.shards, name="mlp")
                return experts(x, batch.slot_mapping >= 0)
            kind = GatedMLP if c.gated_mlp else MLP
            return kind(c.intermediate_size, c.hidden_act, c.mlp_bias, self.shards, name="mlp")(x)


class Decoder(nn.Module):
    """Embedding, blocks and final norm: a batch -> hidden states [T, E]."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embed(c.vocab_size, c.hidden_size, ("vocab", "embed"), self.shards)
        self.norm = NORMS[c.norm](c.norm_eps)
        kinds = zip(c.windows, c.mixtures, strict=True)
        self.layers = [Layer(Block, (c, self.backend, *kind, self.shards)) for kind in kinds]

    def __call__(self, batch: RaggedBatch, kv_pool: list[LayerKV]) -> tuple[Array, list[LayerKV]]:
        c = self.config
        x = scaled(self.embed_tokens(batch.token_ids), c.embedding_scale)
        turns: dict[Rope | None, tuple[Array, Array] | None] = {
            rope: None if rope is None else rope.cos_sin(batch.positions, batch.context_lens)
            for rope in dict.fromkeys(c.ropes)
        }
        # Unrolled: a scan over stacked layers copies every layer's weights out of the stack on a GPU.
        new_pool = []
        for layer, rope, kv in zip(self.layers, c.ropes, kv_pool, strict=True):
            x, kv = layer(x, batch, kv, turns[rope])
            new_pool.append(kv)
        return self.norm(x), new_pool


class Model(nn.Module):
    """`apply({"params": params}, batch, kv_pool)` -> hidden states [T, E] and the pool with their K/V."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    def setup(self) -> None:
        c, shards = self.config, self.shards
        self.model = Decoder(c, self.backend, shards)
        if not c.tie_word_embeddings:
            rows = shards.local(c.vocab_size, "vocab")
            self.lm_head = Linear(rows, c.head_bias, jnp.float32, axes=("vocab", "embed"), shards=shards)

    def __call__(self, batch: RaggedBatch, kv_pool: list[LayerKV]) -> tuple[Array, list[LayerKV]]:
        return self.model(batch, kv_pool)

    def logits(self, hidden: Array) -> Array:
        """hidden [S, E] -> float32 [S, V], of a shard those of its part of the vocabulary."""
        c = self.config
        logits = self.model.embed_tokens.attend(hidden) if c.tie_word_embeddings else self.lm_head(hidden)
        return softcap(scaled(logits, c.logits_scale), c.logits_softcap)

    def head_params(self, params: Params) -> Params:
        """The part of `params` that `logits` reads."""
        if self.config.tie_word_embeddings:
            return {"model": {"embed_tokens": params["model"]["embed_tokens"]}}
        return {"lm_head": params["lm_head"]}
