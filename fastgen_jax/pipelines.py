"""`pipeline(name)(prompts, ...)`, in the shape of DeepSpeed-MII's `mii.pipeline`."""

import gc
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from fastgen_jax import mii
from fastgen_jax.engine import Engine
from fastgen_jax.intake import Prompt, prompt_list
from fastgen_jax.types import DEFAULT_MODEL, Response, SamplingParams


class Pipeline:
    """Calls an engine with MII's or our own parameter names."""

    def __init__(self, engine: Engine):
        self._engine: Engine | None = engine

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError after `destroy`."""
        if self._engine is None:
            raise RuntimeError("this pipeline has been destroyed; make another with pipeline()")
        return self._engine

    def __call__(self, prompts: Prompt | Seq[Prompt], **fields: Any) -> list[Response]:
        """Responses to one prompt or several, in order.

        Fields are those of `SamplingParams`, and MII's: max_new_tokens (max_tokens), min_new_tokens
        (min_tokens), max_length (prompt and output together, beside max_tokens where both are given),
        do_sample (False is temperature 0; True is the model's own temperature, or 1, unless one is given).
        None is the same as not given, except that max_tokens=None is as many as the context holds.
        """
        every = prompt_list(prompts)
        return self.engine.generate(every, [self.params(prompt, fields) for prompt in every])

    def params(self, prompt: Prompt, fields: Mapping[str, Any]) -> SamplingParams:
        """The SamplingParams that `fields` mean for `prompt`; the model's defaults where they say nothing."""
        engine = self.engine
        ours = mii.to_fields(
            fields, lambda: engine.num_prompt_tokens(prompt), lambda: engine.default_params.temperature
        )
        return engine.default_params.replace(**ours)

    def destroy(self) -> None:
        """Let go of the engine and its memory; the pipeline is of no use afterwards."""
        self._engine = None
        gc.collect()  # an engine and its parts refer to each other


def pipeline(name: str = DEFAULT_MODEL, **config: Any) -> Pipeline:
    """A pipeline for a model; `config` is what `Engine.from_pretrained` takes.

    pipe = pipeline("llama2-7b")
    print(pipe(["DeepSpeed is", "Seattle is"], max_new_tokens=64)[0].text)
    """
    return Pipeline(Engine.from_pretrained(name, **config))
