"""What the stages measure: at full size on a GPU, in miniature for a rehearsal on a CPU."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Heads(NamedTuple):
    """The heads of a model's attention on one device."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Decodes(NamedTuple):
    """Rows of one query token. lengths: (number of rows, tokens that each attends to)."""

    heads: Heads
    lengths: tuple[tuple[int, int], ...]

    @property
    def kv_lens(self) -> list[int]:
        return [length for num_rows, length in self.lengths for _ in range(num_rows)]

    @property
    def name(self) -> str:
        return " + ".join(f"{num_rows} x {length}" for num_rows, length in self.lengths)


class Prefill(NamedTuple):
    """A chunk of one prompt, after `context` tokens of it."""

    heads: Heads
    chunk: int
    context: int


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    copy_bytes: read, and as many written. matmul_dim: of square matrices.
    parity_cases: shapes drawn; parity_context, parity_chunk: the longest context and prompt chunk in them.
    chained_calls: of attention, in one program.
    pool_tokens: of one layer's pool in the attention stages; longer batches use blocks several times.
    decodes, prefills: in order of worth.
    model: name of a model's config, or the config.
    budget, max_num_seqs, max_model_len, num_blocks: of the engine.
    mixed_rows: numbers of sequences that share a step of `budget` tokens.
    decode_rows: numbers of sequences of `decode_context` tokens that decode together.
    generate: sequences, prompt tokens and output tokens of the runs with and without overlap.
    gap_rows: numbers of decodes, each of `gap_context` tokens, among which a prompt of `gap_prompt` tokens comes.
    gap_steps: steps before and after it. whole_budget: a step's tokens where the prompt is not cut.
    min_time_s: what a timing takes at least.
    """

    copy_bytes: int
    matmul_dim: int
    parity_cases: int
    parity_context: int
    parity_chunk: int
    chained_calls: int
    pool_tokens: int
    decodes: tuple[Decodes, ...]
    prefills: tuple[Prefill, ...]
    model: str | dict[str, Any]
    budget: int
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    mixed_rows: tuple[int, ...]
    decode_rows: tuple[int, ...]
    decode_context: int
    generate: tuple[int, int, int]
    gap_rows: tuple[int, ...]
    gap_context: int
    gap_prompt: int
    gap_steps: int
    whole_budget: int
    min_time_s: float


MHA = Heads("Llama-2-7B", 32, 32, 128)
GQA = Heads("Llama-3-8B", 32, 8, 128)
MQA = Heads("Llama-2-70B, tp 8", 8, 1, 128)

UNIFORM = tuple(((rows, length),) for rows in (1, 8, 64, 256) for length in (512, 4096, 8192 if rows == 256 else 32768))
UNEVEN = (((1, 512), (1, 4096), (1, 16384)), ((255, 256), (1, 16384)))
LARGE = (((1, 32768),), ((8, 32768),), ((64, 4096),), ((256, 8192),))
FEW_HEADS = (((64, 512),), ((1, 32768),))

FULL = Sizes(
    copy_bytes=4 << 30,
    matmul_dim=8192,
    parity_cases=40,
    parity_context=4096,
    parity_chunk=150,
    chained_calls=8,
    pool_tokens=1 << 19,
    decodes=(
        *(Decodes(MHA, lengths) for lengths in UNIFORM + UNEVEN),
        *(Decodes(GQA, lengths) for lengths in LARGE + UNEVEN),
        *(Decodes(MQA, lengths) for lengths in FEW_HEADS + UNEVEN),
    ),
    prefills=tuple(
        Prefill(heads, chunk, context) for heads in (MHA, GQA) for chunk in (512, 2048) for context in (0, 4096, 16384)
    ),
    model="llama2-7b",
    budget=512,
    max_num_seqs=256,
    max_model_len=4096,
    num_blocks=1600,
    mixed_rows=(1, 8, 64, 256),
    decode_rows=(1, 16, 64, 256),
    decode_context=1024,
    generate=(64, 64, 64),
    gap_rows=(8, 15),
    # With these, a step holds either all of a bucket of 4096 tokens or at most 16: few programs to compile.
    gap_context=480,
    gap_prompt=4000,
    gap_steps=64,
    whole_budget=4096,
    min_time_s=0.02,
)

_TINY = Heads("tiny", 4, 2, 16)

REHEARSAL = Sizes(
    copy_bytes=1 << 16,
    matmul_dim=64,
    parity_cases=2,
    parity_context=70,
    parity_chunk=6,
    chained_calls=2,
    pool_tokens=1024,
    decodes=(Decodes(_TINY, ((2, 128),)), Decodes(_TINY, ((1, 64), (1, 512)))),
    prefills=(Prefill(_TINY, 16, 64),),
    model={
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    budget=32,
    max_num_seqs=16,
    max_model_len=256,
    num_blocks=32,
    mixed_rows=(1, 8),
    decode_rows=(1, 8),
    decode_context=64,
    generate=(4, 8, 4),
    gap_rows=(2,),
    gap_context=24,
    gap_prompt=60,
    gap_steps=4,
    whole_budget=64,
    min_time_s=0.0,
)
