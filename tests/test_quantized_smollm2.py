"""The real model quantised while it is loaded: how much worse it tells a text, which is what quantising costs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from fastgen_jax import SamplingParams
from fastgen_jax.engine import Engine
from fastgen_jax.params import is_quantized
from fastgen_jax.schemes import GROUPS

pytestmark = [pytest.mark.slow, pytest.mark.model]

DOCS = Path(__file__).parent.parent / "docs"
TEXTS = [(DOCS / name).read_text() for name in ("design.md", "performance.md", "simulate.md")]
LENGTH, CHUNKS = 1023, 2


def engine(quantization: str | None) -> Engine:
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 512, "max_num_seqs": 4, "num_blocks": 128}
    return Engine.from_pretrained(
        dtype="bfloat16", quantization=quantization, warm_up=False, show_progress=False, block_size=64, **sizes
    )


def perplexity(engine: Engine) -> float:
    tokens = [engine.tokenizer(text)["input_ids"] for text in TEXTS]
    prompts = [text[LENGTH * i :][:LENGTH] for text in tokens for i in range(CHUNKS)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    responses = engine.generate(prompts, params, show_progress=False)
    return float(np.exp(-np.mean([token.logprob for r in responses for token in r.prompt_logprobs[1:]])))


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    yield engine(None)


@pytest.fixture(scope="module")
def exact(plain) -> float:
    return perplexity(plain)


def test_int8_costs_next_to_nothing(exact, capsys):
    found = perplexity(engine("int8"))
    with capsys.disabled():
        print(f"\nint8: perplexity {found:.3f} instead of {exact:.3f}, {100 * (found / exact - 1):+.2f} %")
    assert found < exact * 1.005


def rounded_to_fp8(w: np.ndarray) -> np.ndarray:
    """Each output's weights, the largest as 448, to the nearest number of 3 bits of mantissa."""
    scale = np.abs(w).max(1, keepdims=True) / 448
    return (w / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def rounded_to_int4(w: np.ndarray) -> np.ndarray:
    """Sixteen equal steps from the least to the greatest weight of a group, as one would write it down."""
    f, e = w.shape
    groups = w.reshape(f, -1, next(size for size in GROUPS if e % size == 0))
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    step = (high - low) / 15
    zero = np.round(-low / step)
    return ((np.clip(np.round(groups / step) + zero, 0, 15) - zero) * step).reshape(f, e)


@pytest.mark.parametrize(
    ("kind", "by_hand", "at_most"), [("fp8", rounded_to_fp8, 1.03), ("int4", rounded_to_int4, 1.3)]
)
def test_what_fewer_bits_cost_is_what_rounding_to_so_few_costs(kind, by_hand, at_most, plain, exact, capsys):
    """A model of 135M parameters pays for few bits; what is held is that the method is to blame."""
    quantised = engine(kind)
    found = perplexity(quantised)

    def rounded(leaf: Any, weight: jax.Array) -> Any:
        return by_hand(np.asarray(weight, np.float64)).astype(weight.dtype) if is_quantized(leaf) else weight

    original = plain.params
    plain.update_params(jax.tree.map(rounded, quantised.params, original, is_leaf=is_quantized))
    reference = perplexity(plain)
    plain.update_params(original)
    with capsys.disabled():
        print(f"\n{kind}: perplexity {found:.3f} instead of {exact:.3f}, {100 * (found / exact - 1):+.2f} %", end="")
        print(f"; rounded by hand {reference:.3f}, {100 * (reference / exact - 1):+.2f} %")
    assert abs(found / reference - 1) < 0.03
    assert found < at_most * exact
    assert perplexity(plain) == exact
