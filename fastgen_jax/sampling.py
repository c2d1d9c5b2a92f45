"""From logits to tokens, on the device: every field of `SamplingParams`, row by row, in one program.

The processors and their order are those of Hugging Face transformers (`generation/logits_process.py`); the
presence and frequency penalties are OpenAI's. What no row of a step asks for is skipped at run time, and
nothing sorts the vocabulary: top_k and top_p find their cutoffs by bisection.

Letters: S rows of a step, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fastgen_jax.sampling_state import SamplingRows, SamplingState

_BLOCK = 128  # vocabulary entries that argmax and the draw summarise before they look inside
_FOLDS = 6  # halvings in `_row_sum`; 2**_FOLDS divides _BLOCK


def sample(logits: jax.Array, rows: SamplingRows, state: SamplingState) -> jax.Array:
    """The next token of each row: int32 [S], from logits [S, V] of any float dtype.

    Where temperature is 0, the first of the likeliest tokens; elsewhere a draw, whose one random number
    depends on the row's seed and output index only, and which never takes a token of probability 0. Where
    every logit is -inf, token 0.
    """
    adjusted = _pad(_adjust(logits.astype(jnp.float32), rows, state))
    greedy = _argmax(adjusted)

    @jax.named_scope("draw")
    def draw() -> jax.Array:
        drawn = _draw(jnp.exp(_filter(adjusted, rows)), _uniform(rows))
        return jnp.where(rows.temperature > 0, drawn, greedy)

    return lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy)


def process_logits(logits: jax.Array, rows: SamplingRows, state: SamplingState) -> jax.Array:
    """What `sample` chooses by: float32 [S, V], excluded tokens -inf, from logits [S, V] of any float dtype.

    Rows of temperature 0 skip temperature, top_k, top_p and min_p. The others come back shifted, so that
    their largest logit is 0: no distribution notices, and no temperature overflows.
    """
    adjusted = _adjust(logits.astype(jnp.float32), rows, state)
    filtered = _filter(_pad(adjusted), rows)[:, : logits.shape[1]]
    return jnp.where((rows.temperature > 0)[:, None], filtered, adjusted)


@jax.named_scope("logprobs")
def logprobs(logits: jax.Array, token_ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities under the model's own logits [S, V], before any processor.

    Returns the log-probability of token_ids (float32 [S]), the k likeliest tokens (int32 [S, k], best first)
    and their log-probabilities (float32 [S, k]).
    """
    logits = logits.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    top_logits, top_ids = lax.top_k(logits, k)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    return (chosen - log_total)[:, 0], top_ids, top_logits - log_total


@jax.named_scope("adjust_logits")
def _adjust(logits: jax.Array, rows: SamplingRows, state: SamplingState) -> jax.Array:
    too_short = rows.output_index < rows.min_tokens
    stages = (
        (rows.has_bias, _add_bias),
        (rows.repetition_penalty != 1, _penalise_repetition),
        ((rows.presence_penalty != 0) | (rows.frequency_penalty != 0), _penalise_presence),
        (rows.has_allowed | too_short, _mask_tokens),
    )
    for needed, stage in stages:
        logits = lax.cond(jnp.any(needed), stage, lambda logits, *_: logits, logits, rows, state)
    return logits


def _add_bias(logits: jax.Array, rows: SamplingRows, state: SamplingState) -> jax.Array:
    row = jnp.arange(logits.shape[0])[:, None]
    bias = jnp.where(rows.has_bias[:, None], state.bias_values[rows.slot], 0)
    return logits.at[row, state.bias_ids[rows.slot]].add(bias, mode="drop")


def _penalise_repetition(logits: jax.Array, rows: SamplingRows, state: SamplingState) -> jax.Array:
    seen = _count_tokens(rows, state, jnp.zeros_like(rows.num_tokens), logits.shape[1]) > 0
    penalty = rows.repetition_penalty[:, None]
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def _penalise_presence(logits: jax.Array, rows: SamplingRows, state: SamplingState) -> jax.Array:
    counts = _count_tokens(rows, state, rows.num_prompt_tokens, logits.shape[1])
    logits -= jnp.where(counts > 0, rows.presence_penalty[:, None], 0)
    return logits - counts * rows.frequency_penalty[:, None]


def _count_tokens(rows: SamplingRows, state: SamplingState, start: jax.Array, vocab_size: int) -> jax.Array:
    """int32 [S, V]: how often each token stands at the positions [start, num_tokens) of its row."""
    token_ids = state.token_pool[rows.slot]
    position = jnp.arange(token_ids.shape[1])[None]
    inside = (position >= start[:, None]) & (position < rows.num_tokens[:, None])
    row = jnp.arange(token_ids.shape[0])[:, None]
    counts = jnp.zeros((token_ids.shape[0], vocab_size), jnp.int32)
    return counts.at[row, jnp.where(inside, token_ids, vocab_size)].add(1, mode="drop")


def _mask_tokens(logits: jax.Array, rows: SamplingRows, state: SamplingState) -> jax.Array:
    """min_tokens and allowed_token_ids. Where they leave nothing, every allowed token has logit 0 instead."""
    too_short = (rows.output_index < rows.min_tokens)[:, None]
    allowed = state.allowed_bits[rows.slot]
    words = jnp.where(too_short, allowed & ~state.stop_bits[rows.slot], allowed)
    nothing = ~jnp.any(words != 0, axis=1, keepdims=True)
    words, logits = jnp.where(nothing, allowed, words), jnp.where(nothing, 0.0, logits)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    keep = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(keep | ~(rows.has_allowed[:, None] | too_short), logits, -jnp.inf)


def _pad(logits: jax.Array) -> jax.Array:
    """Whole blocks: the vocabulary made longer by tokens of logit -inf."""
    return jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % _BLOCK)), constant_values=-jnp.inf)


@jax.named_scope("filter_logits")
def _filter(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Log-weights [S, V], the largest 0: temperature, then top_k, top_p and min_p, each a cutoff."""
    temperature = jnp.maximum(rows.temperature, jnp.finfo(jnp.float32).tiny)
    best = jnp.maximum(jnp.max(logits, axis=1), jnp.finfo(jnp.float32).min)  # finite if all is masked
    scaled = (logits - best[:, None]) / temperature[:, None]
    random, keep_all = rows.temperature > 0, jnp.full_like(best, -jnp.inf)

    def find_top_k() -> jax.Array:
        goal = jnp.where(rows.top_k > 0, rows.top_k.astype(jnp.float32), jnp.inf)
        return _largest_cutoff(lambda t: _row_sum(jnp.where(logits >= t[:, None], 1.0, 0.0)), goal)

    def find_top_p(top_k: jax.Array) -> jax.Array:
        weights = jnp.exp(jnp.where(logits >= top_k[:, None], scaled, -jnp.inf))
        goal = jnp.where(rows.top_p < 1, rows.top_p * _row_sum(weights), jnp.inf)
        return _largest_cutoff(lambda t: _row_sum(jnp.where(logits >= t[:, None], weights, 0.0)), goal)

    top_k = lax.cond(jnp.any(random & (rows.top_k > 0)), find_top_k, lambda: keep_all)
    top_p = lax.cond(jnp.any(random & (rows.top_p < 1)), find_top_p, lambda _: keep_all, top_k)
    min_p = best + temperature * jnp.log(rows.min_p)
    cutoff = jnp.maximum(jnp.maximum(top_k, top_p), min_p)
    return jnp.where(logits >= cutoff[:, None], scaled, -jnp.inf)


def _largest_cutoff(mass: Callable[[jax.Array], jax.Array], goal: jax.Array) -> jax.Array:
    """The largest float32 t with mass(t) >= goal, per row [S]; -inf where there is none.

    mass(t), of the logits >= t, falls as t grows and is below every goal at +inf. So a logit is >= the result
    exactly when the mass strictly above it is below the goal, and tied logits share their fate. The bisection
    runs over the floats' own order: 32 rounds settle the last bit, and because their number is fixed, a GPU
    need not ask the host whether to go on.
    """

    def round_(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        enough = mass(_float_at(middle)) >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    infinity = 0x7F800000  # its bits, and its rank among the floats
    low = jnp.full(goal.shape, ~infinity, jnp.int32)
    high = jnp.full(goal.shape, infinity, jnp.int32)
    return _float_at(lax.fori_loop(0, 32, round_, (low, high))[0])


def _float_at(rank: jax.Array) -> jax.Array:
    """float32 of an int32 rank: the bits of the float, with a negative float's magnitude inverted."""
    bits = jnp.where(rank < 0, rank ^ 0x7FFFFFFF, rank)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _row_sum(values: jax.Array) -> jax.Array:
    """[S, V] -> [S], pairwise at first: more exact than `jnp.sum`, and on a CPU twice as fast."""
    for _ in range(_FOLDS):
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return jnp.sum(values, axis=1)


def _uniform(rows: SamplingRows) -> jax.Array:
    """float32 [S] in [0, 1), each from its row's seed and output index."""

    def one(seed: jax.Array, output_index: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, output_index))

    return jax.vmap(one)(rows.seed, rows.output_index)


def _draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """int32 [S]: where the running sum of weights [S, V] passes uniform [S] times their total."""
    blocks = weights.reshape(weights.shape[0], -1, _BLOCK)
    sums = jnp.sum(blocks, axis=2)
    block, rest = _pass(sums, uniform * jnp.sum(sums, axis=1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _pass(inside, rest)[0]


def _pass(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The entry where the running sum of weights [S, n] exceeds target [S], and what of target is left there.

    Never an entry of weight 0: where rounding lets the running sum fall short, the heaviest.
    """
    running = jnp.cumsum(weights, axis=1)
    passed = (running > target[:, None]) & (weights > 0)
    index = jnp.where(jnp.any(passed, axis=1), jnp.argmax(passed, axis=1), jnp.argmax(weights, axis=1))
    before = jnp.take_along_axis(running - weights, index[:, None], axis=1)[:, 0]
    return index.astype(jnp.int32), target - before


def _argmax(logits: jax.Array) -> jax.Array:
    """int32 [S]: the first of the largest; block by block, which on a CPU is ten times faster."""
    blocks = logits.reshape(logits.shape[0], -1, _BLOCK)
    block = jnp.argmax(jnp.max(blocks, axis=2), axis=1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * _BLOCK + jnp.argmax(inside, axis=1)).astype(jnp.int32)
