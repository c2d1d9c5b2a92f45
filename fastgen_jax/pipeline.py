"""`pipeline(name)(prompts, ...)`, in the shape of DeepSpeed-MII's `mii.pipeline`."""

from collections.abc import Sequence as Seq
from typing import Any

from fastgen_jax.checkpoint import DEFAULT_MODEL
from fastgen_jax.engine import Engine, Prompt, prompt_list
from fastgen_jax.types import Response, SamplingParams

NOT_OURS = {
    "stream": "use Engine.stream",
    "streaming_fn": "use Engine.stream",
    "min_length": "use min_tokens, which counts generated tokens only",
    "num_return_sequences": "use n",
    "num_beams": "beam search is not supported",
    "tensor_parallel": "give it to pipeline(), not to the call",
}
"""Names of MII and Hugging Face that are refused, and what to use instead."""


class Pipeline:
    """Calls an engine with MII's or our own parameter names."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __call__(self, prompts: Prompt | Seq[Prompt], **fields: Any) -> list[Response]:
        """Responses to one prompt or several, in order.

        Fields are those of `SamplingParams`, and MII's: max_new_tokens (max_tokens), min_new_tokens
        (min_tokens), max_length (prompt and output together), do_sample (False is temperature 0, True is
        temperature 1 unless one is given), return_full_text.
        """
        every = prompt_list(prompts)
        return self.engine.generate(every, [self.params(prompt, fields) for prompt in every])

    def params(self, prompt: Prompt, fields: dict[str, Any]) -> SamplingParams:
        """The SamplingParams that `fields` mean for `prompt`; the model's defaults where they say nothing."""
        fields = {name: value for name, value in fields.items() if value is not None}
        for name, instead in NOT_OURS.items():
            if name in fields:
                raise TypeError(f"pipeline does not take {name!r}: {instead}")
        for theirs, ours in (("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens")):
            if theirs in fields:
                if ours in fields:
                    raise TypeError(f"{theirs} and {ours} are one parameter; give one of them")
                fields[ours] = fields.pop(theirs)
        if (max_length := fields.pop("max_length", None)) is not None and "max_tokens" not in fields:
            num_prompt = self.engine.num_prompt_tokens(prompt)
            if max_length <= num_prompt:
                raise ValueError(
                    f"max_length={max_length} leaves no room after a prompt of {num_prompt} tokens"
                )
            fields["max_tokens"] = max_length - num_prompt
        do_sample = fields.pop("do_sample", None)
        if do_sample is False:
            if fields.get("temperature"):
                raise ValueError(f"do_sample=False is greedy; temperature={fields['temperature']} is not")
            fields["temperature"] = 0.0
        elif do_sample and not self.engine.default_params.temperature:
            fields.setdefault("temperature", 1.0)
        return self.engine.default_params.replace(**fields)

    def destroy(self) -> None:
        """Let go of the engine and its memory; the pipeline is of no use afterwards."""
        del self.engine


def pipeline(name: str = DEFAULT_MODEL, **config: Any) -> Pipeline:
    """A pipeline for a model; `config` is what `Engine.from_pretrained` takes.

    pipe = pipeline("llama2-7b")
    print(pipe(["DeepSpeed is", "Seattle is"], max_new_tokens=64)[0].text)
    """
    return Pipeline(Engine.from_pretrained(name, **config))
