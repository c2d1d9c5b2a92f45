"""Llama: LLaMA, Llama-2, Llama-3.x and what differs from them by a setting (Mistral, Mixtral, the Qwens)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from fastgen_jax.batch import RaggedBatch
from fastgen_jax.kernels import Backend
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layers import Attention, Embed, GatedMLP, Layer, Linear, Params, RMSNorm, activation
from fastgen_jax.models.moe import Mixture, MixtureMLP
from fastgen_jax.models.rope import Rope
from fastgen_jax.sharding import WHOLE, Shards


@dataclass(frozen=True)
class Config:
    """Sizes and switches of a Llama. `windows` has one entry a layer: tokens a query sees, None for all."""

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
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    mixture: Mixture | None = None

    @property
    def max_positions(self) -> int:
        """The longest context: `max_position_embeddings`, or what rope scaling stretches it to."""
        return self.rope.max_positions(self.max_position_embeddings)

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
        mlp = shards.local(self.intermediate_size, "mlp")
        return {
            "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
            "gate_up_proj": {"gate_proj": mlp, "up_proj": mlp},
        } | ({} if self.mixture is None else self.mixture.fused(self.hidden_size, shards))


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


def read_config(fields: HFConfig, *, windows: tuple[int | None, ...], **switches: Any) -> Config:
    """What Llama, Mistral and the Qwens read alike; the caller takes its own fields and calls `finish`."""
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
    head_dim = fields.take("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}")
    head_dim = head_dim or hidden_size // num_heads
    max_len = fields.count("max_position_embeddings")
    hidden_act = fields.take("hidden_act", "silu")
    activation(hidden_act)
    return Config(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        rope=Rope.from_hf(fields, dim=head_dim, max_len=max_len),
        windows=windows,
        rms_norm_eps=fields.take("rms_norm_eps", 1e-6),
        hidden_act=hidden_act,
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        **switches,
    )


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)), the MLP of one expert or of a mixture."""

    config: Config
    backend: Backend
    window: int | None
    mixture: Mixture | None
    shards: Shards = WHOLE

    @nn.compact
    def __call__(
        self, x: Array, batch: RaggedBatch, kv: LayerKV, cos_sin: tuple[Array, Array]
    ) -> tuple[Array, LayerKV]:
        c = self.config
        attention = Attention(
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            self.backend,
            c.qkv_bias,
            c.out_bias,
            window=self.window,
            qk_norm_eps=c.rms_norm_eps if c.qk_norm else None,
            shards=self.shards,
            name="self_attn",
        )
        y, kv = attention(RMSNorm(c.rms_norm_eps, name="input_layernorm")(x), batch, kv, cos_sin)
        x = x + y
        y = RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)
        with jax.named_scope("mlp"):
            if self.mixture is None:
                mlp = GatedMLP(c.intermediate_size, c.hidden_act, c.mlp_bias, self.shards, name="mlp")
                return x + mlp(y), kv
            experts = MixtureMLP(self.mixture, c.hidden_act, self.shards, name="mlp")
            return x + experts(y, batch.slot_mapping >= 0), kv


class Decoder(nn.Module):
    """Embedding, blocks and final norm: a batch -> hidden states [T, E]."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embed(c.vocab_size, c.hidden_size, ("vocab", "embed"), self.shards)
        self.norm = RMSNorm(c.rms_norm_eps)
        kinds = zip(c.windows, c.mixtures, strict=True)
        self.layers = [Layer(Block, (c, self.backend, *kind, self.shards)) for kind in kinds]

    def __call__(self, batch: RaggedBatch, kv_pool: list[LayerKV]) -> tuple[Array, list[LayerKV]]:
        x = self.embed_tokens(batch.token_ids)
        cos_sin = self.config.rope.cos_sin(batch.positions, batch.context_lens)
        # Unrolled: a scan over stacked layers copies every layer's weights out of the stack on a GPU.
        new_pool = []
        for layer, kv in zip(self.layers, kv_pool, strict=True):
            x, kv = layer(x, batch, kv, cos_sin)
            new_pool.append(kv)
        return self.norm(x), new_pool


class Model(nn.Module):
    """`apply({"params": params}, batch, kv_pool)` -> hidden states [T, E] and the pool with their K/V."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    def setup(self) -> None:
        self.model = Decoder(self.config, self.backend, self.shards)
        if not self.config.tie_word_embeddings:
            rows = self.shards.local(self.config.vocab_size, "vocab")
            self.lm_head = Linear(rows, out_dtype=jnp.float32, axes=("vocab", "embed"), shards=self.shards)

    def __call__(self, batch: RaggedBatch, kv_pool: list[LayerKV]) -> tuple[Array, list[LayerKV]]:
        return self.model(batch, kv_pool)

    def logits(self, hidden: Array) -> Array:
        """hidden [S, E] -> float32 [S, V], of a shard those of its part of the vocabulary."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.attend(hidden)
        return self.lm_head(hidden)

    def head_params(self, params: Params) -> Params:
        """The part of `params` that `logits` reads."""
        if self.config.tie_word_embeddings:
            return {"model": {"embed_tokens": params["model"]["embed_tokens"]}}
        return {"lm_head": params["lm_head"]}
