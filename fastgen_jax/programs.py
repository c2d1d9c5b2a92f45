"""The compiled programs of an engine: few, of fixed shapes, all built before the first request.

A step is two calls. `backbone`, one program a bucket of T tokens, runs the model and picks the last
hidden state of each row. `head`, one program a bucket of rows, turns those into logits and samples.
Apart they compile in a fraction of the time: the layers once a bucket whatever is done with their
output, and the head not for every bucket of tokens. Beside the plain head there is one that reports
log-probabilities too, one that returns the logits, and one for the log-probabilities of a prompt.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fastgen_jax import kv_pool
from fastgen_jax.batch import NUM_INTS, NUM_SETTINGS, Layout, Settings, bucket_for, bucket_ladder
from fastgen_jax.kv_pool import LayerKV
from fastgen_jax.models.layers import Params
from fastgen_jax.sampling import logprobs, sample
from fastgen_jax.sampling_state import SamplingRows, SamplingState, set_row
from fastgen_jax.types import MAX_LOGPROBS

ROW_COLUMNS = 3 + NUM_SETTINGS
"""Columns of `rows`, which the backbone hands to the head: slot, kv_len, samples, and the settings."""

LOGPROB_CHUNK = 64
"""Rows whose logits over the vocabulary exist at once for a prompt's log-probabilities."""

Key = tuple[str, int]
"""A program: its name and its bucket."""


def backbone(
    model: Any,
    layout: Layout,
    bucket: int,
    params: Params,
    kv_pool: list[LayerKV],
    token_pool: Array,
    buffer: Array,
) -> tuple[Array, Array, Array, list[LayerKV], Array]:
    """-> hidden [T, E], last hidden of each row [max_num_seqs, E], rows int32 [max_num_seqs, ROW_COLUMNS], pools."""
    arrays = layout.split(buffer, bucket)
    batch, token_pool = layout.unpack(arrays, token_pool)
    hidden, kv_pool = model.apply({"params": params}, batch, kv_pool)
    last = hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)]
    rows = jnp.concatenate(
        (
            arrays["slots"][:, None],
            arrays["kv_lens"][:, None],
            arrays["samples"][:, None],
            arrays["settings"],
        ),
        axis=1,
    )
    missing = ((0, layout.max_num_seqs - last.shape[0]), (0, 0))
    return hidden, jnp.pad(last, missing), jnp.pad(rows, missing), kv_pool, token_pool


def head(
    model: Any, report: bool, num_rows: int, params: Params, state: SamplingState, last: Array, rows: Array
) -> tuple[Any, SamplingState]:
    """Sample the first `num_rows` rows -> (tokens int32 [S] or, to `report`, (tokens, *logprobs)), state."""
    logits = model.apply({"params": params}, last[:num_rows], method="logits")
    sampling, samples = sampling_rows(rows[:num_rows])
    tokens = sample(logits, sampling, state)
    slot = jnp.where(samples, sampling.slot, state.token_pool.shape[0])
    token_pool = state.token_pool.at[slot, sampling.num_tokens].set(tokens, mode="drop")
    state = replace(state, token_pool=token_pool)
    return ((tokens, *logprobs(logits, tokens, num_reported(logits))) if report else tokens), state


def row_logits(model: Any, num_rows: int, params: Params, last: Array) -> Array:
    """float32 [S, V] of the first `num_rows` rows."""
    return model.apply({"params": params}, last[:num_rows], method="logits")


def prompt_logprobs(model: Any, params: Params, hidden: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Log-probabilities of `targets` int32 [T] after hidden [T, E], a chunk of rows at a time."""
    num_tokens = hidden.shape[0]
    chunk = min(LOGPROB_CHUNK, num_tokens)
    missing = -num_tokens % chunk
    hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(targets, (0, missing)).reshape(-1, chunk)

    def one_chunk(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        logits = model.apply({"params": params}, args[0], method="logits")
        return logprobs(logits, args[1], num_reported(logits))

    out = jax.lax.map(one_chunk, (hidden, targets))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], out)


def num_reported(logits: Array) -> int:
    """How many of the likeliest tokens are reported: all there are of a tiny vocabulary."""
    return min(MAX_LOGPROBS, logits.shape[-1])


def sampling_rows(rows: Array) -> tuple[SamplingRows, Array]:
    """rows int32 [S, ROW_COLUMNS] -> how each is sampled, and which are; the others are made greedy, which is cheap."""
    slot, num_tokens, samples = rows[:, 0], rows[:, 1], rows[:, 2] > 0
    neutral = jnp.asarray(Settings().to_row())[None, :]
    settings = jnp.where(samples[:, None], rows[:, 3:], neutral)
    names = Settings._fields
    floats = jax.lax.bitcast_convert_type(settings[:, NUM_INTS:], jnp.float32)
    column = {name: settings[:, i] for i, name in enumerate(names[:NUM_INTS])}
    column |= {name: floats[:, i] for i, name in enumerate(names[NUM_INTS:])}
    seed = jnp.stack((column.pop("seed_high"), column.pop("seed_low")), axis=1).astype(jnp.uint32)
    column |= {name: column[name] > 0 for name in ("has_bias", "has_allowed")}
    return SamplingRows(slot=slot, num_tokens=num_tokens, seed=seed, **column), samples


class Programs:
    """Compiles the functions above for an engine's shapes and keeps the executables.

    `num_compiled` counts them; once every key has been got, it stands still.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        buckets: list[int],
        row_buckets: list[int],
        params: Params,
        kv_pool: list[LayerKV],
        state: SamplingState,
    ):
        self.model, self.layout = model, layout
        self.buckets, self.row_buckets = buckets, row_buckets
        self._shapes = {
            "params": shapes_of(params),
            "head_params": shapes_of(model.head_params(params)),
            "kv_pool": shapes_of(kv_pool),
            "state": shapes_of(state),
        }
        self._dtype = kv_pool[0][0].dtype
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self.num_compiled = 0

    @classmethod
    def of_engine(
        cls,
        model: Any,
        params: Params,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        few: tuple[int, ...] = (),
    ) -> "Programs":
        """Those of an engine of these sizes; `params` may be shapes. few: buckets of less than `batch.MIN_BUCKET`."""
        dtype = jax.tree.leaves(params)[0].dtype
        pool = jax.eval_shape(lambda: kv_pool.allocate(model.config, model.backend, num_blocks, block_size, dtype))
        state = jax.eval_shape(lambda: SamplingState.allocate(max_num_seqs, max_model_len, model.config.vocab_size))
        return cls(
            model,
            Layout(max_num_seqs, -(-max_model_len // block_size), block_size),
            bucket_ladder(max_num_batched_tokens, few),
            bucket_ladder(max_num_seqs, few),
            params,
            pool,
            state,
        )

    def limit(self, max_num_batched_tokens: int) -> None:
        """Drop the buckets that no step of so many tokens needs."""
        self.buckets = _up_to(self.buckets, max_num_batched_tokens)
        self.row_buckets = _up_to(self.row_buckets, min(max_num_batched_tokens, self.layout.max_num_seqs))

    def reused_shapes(self) -> Any:
        """What a backbone takes and gives back in place: the KV pool and the token pool."""
        return self._shapes["kv_pool"], self._shapes["state"].token_pool

    def keys(self) -> Iterator[Key]:
        """Every program there is, the backbones first."""
        for name, ladder in (
            ("backbone", self.buckets),
            ("sample", self.row_buckets),
            ("sample_logprobs", self.row_buckets),
            ("logits", self.row_buckets),
            ("prompt_logprobs", self.buckets),
            ("set_row", [1]),
        ):
            yield from ((name, bucket) for bucket in ladder)

    def get(self, name: str, bucket: int) -> jax.stages.Compiled:
        """The executable, compiled now if it is not yet."""
        if (name, bucket) not in self._compiled:
            self._compiled[name, bucket] = self.lower(name, bucket).compile()
            self.num_compiled += 1
        return self._compiled[name, bucket]

    def largest_step_bytes(self) -> int:
        """What the largest step takes on the device beside its arguments: temporaries and new outputs."""
        total = 0
        for name, bucket in (("backbone", self.buckets[-1]), ("sample_logprobs", self.row_buckets[-1])):
            memory = self.get(name, bucket).memory_analysis()
            total += memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return total

    def lower(self, name: str, bucket: int) -> jax.stages.Lowered:
        """One program, traced for its shapes but not compiled."""
        s, slots = self._shapes, self.layout.max_num_seqs
        state, head_params = s["state"], s["head_params"]

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        embed_dim = self.model.config.embed_dim
        last = jax.ShapeDtypeStruct((slots, embed_dim), self._dtype)
        rows = ints(slots, ROW_COLUMNS)
        if name == "backbone":
            run = jax.jit(partial(backbone, self.model, self.layout, bucket), donate_argnums=(1, 2))
            return run.lower(s["params"], s["kv_pool"], state.token_pool, ints(self.layout.buffer_size(bucket)))
        if name in ("sample", "sample_logprobs"):
            run = jax.jit(partial(head, self.model, name == "sample_logprobs", bucket), donate_argnums=(1,))
            return run.lower(head_params, state, last, rows)
        if name == "logits":
            return jax.jit(partial(row_logits, self.model, bucket)).lower(head_params, last)
        if name == "prompt_logprobs":
            hidden = jax.ShapeDtypeStruct((bucket, embed_dim), self._dtype)
            return jax.jit(partial(prompt_logprobs, self.model)).lower(head_params, hidden, ints(bucket))
        per_request = (state.allowed_bits, state.stop_bits, state.bias_ids, state.bias_values)
        row = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in per_request]
        return jax.jit(set_row, donate_argnums=(0,)).lower(state, ints(), *row)


def _up_to(ladder: list[int], size: int) -> list[int]:
    """The ladder as far as the bucket that holds `size`."""
    return [bucket for bucket in ladder if bucket <= bucket_for(ladder, size)]


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
