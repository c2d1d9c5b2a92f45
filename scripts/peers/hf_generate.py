"""transformers' `generate`: padded static batches, each run to its longest output.

Prompts of mixed lengths are tried in two ways when they are first seen, all in one batch and sorted by length in
batches of 16, and the faster of the two is kept.
"""

import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from peers.worker import Contestant, Settings, serve

SORTED_BATCH = 16

Batches = list[list[int]]
"""Indices of the prompts of each batch."""


class StaticBatching:
    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        dtype = getattr(torch, settings.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.notes: list[str] = []
        self._chosen: dict[tuple[tuple[int, ...], tuple[int, ...]], Batches] = {}

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        shape = (tuple(map(len, prompts)), tuple(max_tokens))
        if shape in self._chosen:
            return self._run(prompts, max_tokens, self._chosen[shape])
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        self._chosen[shape] = in_one = [by_length]
        start = time.perf_counter()
        outputs = self._run(prompts, max_tokens, in_one)
        if len(set(zip(*shape, strict=True))) > 1:
            self._try_sorted(prompts, max_tokens, by_length, time.perf_counter() - start)
        return outputs

    def _try_sorted(
        self, prompts: list[list[int]], max_tokens: list[int], by_length: list[int], seconds_in_one: float
    ) -> None:
        in_several = [by_length[i : i + SORTED_BATCH] for i in range(0, len(prompts), SORTED_BATCH)]
        start = time.perf_counter()
        self._run(prompts, max_tokens, in_several)
        seconds = time.perf_counter() - start
        if seconds < seconds_in_one:
            self._chosen[tuple(map(len, prompts)), tuple(max_tokens)] = in_several
        how = f"sorted by length in batches of {SORTED_BATCH}" if seconds < seconds_in_one else "in one padded batch"
        self.notes.append(
            f"{len(prompts)} prompts of mixed lengths run {how}; tried: {seconds_in_one:.1f} s in one padded batch, "
            f"{seconds:.1f} s sorted by length in batches of {SORTED_BATCH}"
        )

    def _run(self, prompts: list[list[int]], max_tokens: list[int], batches: Batches) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        for batch in batches:
            rows = self._run_batch([prompts[i] for i in batch], max(max_tokens[i] for i in batch))
            for i, row in zip(batch, rows, strict=True):
                outputs[i] = row[: max_tokens[i]]
        return outputs

    def _run_batch(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, generation_config=config)
        return out[:, longest:].tolist()


def load(settings: Settings) -> Contestant:
    batching = StaticBatching(settings)
    return Contestant(batching.generate, ("transformers", "torch"), batching.notes)


if __name__ == "__main__":
    serve(load)
