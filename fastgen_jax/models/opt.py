"""OPT: learned positions, LayerNorm before or after, plain MLP, biases everywhere (arXiv 2205.01068)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax import Array

from fastgen_jax.batch import RaggedBatch
from fastgen_jax.kernels import Backend
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.hf_config import HFConfig
from fastgen_jax.models.layers import Attention, Embed, Layer, Linear, Params, activation
from fastgen_jax.models.norms import LayerNorm
from fastgen_jax.sharding import WHOLE, Shards

POSITION_OFFSET = 2
"""Row of the position table that position 0 reads, in an OPT."""


@dataclass(frozen=True)
class Config:
    """Sizes and switches of an OPT or a GPT-2. `embed_dim` is the width of the word embeddings, projected both ways."""

    vocab_size: int
    hidden_size: int
    embed_dim: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    norm_before: bool = True
    final_norm: bool = True
    use_bias: bool = True
    norm_affine: bool = True
    hidden_act: str = "relu"
    norm_eps: float = 1e-5
    position_offset: int = POSITION_OFFSET

    @property
    def tie_word_embeddings(self) -> bool:
        return True

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def windows(self) -> tuple[None, ...]:
        return (None,) * self.num_layers

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_positions(self) -> int:
        """The longest context: the position table's end."""
        return self.max_position_embeddings

    def fused(self, shards: Shards = WHOLE) -> dict[str, dict[str, int]]:
        """Module -> the checkpoint's modules it is made of, with their output widths, of one shard."""
        width = shards.local(self.num_heads, "heads") * self.head_dim
        return {"qkv_proj": dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)}


def from_hf(hf: Mapping[str, Any]) -> Config:
    fields = HFConfig(hf)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}")
    norm_before = fields.take("do_layer_norm_before", True)
    final_norm_removed = fields.take("_remove_final_layer_norm", False)
    hidden_act = fields.take("activation_function", "relu")
    activation(hidden_act)
    fields.only("tie_word_embeddings", True)
    config = Config(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        embed_dim=fields.count("word_embed_proj_dim", hidden_size),
        intermediate_size=fields.count("ffn_dim"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        max_position_embeddings=fields.count("max_position_embeddings"),
        norm_before=norm_before,
        final_norm=norm_before and not final_norm_removed,
        use_bias=fields.take("enable_bias", True),
        norm_affine=fields.take("layer_norm_elementwise_affine", True),
        hidden_act=hidden_act,
    )
    fields.finish()
    return config


class Block(nn.Module):
    """Attention and MLP, each with its residual, the norm before or after it."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    @nn.compact
    def __call__(self, x: Array, batch: RaggedBatch, kv: LayerKV) -> tuple[Array, LayerKV]:
        c = self.config
        attention_norm = LayerNorm(c.norm_eps, c.norm_affine, name="self_attn_layer_norm")
        mlp_norm = LayerNorm(c.norm_eps, c.norm_affine, name="final_layer_norm")
        attention = Attention(
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            self.backend,
            c.use_bias,
            c.use_bias,
            out_name="out_proj",
            shards=self.shards,
            name="self_attn",
        )
        y, kv = attention(attention_norm(x) if c.norm_before else x, batch, kv, None)
        x = x + y if c.norm_before else attention_norm(x + y)
        with jax.named_scope("mlp"):
            hidden, shards = self.shards.local(c.intermediate_size, "mlp"), self.shards
            up = Linear(hidden, c.use_bias, axes=("mlp", "embed"), shards=shards, name="fc1")
            down = Linear(c.hidden_size, c.use_bias, axes=("embed", "mlp"), shards=shards, name="fc2")
            y = down(activation(c.hidden_act)(up(mlp_norm(x) if c.norm_before else x)))
        return x + y if c.norm_before else mlp_norm(x + y), kv


class Decoder(nn.Module):
    """Embeddings, blocks and final norm: a batch -> hidden states [T, embed_dim]."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embed(c.vocab_size, c.embed_dim, ("vocab", "embed"), self.shards)
        self.embed_positions = Embed(c.max_position_embeddings + c.position_offset, c.hidden_size)
        self.layers = [Layer(Block, (c, self.backend, self.shards)) for _ in range(c.num_layers)]
        if c.embed_dim != c.hidden_size:
            self.project_in, self.project_out = Linear(c.hidden_size), Linear(c.embed_dim)
        if c.final_norm:
            self.final_layer_norm = LayerNorm(c.norm_eps, c.norm_affine)

    def __call__(self, batch: RaggedBatch, kv_pool: list[LayerKV]) -> tuple[Array, list[LayerKV]]:
        c = self.config
        x = self.embed_tokens(batch.token_ids)
        if c.embed_dim != c.hidden_size:
            x = self.project_in(x)
        x = x + self.embed_positions(batch.positions + c.position_offset)
        new_pool = []
        for layer, kv in zip(self.layers, kv_pool, strict=True):
            x, kv = layer(x, batch, kv)
            new_pool.append(kv)
        if c.final_norm:
            x = self.final_layer_norm(x)
        return self.project_out(x) if c.embed_dim != c.hidden_size else x, new_pool


class Inner(nn.Module):
    """The level that the checkpoint calls `model`."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    def setup(self) -> None:
        self.decoder = Decoder(self.config, self.backend, self.shards)

    def __call__(self, batch: RaggedBatch, kv_pool: list[LayerKV]) -> tuple[Array, list[LayerKV]]:
        return self.decoder(batch, kv_pool)


class Model(nn.Module):
    """`apply({"params": params}, batch, kv_pool)` -> hidden [T, embed_dim] and the pool with their K/V."""

    config: Config
    backend: Backend
    shards: Shards = WHOLE

    def setup(self) -> None:
        self.model = Inner(self.config, self.backend, self.shards)

    def __call__(self, batch: RaggedBatch, kv_pool: list[LayerKV]) -> tuple[Array, list[LayerKV]]:
        return self.model(batch, kv_pool)

    def logits(self, hidden: Array) -> Array:
        """hidden [S, embed_dim] -> float32 [S, V], of a shard those of its part of the vocabulary."""
        return self.model.decoder.embed_tokens.attend(hidden)

    def head_params(self, params: Params) -> Params:
        """The part of `params` that `logits` reads."""
        return {"model": {"decoder": {"embed_tokens": params["model"]["decoder"]["embed_tokens"]}}}
