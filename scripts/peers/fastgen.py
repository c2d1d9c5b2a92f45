"""fastgen-jax, as a user gets it."""

from fastgen_jax import Engine, SamplingParams
from peers.worker import KV_BYTES, Contestant, Settings, kv_bytes_per_token, serve

BLOCK_SIZE = 128


def load(settings: Settings) -> Contestant:
    engine = Engine.from_pretrained(
        str(settings.model),
        dtype=settings.dtype,
        block_size=BLOCK_SIZE,
        num_blocks=KV_BYTES // (kv_bytes_per_token(settings) * BLOCK_SIZE),
        show_progress=False,
        prefix_caching=False,  # as for the others
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in max_tokens]
        return [list(response.token_ids) for response in engine.generate(prompts, params, show_progress=False)]

    return Contestant(generate, ("fastgen-jax", "jax"))


if __name__ == "__main__":
    serve(load)
