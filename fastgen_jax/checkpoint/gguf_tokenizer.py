"""The Hugging Face tokenizer that a GGUF file describes.

Built from the metadata in a tenth of a second. transformers' own conversion needs torch, takes seconds,
and splits the text of every vocabulary that it does not list as GPT-2 does.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fastgen_jax.checkpoint.gguf_file import GGUFHeader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how text is split before merging; None is GPT-2's own split.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_LONE_DIGITS = ("smollm",)
_WHOLE_WORDS_FIRST = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "tekken",
)  # a word in the vocabulary is not merged up


class GGUFTokenizer:
    """A transformers tokenizer to all who use it, but transformers is imported only for what is not defined here.

    Importing it and wrapping the vocabulary takes longer than everything else that is done for a tokenizer, and
    generating text from text needs none of it. A chat template does.
    """

    def __init__(self, backend: Tokenizer, chat_template: str | None, special_tokens: dict[str, str | None]) -> None:
        """special_tokens: transformers' names, such as "eos_token", for the tokens."""
        self._backend = backend
        self._special_tokens = special_tokens
        self.chat_template = chat_template
        self.eos_token = special_tokens["eos_token"]
        self.eos_token_id = None if self.eos_token is None else backend.token_to_id(self.eos_token)

    def __call__(self, text: Any, **options: Any) -> Any:
        if options or not isinstance(text, str):
            return self._full(text, **options)
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> str:
        if any(options.values()) or not isinstance(token_ids, list):
            return self._full.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._backend.decode(token_ids, skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        to_token = self._backend.id_to_token
        return to_token(ids) if isinstance(ids, int) else [to_token(token_id) for token_id in ids]

    def __len__(self) -> int:
        return self._backend.get_vocab_size()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._full, name)

    @cached_property
    def _full(self) -> "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self._special_tokens,
        )


def build_tokenizer(header: GGUFHeader) -> GGUFTokenizer:
    """The tokenizer with its special tokens, beginning-of-sequence rule and chat template.

    Raises ValueError for a vocabulary that is neither byte-level BPE nor SentencePiece BPE, and for a way of
    splitting text that is not in the table above.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    builders: dict[str | None, Callable[[GGUFHeader, dict[str, Any]], Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    if (kind := fields.get("model")) not in builders:
        raise ValueError(f"{header.path} has a tokenizer of kind {kind!r}; gpt2 and llama are supported")
    backend = builders[kind](header, fields)
    special = {
        f"{ours}_token": fields["tokens"][token_id]
        for theirs, ours in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items()
        if (token_id := fields.get(f"{theirs}_token_id")) is not None
    }
    _add_tokens(backend, fields, special)
    _add_bos_and_eos(backend, fields, special)
    return GGUFTokenizer(
        backend, header.metadata.get("tokenizer.chat_template"), {"bos_token": None, "eos_token": None, **special}
    )


def _byte_level(header: GGUFHeader, fields: dict[str, Any]) -> Tokenizer:
    pre = fields.get("pre", "default")
    if pre not in _SPLITS:
        raise ValueError(f"{header.path} splits text by {pre!r}; supported are {', '.join(_SPLITS)}")
    vocab = {token: index for index, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    split = _SPLITS[pre]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre in _LONE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: GGUFHeader, fields: dict[str, Any]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(fields["tokens"])}
    merges = _merges_from_scores(vocab, fields["scores"])
    unk = fields["tokens"][fields.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = fields.get("add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges a SentencePiece BPE vocabulary implies: every token cut in two, the best token first."""
    merges = [
        (-scores[index], cut, len(token) - cut, token)
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(token[:cut], token[cut:]) for _, cut, _, token in sorted(merges, key=lambda merge: merge[:3])]


def _add_tokens(tokenizer: Tokenizer, fields: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that are matched whole, whatever surrounds them; control tokens and those with a role are special too."""
    typed = list(zip(fields["tokens"], fields.get("token_type", ()), strict=False))
    control = dict.fromkeys([*(t for t, kind in typed if kind == _CONTROL), *special.values()])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])


def _add_bos_and_eos(tokenizer: Tokenizer, fields: dict[str, Any], special: dict[str, str]) -> None:
    """Encode with BOS and EOS as the file says; where it is silent, as llama.cpp does."""
    adds_bos = fields.get("model") == "llama" or fields.get("pre") in _WHOLE_WORDS_FIRST
    first = [special["bos_token"]] if fields.get("add_bos_token", adds_bos) and "bos_token" in special else []
    last = [special["eos_token"]] if fields.get("add_eos_token", False) and "eos_token" in special else []
    if not first and not last:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[
            *first,
            "$A",
            *last,
            *(f"{token}:1" for token in first),
            "$B:1",
            *(f"{token}:1" for token in last),
        ],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*first, *last)],
    )
