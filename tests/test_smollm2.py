"""The real model: in float32 our tokens are those of `transformers.generate`, one prompt at a time.

Both sides load the same GGUF file, each with its own code.
"""

import itertools
import random

import numpy as np
import pytest

from fastgen_jax import SamplingParams, checkpoint
from fastgen_jax.engine import Engine
from fastgen_jax.types import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.model]

TIE = 1e-3
NUM_PROMPTS, NUM_TOKENS = 32, 64
SETTINGS = {
    # A small budget, and a pool that 32 growing sequences overrun.
    "small": {"max_num_batched_tokens": 64, "max_num_seqs": 32, "block_size": 16, "num_blocks": 112},
    "large": {"max_num_batched_tokens": 512, "max_num_seqs": 64, "block_size": 64, "num_blocks": 320, "overlap": False},
}
SOURCES = [
    "The history of the steam engine begins with attempts to pump water out of mines. ",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. Plants use chlorophyll, ",
    "Dear Ms. Alvarez, thank you for your letter of the third of May. I am writing to ask whether ",
    "1. Preheat the oven to 180 degrees. 2. Mix flour, sugar and eggs. 3. Bake for forty minutes. ",
    "In a small village by the sea there lived an old clockmaker who had never once been late. ",
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return some_prompts(NUM_PROMPTS)


def some_prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 900 tokens: English and code, cut anywhere."""
    tokenizer = checkpoint.resolve(DEFAULT_MODEL).tokenizer()
    rng = random.Random(0)
    lengths = [1, 2, 900, *(int(900 ** rng.random()) for _ in range(count - 3))]
    found = []
    for i, length in zip(itertools.cycle(range(NUM_PROMPTS)), lengths, strict=False):
        text = "".join(rng.choices(SOURCES, k=2 + length // 12))
        found.append(tokenizer(text)["input_ids"][i : i + length])
    assert [len(p) for p in found] == lengths
    return found


@pytest.fixture(scope="module")
def reference():
    """SmolLM2 in torch, float32, read by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    path = checkpoint.resolve(DEFAULT_MODEL).path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def hf_greedy(model, prompt: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=-1
    )
    return out[0, len(prompt) :].tolist()


def worst_gap(model, prompt: list[int], output: list[int]) -> float:
    """How far below the best logit a token of `output` lies at most, each after the tokens before it."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].numpy()
    return float(np.max(logits.max(axis=1) - logits[np.arange(len(output)), output]))


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two outputs begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def generate(prompts: list[list[int]], dtype: str = "float32", **settings) -> tuple[list[list[int]], Engine]:
    engine = Engine.from_pretrained(dtype=dtype, max_model_len=1024, warm_up=False, show_progress=False, **settings)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(r.token_ids) for r in engine.generate(prompts, params)], engine


def test_tokens_are_those_of_transformers(prompts, reference, record_property, capsys):
    ours, engine = generate(prompts, **SETTINGS["small"])
    assert engine.stats().preemptions >= 5
    assert engine.stats().free_blocks == engine.stats().blocks
    num_ties = 0
    for prompt, output in zip(prompts, ours, strict=True):
        if output != hf_greedy(reference, prompt):
            assert worst_gap(reference, prompt, output) < TIE
            num_ties += 1
    record_property("ties", num_ties)
    other, _ = generate(prompts, **SETTINGS["large"])
    same = sum(a == b for a, b in zip(ours, other, strict=True))
    for prompt, output, again in zip(prompts, ours, other, strict=True):
        assert output == again or worst_gap(reference, prompt, again) < TIE
    with capsys.disabled():
        print(f"\n{num_ties} of {NUM_PROMPTS} prompts took the other side of a tie; ", end="")
        print(f"{same} of {NUM_PROMPTS} are the same in both settings; {engine.stats().preemptions} preemptions")


def test_share_of_identical_sequences_in_bfloat16_is_reported(prompts, capsys):
    short = [prompt[:60] for prompt in prompts[:8]]
    exact, _ = generate(short, **SETTINGS["small"])
    rounded, _ = generate(short, dtype="bfloat16", **SETTINGS["small"])
    same = sum(a == b for a, b in zip(exact, rounded, strict=True))
    first = [common_prefix(a, b) for a, b in zip(exact, rounded, strict=True)]
    with capsys.disabled():
        print(f"\nbfloat16: {same} of {len(short)} sequences equal float32's; first differences at {first}")
    assert all(len(output) == NUM_TOKENS for output in rounded)
    assert sum(first) / len(first) > 4  # rounding, not another model


def test_agreement_of_a_kv_pool_of_8_bits_with_16_is_reported(capsys):
    """Greedy, the model in bfloat16: whole outputs, and token by token after the output of the 16 bits."""
    given = some_prompts(64)
    exact, engine = generate(given, dtype="bfloat16", **SETTINGS["large"])
    rounded, narrow = generate(given, dtype="bfloat16", kv_cache_dtype="fp8", **SETTINGS["large"])
    first = [common_prefix(a, b) for a, b in zip(exact, rounded, strict=True)]

    def likeliest(engine: Engine) -> list[int]:
        """After each prefix that ends within an output of the 16 bits."""
        texts = [prompt + output for prompt, output in zip(given, exact, strict=True)]
        found = engine.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=1))
        return [one.top[0][0] for r, p in zip(found, given, strict=True) for one in r.prompt_logprobs[len(p) :]]

    same = np.mean(np.array(likeliest(engine)) == likeliest(narrow))
    with capsys.disabled():
        print(
            f"\n8-bit KV: {sum(n == NUM_TOKENS for n in first)} of {len(given)} outputs of {NUM_TOKENS} tokens ", end=""
        )
        print(
            f"are those of 16 bits; the others differ after {np.mean([n for n in first if n < NUM_TOKENS]):.0f} ",
            end="",
        )
        print(f"on average; {100 * same:.1f} % of {len(given) * NUM_TOKENS} likeliest next tokens are the same")
    assert same > 0.9
