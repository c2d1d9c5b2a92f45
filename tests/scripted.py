"""An engine that speaks a script instead of running a model, and a byte-level tokenizer to read it by.

Everything is the engine's own but the device: the scheduler, the block pool, both loops, the text.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tiny import EOS, VOCAB_SIZE, tiny_engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fastgen_jax.batch import SettingsOf
from fastgen_jax.engine import Engine
from fastgen_jax.scheduler import Row, Sequence, StepPlan
from fastgen_jax.types import Response

SPECIAL = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")
FIRST_BYTE = len(SPECIAL)
FIRST_WORD = FIRST_BYTE + 256
WORDS = ("STOP", "ST", "OP", " the", "OPEN", "👍", "né")
NUM_TOKENS = FIRST_WORD + len(WORDS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTE_CHAR = bytes_to_unicode()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Ids: SPECIAL, EOS among them; the 256 bytes in order; WORDS, which `encode` never uses.

    So ASCII text has the ids that the tiny model knows, and a script can cut a text into tokens as it likes.
    """
    assert SPECIAL[EOS] == "</s>" and VOCAB_SIZE <= FIRST_BYTE + 128
    names = [BYTE_CHAR[byte] for byte in range(256)]
    names += ["".join(BYTE_CHAR[byte] for byte in word.encode()) for word in WORDS]
    vocab = {name: i for i, name in enumerate([*SPECIAL, *names])}
    inner = Tokenizer(models.BPE(vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
    )


TOKENIZER = make_tokenizer()


def tokens(*parts: str | bytes | int) -> list[int]:
    """Token ids: a word of WORDS is one token, another text its bytes, an int itself."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        elif part in WORDS:
            ids.append(FIRST_WORD + WORDS.index(part))
        else:
            ids += [FIRST_BYTE + byte for byte in (part if isinstance(part, bytes) else part.encode())]
    return ids


Script = Callable[[Sequence, int], int]
"""The output token of a sequence at an index."""

Answers = Seq[int] | Mapping[str, Seq[int]] | Script
"""What every prompt is answered, or each by its text, before EOS without end; or any script."""


@dataclass(frozen=True)
class ScriptedStep:
    """A dispatched step, as `runner.Pending`."""

    plan: StepPlan
    num_padding: int
    sampled: list[int]
    error: BaseException | None

    def tokens(self) -> list[int]:
        if self.error is not None:
            raise self.error
        return self.sampled

    def report(self) -> None:
        return None

    def prompt_report(self) -> None:
        return None


class ScriptedRunner:
    """Stands for `ModelRunner`: samples are the script's; that of an unfinished prompt chunk is noise, as ever.

    broken: "dispatch" or "fetch" -> what the next steps raise when they are dispatched, or when their tokens
        are asked for.
    """

    NOISE = FIRST_BYTE + ord("?")

    def __init__(self, script: Script):
        self.script = script
        self.broken: dict[str, BaseException] = {}
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=NUM_TOKENS))
        self.is_broken = False
        self.programs = SimpleNamespace(num_compiled=0)

    def settle(self) -> None:
        """It is alone."""

    def dispatch(
        self, plan: StepPlan, settings_of: SettingsOf, *, report: bool, wants_prompt: Callable[[Row], bool]
    ) -> ScriptedStep:
        if "dispatch" in self.broken:
            raise self.broken["dispatch"]
        sampled = [
            self.script(row.seq, row.seq.num_output_tokens - 1) if row.samples else self.NOISE for row in plan.rows
        ]
        return ScriptedStep(plan, 0, sampled, self.broken.get("fetch"))


def scripted_engine(answers: Answers, tokenizer: Any = TOKENIZER, **config: Any) -> Engine:
    """`tiny_engine` with `answers` in place of its model."""

    def script(seq: Sequence, index: int) -> int:
        answer = answers
        if isinstance(answer, Mapping):
            answer = answer[TOKENIZER.decode(seq.prompt_token_ids, skip_special_tokens=False)]
        return answer[index] if index < len(answer) else EOS

    engine = tiny_engine(tokenizer, **config)
    vars(engine)["_runner"] = ScriptedRunner(answers if callable(answers) else script)
    vars(engine)["_intake"].vocab_size = NUM_TOKENS
    return engine


def run(engine: Engine) -> dict[int, list[Response]]:
    """Step until nothing is left; request id -> its responses, as they came."""
    found: dict[int, list[Response]] = {}
    while engine.has_work:
        for response in engine.step():
            found.setdefault(response.request_id, []).append(response)
    return found


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or is held; every block is free."""
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.blocks
    assert not vars(engine)["_samples"] and not vars(engine)["_requests"]
