"""The compiled programs of an engine: few, of fixed shapes, all built before the first request.

A step is two calls. `backbone`, one program a bucket of T tokens, runs the model and picks the last
hidden state of each row. `head`, one program a bucket of rows, turns those into logits and samples.
Apart they compile in a fraction of the time: the layers once a bucket whatever is done with their
output, and the head not for every bucket of tokens. Beside the plain head there is one that reports
log-probabilities too, one that returns the logits, and one for the log-probabilities of a prompt.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from fastgen_jax import kv_pool
from fastgen_jax.batch import NUM_INTS, NUM_SETTINGS, Layout, Settings, bucket_for, bucket_ladder
from fastgen_jax.kv_pool import LayerKV, axes
from fastgen_jax.models.layers import Params
from fastgen_jax.params import one_dtype
from fastgen_jax.sampling import logprobs, sample
from fastgen_jax.sampling_state import SamplingRows, SamplingState, set_row
from fastgen_jax.sharding import multiple_of
from fastgen_jax.threads import in_threads
from fastgen_jax.types import MAX_LOGPROBS

ROW_COLUMNS = 3 + NUM_SETTINGS
"""Columns of `rows`, which the backbone hands to the head: slot, kv_len, samples, and the settings."""

LOGPROB_CHUNK = 64
"""Rows whose logits over the vocabulary exist at once for a prompt's log-probabilities."""

PROGRAMS = ("backbone", "sample", "sample_logprobs", "logits", "prompt_logprobs", "set_row")
"""What is compiled; all but the last for a ladder of buckets."""

MOST_AT_ONCE = 8
"""Programs that are compiled at once: each takes gigabytes of a host's memory for a large model."""

EVERYWHERE = PartitionSpec()
"""Of what every device has whole."""

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
    """-> hidden [T, E], last hidden of each row [R, E], rows int32 [R, ROW_COLUMNS], pools.

    R is `layout.max_num_seqs`, made up to a multiple of the shards, which share the rows out when they sample.
    """
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
    missing = ((0, multiple_of(model.shards.size, layout.max_num_seqs) - last.shape[0]), (0, 0))
    return hidden, jnp.pad(last, missing), jnp.pad(rows, missing), kv_pool, token_pool


def head(
    model: Any, report: bool, num_rows: int, params: Params, state: SamplingState, last: Array, rows: Array
) -> tuple[Any, SamplingState]:
    """Sample the first `num_rows` rows -> (tokens int32 [S] or, to `report`, (tokens, *logprobs)), state."""
    shards, rows = model.shards, rows[: multiple_of(model.shards.size, num_rows)]
    logits = row_logits(model, num_rows, params, last)
    mine, _ = sampling_rows(shards.my_rows(rows))
    tokens = sample(logits, mine, state)
    found = (tokens, *logprobs(logits, tokens, num_reported(logits))) if report else (tokens,)
    found = jax.tree.map(lambda x: shards.all_rows(x)[:num_rows], found)
    sampling, samples = sampling_rows(rows[:num_rows])
    slot = jnp.where(samples, sampling.slot, state.token_pool.shape[0])
    token_pool = state.token_pool.at[slot, sampling.num_tokens].set(found[0], mode="drop")
    return (found if report else found[0]), replace(state, token_pool=token_pool)


def row_logits(model: Any, num_rows: int, params: Params, last: Array) -> Array:
    """float32 [S, V] of the first `num_rows` rows; of a shard its share of them, `num_rows` made up to a multiple."""
    logits = model.apply({"params": params}, last[: multiple_of(model.shards.size, num_rows)], method="logits")
    return model.shards.columns_to_rows(logits, model.config.vocab_size)


def prompt_logprobs(model: Any, params: Params, hidden: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Log-probabilities of `targets` int32 [T] after hidden [T, E], a chunk of rows at a time."""
    num_tokens, shards = hidden.shape[0], model.shards
    chunk = multiple_of(shards.size, min(LOGPROB_CHUNK, num_tokens))
    missing = -num_tokens % chunk
    hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(targets, (0, missing)).reshape(-1, chunk)

    def one_chunk(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        logits = row_logits(model, chunk, params, args[0])
        found = logprobs(logits, shards.my_rows(args[1]), num_reported(logits))
        return jax.tree.map(shards.all_rows, found)

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
        dtype: Any,
    ):
        """dtype: of hidden states. The rest may be shapes."""
        self.model, self.layout = model, layout
        self.buckets, self.row_buckets = buckets, row_buckets
        self._shapes = {
            "params": shapes_of(params),
            "head_params": shapes_of(model.head_params(params)),
            "kv_pool": placed(kv_pool, model.shards.sharding(*axes(model.backend))),
            "state": placed(state, model.shards.sharding()),
        }
        self._dtype = dtype
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self.num_compiled = 0

    @classmethod
    def of_engine(
        cls,
        model: Any,
        params: Params,
        *,
        kv_dtype: Any = None,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        few: tuple[int, ...] = (),
    ) -> "Programs":
        """Those of an engine of these sizes; `params` may be shapes.

        kv_dtype: of the pools; None is that of `params`. few: buckets of less than `batch.MIN_BUCKET`.
        """
        dtype = one_dtype(params)
        pool = jax.eval_shape(lambda: kv_pool.allocate(model, num_blocks, block_size, kv_dtype or dtype))
        state = jax.eval_shape(lambda: SamplingState.allocate(max_num_seqs, max_model_len, model.config.vocab_size))
        return cls(
            model,
            Layout(max_num_seqs, -(-max_model_len // block_size), block_size),
            bucket_ladder(max_num_batched_tokens, few),
            bucket_ladder(max_num_seqs, few),
            params,
            pool,
            state,
            dtype,
        )

    def limit(self, max_num_batched_tokens: int) -> None:
        """Drop the buckets that no step of so many tokens needs."""
        self.buckets = _up_to(self.buckets, max_num_batched_tokens)
        self.row_buckets = _up_to(self.row_buckets, min(max_num_batched_tokens, self.layout.max_num_seqs))

    def reused_bytes(self) -> int:
        """On one device, what a backbone takes and gives back in place: its part of the KV pool, and the token pool."""

        def one(x: jax.ShapeDtypeStruct) -> int:
            shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
            return math.prod(shape) * x.dtype.itemsize

        return sum(map(one, jax.tree.leaves((self._shapes["kv_pool"], self._shapes["state"].token_pool))))

    def keys(self) -> Iterator[Key]:
        """Every program there is, the backbones first."""
        ladders = (self.buckets, self.row_buckets, self.row_buckets, self.row_buckets, self.buckets, [1])
        for name, ladder in zip(PROGRAMS, ladders, strict=True):
            yield from ((name, bucket) for bucket in ladder)

    def get(self, name: str, bucket: int) -> jax.stages.Compiled:
        """The executable, compiled now if it is not yet."""
        if (name, bucket) not in self._compiled:
            self._compiled[name, bucket] = self.lower(name, bucket).compile()
            self.num_compiled += 1
        return self._compiled[name, bucket]

    def compile_all(self, keys: Iterable[Key], advance: Callable[[int], Any] = lambda _: None) -> dict[Key, float]:
        """Have every one of `keys` compiled, several at once; those that were not yet -> seconds that each took.

        They are traced here, one after the other, under the caller's settings of JAX; XLA then compiles them, or reads
        them from the cache, in threads. advance: called with 1 for each that is done.
        """
        seconds: dict[Key, float] = {}

        def compile_one(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
            start = time.perf_counter()
            return lowered.compile(), time.perf_counter() - start

        def jobs() -> Iterator[tuple[Key, Callable[[], tuple[jax.stages.Compiled, float]]]]:
            for key in dict.fromkeys(keys):
                if key in self._compiled:
                    advance(1)
                    continue
                start = time.perf_counter()
                lowered = self.lower(*key)
                seconds[key] = time.perf_counter() - start
                yield key, partial(compile_one, lowered)

        for key, (compiled, took) in in_threads(jobs(), min(MOST_AT_ONCE, os.cpu_count() or 1)):
            self._compiled[key] = compiled
            self.num_compiled += 1
            seconds[key] += took
            advance(1)
        return seconds

    def compile_step(self, bucket: int, head: str, num_rows: int) -> None:
        """Have what a step needs; where a program is missing, what a decode of as many rows needs, too: it is next."""
        step: list[Key] = [("backbone", bucket), (head, num_rows)]
        if not all(key in self._compiled for key in step):
            self.compile_all([*step, ("backbone", bucket_for(self.buckets, num_rows))])

    def largest_step_bytes(self) -> int:
        """What the largest step takes on the device beside its arguments: temporaries and new outputs."""
        total = 0
        for name, bucket in (("backbone", self.buckets[-1]), ("sample_logprobs", self.row_buckets[-1])):
            memory = self.get(name, bucket).memory_analysis()
            total += memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return total

    def lower(self, name: str, bucket: int) -> jax.stages.Lowered:
        """One program, traced for its shapes but not compiled."""
        s, model, shards = self._shapes, self.model, self.model.shards
        state, head_params = s["state"], s["head_params"]

        def everywhere(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=shards.sharding())

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return everywhere(shape, jnp.int32)

        embed_dim = model.config.embed_dim
        num_rows = multiple_of(shards.size, self.layout.max_num_seqs)
        last, rows = everywhere((num_rows, embed_dim), self._dtype), ints(num_rows, ROW_COLUMNS)
        if name == "backbone":
            pool = shards.spec(axes(model.backend))
            out = (EVERYWHERE, EVERYWHERE, EVERYWHERE, pool, EVERYWHERE)
            given = (s["params"], s["kv_pool"], state.token_pool, ints(self.layout.buffer_size(bucket)))
            return self._lower(partial(backbone, model, self.layout, bucket), *given, out=out, donate=(1, 2))
        if name in ("sample", "sample_logprobs"):
            run = partial(head, model, name == "sample_logprobs", bucket)
            return self._lower(run, head_params, state, last, rows, donate=(1,))
        if name == "logits":
            return self._lower(partial(row_logits, model, bucket), head_params, last, out=shards.spec(("vocab",)))
        if name == "prompt_logprobs":
            hidden = everywhere((bucket, embed_dim), self._dtype)
            return self._lower(partial(prompt_logprobs, model), head_params, hidden, ints(bucket))
        per_request = (state.allowed_bits, state.stop_bits, state.bias_ids, state.bias_values)
        row = [everywhere(x.shape[1:], x.dtype) for x in per_request]
        return self._lower(set_row, state, ints(), *row, donate=(0,))

    def _lower(
        self, run: Callable[..., Any], *given: Any, out: Any = EVERYWHERE, donate: tuple[int, ...] = ()
    ) -> jax.stages.Lowered:
        """`run` traced for shapes, each device running it on its shards. out: `PartitionSpec`s of what it returns."""
        if (mesh := self.model.shards.mesh) is not None:
            specs = jax.tree.map(lambda x: x.sharding.spec, given)
            # What is replicated is so by construction; the check knows no Pallas kernels.
            run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return jax.jit(run, donate_argnums=donate).lower(*given)


def _up_to(ladder: list[int], size: int) -> list[int]:
    """The ladder as far as the bucket that holds `size`."""
    return [bucket for bucket in ladder if bucket <= bucket_for(ladder, size)]


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes of arrays, and for what is shared out over devices how."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if isinstance(x.sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)


def placed(tree: Any, sharding: NamedSharding | None) -> Any:
    """The shapes of `tree` with a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
