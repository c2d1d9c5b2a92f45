"""Rotary position embeddings and their scalings, as `transformers.modeling_rope_utils` defines them."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fastgen_jax.models.hf_config import HFConfig

Parameters = dict[str, Any]
"""What a config.json calls `rope_parameters`."""

REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""The types of scaling, and what each must find in the config."""

VARYING = ("dynamic", "longrope")
"""The types whose frequencies depend on the length of the context."""

OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("attention_factor",),
}
"""What a type of scaling reads where it is there."""


@dataclass(frozen=True)
class Rope:
    """Rotation frequencies of a head of `dim` dimensions; the rest mean what they mean in config.json.

    original_max_len: context length before scaling (`original_max_position_embeddings`).
    attention_factor: what yarn and longrope multiply cos and sin by.
    short_factor, long_factor: what longrope divides the frequencies of short and of long contexts by, [dim / 2].
    interleaved: as `rotate` has it.
    """

    dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False

    @classmethod
    def from_hf(
        cls,
        fields: HFConfig,
        *,
        dim: int,
        max_len: int,
        theta: float = 10000.0,
        rotary: float | None = None,
        interleaved: bool = False,
    ) -> "Rope":
        """Read `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5), strictly.

        rotary: the share of `dim` dimensions that is rotated where the config has no `partial_rotary_factor`; None is
        all of them, and the config may not have it.
        """
        scaling = dict(fields.take("rope_scaling") or {}) | (fields.take("rope_parameters") or {})
        scaling = {name: value for name, value in scaling.items() if value is not None}
        if rotary is not None:
            dim = int(dim * scaling.pop("partial_rotary_factor", fields.take("partial_rotary_factor", rotary)))
        if dim % 2:
            of = "head_dim" if rotary is None else "the rotated part of head_dim"
            raise ValueError(f"{of}={dim} must be even: rope turns pairs of dimensions")
        theta = float(scaling.pop("rope_theta", fields.take("rope_theta", theta)))
        legacy_type = scaling.pop("type", "default")
        rope_type = scaling.pop("rope_type", legacy_type)
        if rope_type not in REQUIRED:
            raise ValueError(f"rope_type={rope_type!r} is not supported; choose {', '.join(REQUIRED)}")
        original = scaling.pop("original_max_position_embeddings", None)
        if rope_type == "yarn":
            if original:
                scaling.setdefault("factor", max_len / original)
            mscales = scaling.pop("mscale", None), scaling.pop("mscale_all_dim", None)
            computed = _yarn_attention_factor(scaling.get("factor", 1.0), *mscales)
            scaling.setdefault("attention_factor", computed)
        if rope_type == "longrope":
            original = original or max_len
            growth = scaling.pop("factor", None) or max_len / original
            scaling.setdefault("attention_factor", _longrope_attention_factor(growth, original))
            for name in [name for name in REQUIRED["longrope"] if name in scaling]:
                scaling[name] = tuple(scaling[name])
                if len(scaling[name]) != dim // 2:
                    raise ValueError(f"{name} has {len(scaling[name])} entries; it must have {dim // 2}")
        scaling.pop("finetuned", None)
        required, optional = REQUIRED[rope_type], OPTIONAL.get(rope_type, ())
        if missing := [name for name in required if name not in scaling]:
            raise ValueError(f"rope scaling {rope_type!r} lacks the field {missing[0]!r}")
        if unknown := sorted(set(scaling) - {*required, *optional}):
            raise ValueError(f"rope scaling {rope_type!r} has unsupported fields: {', '.join(unknown)}")
        if rope_type == "dynamic" or original is None:
            original = max_len
        return cls(dim, theta, rope_type, original_max_len=original, interleaved=interleaved, **scaling)

    @property
    def varies(self) -> bool:
        """Whether a token is turned by how long its sequence is, too."""
        return self.rope_type in VARYING

    def max_positions(self, max_len: int) -> int:
        """The longest context of a model whose `max_position_embeddings` is `max_len`.

        "linear", "dynamic" and "yarn" stretch `original_max_len`, which is `max_len` where a config does not say that
        `max_len` is the outcome; in configs of "llama3" and "longrope" it always is.
        """
        if self.rope_type in ("linear", "dynamic", "yarn"):
            return max(max_len, int(self.factor * self.original_max_len))
        return max_len

    def inv_freq(self) -> np.ndarray:
        """float32 [dim / 2], in radians a position; for "dynamic", those of a short context."""
        inv_freq = _plain(self.dim, self.theta)
        if self.rope_type == "linear":
            inv_freq = inv_freq / self.factor
        elif self.rope_type == "llama3":
            inv_freq = self._llama3(inv_freq)
        elif self.rope_type == "yarn":
            inv_freq = self._yarn(inv_freq)
        return inv_freq.astype(np.float32)

    def cos_sin(self, positions: Array, context_lens: Array) -> tuple[Array, Array]:
        """cos and sin, float32 [T, dim / 2], of tokens at `positions` int32 [T].

        `context_lens` int32 [T] matters to "dynamic" and "longrope" only: the tokens there were when the token was
        first computed by a generation that ran its prompt whole. So the frequencies a token gets do not depend on how
        its prompt was split, and are those of Hugging Face's `generate`; only that this computes a "longrope" context
        anew where it grows past `original_max_len`, and here its first tokens keep the frequencies they have.
        """
        inv_freq = jnp.asarray(self.inv_freq())[None, :]
        if self.rope_type == "dynamic":
            length = jnp.maximum(context_lens, self.original_max_len).astype(jnp.float32)
            growth = self.factor * length / self.original_max_len - (self.factor - 1)
            exponent = jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim
            theta = self.theta * growth ** (self.dim / (self.dim - 2))
            inv_freq = theta[:, None] ** -exponent[None, :]
        if self.rope_type == "longrope":
            factors = [jnp.asarray(f, jnp.float32)[None, :] for f in (self.long_factor, self.short_factor)]
            inv_freq = inv_freq / jnp.where((context_lens > self.original_max_len)[:, None], *factors)
        angles = positions.astype(jnp.float32)[:, None] * inv_freq
        cos_sin = jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor
        # Without the barrier XLA computes them anew in every fusion that reads them, several in each layer.
        return jax.lax.optimization_barrier(cos_sin)

    def _llama3(self, inv_freq: np.ndarray) -> np.ndarray:
        """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
        wavelength = 2 * math.pi / inv_freq
        turns = self.original_max_len / wavelength
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0, 1)
        return (1 - blend) * inv_freq / self.factor + blend * inv_freq

    def _yarn(self, inv_freq: np.ndarray) -> np.ndarray:
        """Interpolate the dimensions that turn rarely, keep those that turn often (arXiv 2309.00071)."""

        def dimension(turns: float) -> float:
            wavelength = self.original_max_len / turns
            return self.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (np.arange(self.dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
        interpolated = np.clip(ramp, 0, 1)
        return inv_freq / self.factor * interpolated + inv_freq * (1 - interpolated)


def by_layer_type(
    fields: HFConfig, *, theta: float, window_theta: float | None = None
) -> tuple[Parameters, Parameters]:
    """What layers without a window rotate by and what those with one do: a scaling is of the former only.

    Configs have the two in `rope_parameters`, by the types of layers, or, older ones, in `rope_theta`, `rope_scaling`
    and `rope_local_base_freq`. theta, window_theta: what stands for bases that are not there; None is the other one.
    """
    by_type = fields.take("rope_parameters", {})
    if unknown := sorted(set(by_type) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"rope_parameters has {unknown[0]!r}; it can have full_attention and sliding_attention")
    theta = fields.take("rope_theta", theta)
    local = fields.take("rope_local_base_freq", theta if window_theta is None else window_theta)
    windowed = {"rope_theta": local} | (by_type.get("sliding_attention") or {})
    if (rope_type := windowed.get("rope_type", windowed.get("type"))) in VARYING:
        raise ValueError(
            f"rope_type={rope_type!r} of sliding_attention is not supported, nor any that varies with the length"
        )
    full = {"rope_theta": theta} | (by_type.get("full_attention") or {})
    return full | fields.take("rope_scaling", {}), windowed


def _plain(dim: int, theta: float) -> np.ndarray:
    return (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(np.float32)


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(growth: float, original: int) -> float:
    return 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Rotate the first R dimensions of x [T, H, D] in pairs by float32 angles cos, sin [T, R / 2]; the others stay.

    A pair is a dimension of the first half of R and one of the second, or, interleaved, one and the next.
    """
    turned, others = jnp.split(x, (2 * cos.shape[-1],), axis=-1)
    turned = turned.astype(jnp.float32)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = jnp.stack(pairs, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(pairs, axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), others), axis=-1) if others.size else turned.astype(x.dtype)
