"""OpenVINO GenAI's continuous batching, of the model as export_openvino.py wrote it beside the Hugging Face folder."""

import openvino as ov
import openvino_genai as genai

from peers.worker import KV_BYTES, Contestant, Settings, serve

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def load(settings: Settings) -> Contestant:
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if settings.dtype == "bfloat16" and "BF16" not in capabilities:  # it would run in float32 without a word
        raise ValueError(f"OpenVINO runs bfloat16 only on CPUs that have it; this one has {', '.join(capabilities)}")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = KV_BYTES >> 30
    scheduler.enable_prefix_caching = False
    precision = PRECISIONS[settings.dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": settings.threads,
    }
    folder = settings.model.with_name(settings.model.name + "-openvino")
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        configs = [genai.GenerationConfig(max_new_tokens=n, do_sample=False, ignore_eos=True) for n in max_tokens]
        results = pipeline.generate([ov.Tensor([prompt]) for prompt in prompts], configs)
        return [list(result.m_generation_ids[0]) for result in results]

    return Contestant(generate, ("openvino-genai", "openvino"))


if __name__ == "__main__":
    serve(load)
