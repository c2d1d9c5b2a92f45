"""transformers' continuous batching, its manager kept running from batch to batch."""

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from peers.worker import KV_BYTES, Contestant, Settings, kv_bytes_per_token, serve

PAGE_SIZE = 256


def load(settings: Settings) -> Contestant:
    torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.dtype)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, attn_implementation="sdpa").eval()
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=KV_BYTES // (kv_bytes_per_token(settings) * PAGE_SIZE),
            allow_block_sharing=False,
        ),
    )
    manager.start()

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        ids = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, max_tokens, strict=True)]
        finished: dict[str, list[int]] = {}
        while len(finished) < len(ids):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the manager's thread has ended")
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                finished[result.request_id] = list(result.generated_tokens)
        return [finished[request_id] for request_id in ids]

    return Contestant(generate, ("transformers", "torch"))


if __name__ == "__main__":
    serve(load)
