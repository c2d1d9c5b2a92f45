"""`fastgen plan`: its figures against hand arithmetic, what does not fit, and what cannot be."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastgen_jax import cli, cli_plan, deviceless, models, plan_worker, roofline
from fastgen_jax.checkpoint import ALIASES
from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.compiler_output import Kernel, count_launches, parse_ptxas, shared_memory
from fastgen_jax.gpus import GPUS
from fastgen_jax.models.hf_config import first_layers
from fastgen_jax.plan import Request, plan, size_text
from fastgen_jax.sizing import Sizing, num_elements
from fastgen_jax.types import EngineConfig

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "plan_table.py"))

needs_plugin = pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))


def sizing(hf_config: dict, gpu: str, tp: int = 1, **config) -> Sizing:
    return Sizing(hf_config, GPUS[gpu], EngineConfig(**config), tp=tp, mem_fraction=0.75)


# The configs that come with the package

PUBLISHED = {  # numbers of parameters, by the files on the Hub
    "smollm2-135m": 134_515_008,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-small-24b": 23_572_403_200,
    "mistral-small3.1-24b-instruct": 23_572_403_200,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "stablelm2-1.6b": 1_644_515_328,
    "olmo-7b": 6_888_095_744,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo3-7b": 7_298_011_136,
    "olmoe-1b-7b": 6_919_161_856,
    "granite3.1-2b-instruct": 2_533_531_648,
    "granite3.1-8b-instruct": 8_170_848_256,
    "smollm3-3b": 3_075_098_624,
    "command-r": 34_980_831_232,
    "command-r-plus": 103_810_674_688,
    "glm4-9b": 9_399_951_360,
    "glm4-9b-0414": 9_400_279_040,
    "exaone3.5-7.8b-instruct": 7_818_448_896,
    "exaone4-32b": 32_003_216_384,
    "seed-oss-36b-instruct": 36_151_104_512,
    "internlm3-8b-instruct": 8_804_241_408,
    "helium1-preview-2b": 2_172_643_840,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_an_aliases_config_has_the_models_parameters(model):
    """Layers are alike, so the second one's parameters are the others' too."""
    config = read_config(model)
    num_layers = models.family(config["model_type"]).from_hf(config).num_layers
    one, two = (num_elements(sizing(first_layers(config, layers), "b200").params) for layers in (1, 2))
    assert one + (num_layers - 1) * (two - one) == PUBLISHED[model]


def test_every_alias_has_a_config_that_its_family_reads():
    folder = ROOT / "fastgen_jax" / "checkpoint" / "configs"
    assert {path.stem for path in folder.glob("*.json")} == set(ALIASES)
    for alias in ALIASES:
        config = read_config(alias)
        family = models.family(config["model_type"])
        whole, short = family.from_hf(config), family.from_hf(first_layers(config, 2))
        assert (short.num_layers, short.windows) == (2, whole.windows[:2])
    assert read_config("facebook/opt-125m") == read_config("OPT-125m") == read_config("opt-125m")


def test_a_config_is_read_from_a_folder_or_a_file(tmp_path):
    config = read_config("opt-125m") | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == config


# Arithmetic by hand: docs/plan.md within 2 %

MODELS = {  # name: layers' matmuls, head, tables of which rows are read, layers, H, K, D, longest context
    "llama2-7b": (32 * (4 * 4096 * 4096 + 3 * 4096 * 11008), 32000 * 4096, 32000 * 4096, 32, 32, 32, 128, 4096),
    "mistral-7b": (
        32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336),
        *(32000 * 4096, 32000 * 4096),
        *(32, 32, 8, 128, 32768),
    ),
    "opt-13b": (40 * (4 * 5120 * 5120 + 2 * 5120 * 20480), 50272 * 5120, 2050 * 5120, 40, 40, 40, 128, 2048),
    "qwen2.5-0.5b": (24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864), 151936 * 896, 0, 24, 14, 2, 64, 32768),
    "llama2-70b": (
        80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672),
        *(32000 * 8192, 32000 * 8192),
        *(80, 64, 8, 128, 4096),
    ),
}
DATASHEETS = {  # memory as CUDA reports it, bytes/s, bfloat16 FLOP/s
    "l4": (22574 * 2**20, 300e9, 121e12),
    "a100-80": (85_100_068_864, 2039e9, 312e12),
    "h200": (139.80 * 2**30, 4.8e12, 989e12),
    "b200": (191_514_411_008, 8e12, 2250e12),
}
DOCS = (ROOT / "docs" / "plan.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCS.splitlines()
    if line.startswith(tuple(f"| {model} |" for model in MODELS))
]


def test_the_documented_table_has_every_model_on_every_gpu():
    assert [(row[0], row[2]) for row in ROWS] == [(model, gpu) for model in MODELS for gpu in DATASHEETS]
    assert all(len(row) == len(SCRIPT["HEAD"]) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[2]}")
def test_the_documented_figures_are_those_of_hand_arithmetic(row):
    model, tp, gpu, budget_gb, weights_gb, step_mb, pool_gb, blocks, tokens, held, *bounds = row
    layers, head, tables, num_layers, num_heads, num_kv_heads, head_dim, longest = MODELS[model]
    memory, bandwidth, flops = DATASHEETS[gpu]
    tp = int(tp)

    def near(text, value):
        assert float(text) == pytest.approx(value, rel=0.02)

    budget, weights = memory * 0.75 * 0.9, 2 * (layers + head + tables) / tp
    near(budget_gb, budget / 1e9)
    near(weights_gb, weights / 1e9)
    kv = 2 * 2 * num_layers * num_kv_heads * head_dim / tp  # K and V, 2 bytes each
    if not blocks:
        assert weights > 0.9 * budget
        lacks, would = re.fullmatch(r"lacks ([\d.]+); (.*) would fit", pool_gb).groups()
        assert float(lacks) == pytest.approx((weights + 128 * kv - budget) / 1e9, rel=0.02)
        if would != "nothing":
            assert weights * tp / int(would.removeprefix("tp ")) < budget
        return
    pool = min(budget - weights - float(step_mb) * 1e6, (256 * longest + 64) * kv)
    near(pool_gb, pool / 1e9)
    near(blocks, pool / (64 * kv))
    assert int(tokens) == 64 * (int(blocks) - 1)
    window_blocks = 4096 // 64 + 1 if model == "mistral-7b" else longest
    for count, length in zip(held.split(" / "), (1024, 4096, 16384), strict=True):
        most = (int(blocks) - 1) // min(length // 64, window_blocks)
        assert count == ("-" if length > longest else str(most))

    one_ms, one_rate, num_seqs, most_ms, most_rate, prompt_ms, prompt_rate, knee = map(float, bounds)
    read, attend = 2 * (layers + head) / tp, 4 * num_layers * num_heads * head_dim / tp
    assert num_seqs == min(256, int(tokens) // 1024)
    for ms, rate, n in ((one_ms, one_rate, 1), (most_ms, most_rate, num_seqs)):
        moved = (read + n * 1025 * kv) / bandwidth
        computed = n * (2 * (layers + head) / tp + 1024 * attend) / flops
        near(ms, max(moved, computed) * 1e3)
        near(rate, n / max(moved, computed))
    moved = (read + 1024 * kv) / bandwidth
    computed = (512 * 2 * layers / tp + 2 * head / tp + 512 * 513 / 2 * attend) / flops
    near(prompt_ms, max(moved, computed) * 1e3)
    near(prompt_rate, 512 / max(moved, computed))
    near(knee, read / bandwidth * flops / (2 * layers / tp))


def test_the_documented_gpus_are_the_built_in_ones():
    assert "\n".join(SCRIPT["gpus_table"]()) in DOCS


def test_a_window_bounds_what_is_read_and_computed():
    gpu, work = GPUS["h200"], sizing(read_config("mistral-7b"), "h200").work
    assert work.windows == (4096,) * 32
    at_window, beyond = (roofline.decode(work, gpu, "bfloat16", 1, context) for context in (4096, 16384))
    assert (beyond.bytes, beyond.flops) == (at_window.bytes, at_window.flops)
    saved = roofline.prompt(replace(work, windows=(None,) * 32), gpu, "bfloat16", 8192).flops
    saved -= roofline.prompt(work, gpu, "bfloat16", 8192).flops
    pairs = 8192 * 8193 // 2 - (4096 * 4097 // 2 + 4096 * 4096)
    assert saved == pairs * 32 * 4 * 32 * 128


@pytest.mark.parametrize("model", ["mistral-7b", "opt-6.7b"])
def test_a_share_of_a_model_is_its_weights_and_pool_divided(model):
    whole, half = (sizing(read_config(model), "b200", tp) for tp in (1, 2))
    assert half.weights_bytes == pytest.approx(whole.weights_bytes / 2, rel=0.01)
    assert half.block_bytes * 2 == whole.block_bytes
    assert half.work.layer_params * 2 == whole.work.layer_params
    assert half.work.pair_flops * 2 == whole.work.pair_flops


# Mixtures of experts

MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}


def test_a_step_reads_the_experts_that_its_tokens_take_and_multiplies_with_two_for_each():
    gpu, found = GPUS["h200"], sizing(MIXTRAL_8X7B, "h200")
    attention, expert, router = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336, 8 * 4096
    rest = 2 * (32 * (attention + router + 2 * 4096) + 4096 + 32000 * 4096)  # with the head, without the table
    assert found.weights_bytes == 2 * 46_702_792_704 == rest + 2 * 32 * 8 * expert + 2 * 32000 * 4096
    work = found.work
    assert [work.read_bytes(n) for n in (1, 3, 4, 512)] == [rest + 2 * 32 * hit * expert for hit in (2, 6, 8, 8)]
    assert work.layer_params == 32 * (attention + router + 2 * expert)
    kv = 2 * 2 * 8 * 128
    one, many = (roofline.decode(work, gpu, "bfloat16", n, 1024) for n in (1, 64))
    assert one.bytes == rest + 2 * 32 * 2 * expert + 32 * 1025 * kv
    assert many.bytes == rest + 2 * 32 * 8 * expert + 32 * 64 * 1025 * kv
    active = 32 * (attention + router + 2 * expert) + 32000 * 4096
    assert many.flops == 64 * (2 * active + 32 * 1024 * 4 * 32 * 128)
    knee = (rest + 2 * 32 * 8 * expert) / 4.8e12 * 989.4e12 / (2 * work.layer_params)
    assert roofline.knee(work, gpu, "bfloat16") == pytest.approx(knee)


def test_layers_with_a_plain_mlp_and_experts_that_all_tokens_take_are_read_whole():
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    others = {"shared_expert_intermediate_size": 32, "mlp_only_layers": [0]}
    work = sizing(TINY | experts | others | {"model_type": "qwen2_moe"}, "h200").work
    attention, shared, routers = 2 * 256 * 256 + 2 * 256 * 128, 3 * 256 * 32, (6 + 1) * 256
    assert work.layer_params == 2 * attention + 3 * 256 * 512 + shared + routers + 2 * 3 * 256 * 64
    assert work.experts_bytes == 2 * 6 * 3 * 256 * 64
    assert work.read_bytes(2) - work.read_bytes(1) == work.experts_bytes // 3


def test_a_share_of_a_mixture_is_a_share_of_each_expert():
    whole, half = (sizing(MIXTRAL_8X7B, "b200", tp).work for tp in (1, 2))
    assert half.experts_bytes * 2 == whole.experts_bytes
    assert half.layer_params * 2 == whole.layer_params + 32 * 8 * 4096  # the router is on both
    with pytest.raises(ValueError, match=r"tensor_parallel=4 cannot share out .*, experts of 14338"):
        sizing(MIXTRAL_8X7B | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 14338}, "b200", 4)


# What the compilers print

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_splits_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_splits_mosaic_gpu_kernel
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 191 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 125.435 ms
"""
RESOURCES = (
    "Resources(smem_scratch_bytes=93184, tmem_scratch_cols=0, tmem_collective_scratch_cols=0, barrier_counts=Counter({"
    "Barrier(arrival_count=256, num_barriers=2, orders_tensor_core=False): 3, "
    "Barrier(arrival_count=1, num_barriers=1, orders_tensor_core=False): 1}), scoped_gmem_semaphores={})"
)


def test_ptxas_and_mosaic_are_read():
    printed = f"noise\n{PTXAS}{PTXAS}{PTXAS.replace('decode_splits', 'combine').replace('12 bytes', '0 bytes')}"
    smem = {"decode_splits": shared_memory(RESOURCES)}
    assert smem == {"decode_splits": 93184 + 8 * 7}
    assert parse_ptxas(printed, smem) == [
        Kernel("combine", "sm_90a", registers=191, spill_bytes=4, stack_bytes=8, smem_bytes=None),
        Kernel("decode_splits", "sm_90a", registers=191, spill_bytes=16, stack_bytes=8, smem_bytes=93240),
    ]


HLO = """\
HloModule jit_step, is_scheduled=true

%fused_add (p0: f32[4], p1: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  %p1 = f32[4]{0} parameter(1)
  ROOT %add.1 = f32[4]{0} add(%p0, %p1)
}

%dynamic-slice-fusion (p2: f32[4]) -> (f32[2], s32[]) {
  %p2 = f32[4]{0} parameter(0)
  ROOT %kernel.1 = (f32[2]{0}, s32[]) custom-call(%p2), custom_call_target="mosaic_gpu_v2"
}

%body (arg.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %x.1 = f32[4]{0} get-tuple-element(%arg.1), index=1
  %y.1 = f32[4]{0} fusion(%x.1, %x.1), kind=kLoop, calls=%fused_add
  ROOT %tuple.1 = (s32[], f32[4]{0}) tuple(%i.1, %y.1)
}

%condition (arg.2: (s32[], f32[4])) -> pred[] {
  %arg.2 = (s32[], f32[4]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%arg.2), index=0
  ROOT %less.1 = pred[] fusion(%i.2), kind=kLoop, calls=%fused_add
}

%commands (x.2: f32[4]) -> f32[4] {
  %x.2 = f32[4]{0} parameter(0)
  %copy.1 = f32[4]{0} copy(%x.2)
  ROOT %all-reduce.1 = f32[4]{0} all-reduce(%copy.1), to_apply=%add
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="x"}
  %zero = s32[] constant(0)
  %start = (s32[], /*index=1*/f32[4]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body
  %z = f32[4]{0} get-tuple-element(%loop), index=1
  %attention = (f32[2]{0}, s32[]) fusion(%z), kind=kCustom, calls=%dynamic-slice-fusion
  %direct = f32[4]{0} custom-call(%z), custom_call_target="mosaic_gpu_v2"
  %call.1 = f32[4]{0} call(%z), to_apply=%commands
  %call.2 = f32[4]{0} call(%call.1), to_apply=%commands
  ROOT %sum = f32[4]{0} fusion(%call.2, %direct), kind=kLoop, calls=%fused_add
}
"""


def test_launches_are_counted():
    assert count_launches(HLO) == {
        "kernels": 9,
        "fusions": 3,  # the loop's body and condition, and the sum
        "copies": 2,
        "collectives": 2,
        "custom_calls": 2,
        "loops": 1,
    }


# What cannot be: one sentence each


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "h201"], "gpu='h201' is not known; did you mean 'h200'?"),
        (["--tp", "0"], "tp=0 must be a whole number from 1 to 64"),
        (["--mem-fraction", "1.5"], "mem_fraction=1.5 must be above 0 and at most 1"),
        (["--dtype", "int8"], "dtype='int8' is not supported; choose float32, bfloat16, float16"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "max_num_seqs=9 is more than max_num_batched"),
        (["--backend", "cuda"], "backend='cuda' does not exist"),
        (["--tp", "3"], "tensor_parallel=3 cannot share out 32 heads over 32 KV heads (MLP 11008); it can be "),
        (["--model", "llama2-70b", "--tp", "24"], "tensor_parallel=24 cannot share out 64 heads over 8 KV heads"),
        (["--max-model-len", "5000"], "max_model_len=5000 is more than the model's 4096 positions"),
        (["--model", "llama9"], "'llama9' is no folder with a config.json, .json file, .gguf file or alias"),
    ],
)
def test_a_mistake_is_one_sentence(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(cli_plan, "plan", in_process)
    monkeypatch.setattr(plan_worker, "compile_only_devices", lambda gpu, count: [None] * count)
    defaults = ["--gpu", "h200", "--model", "llama2-7b"]
    assert cli.main(["plan", *defaults, *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fastgen: error: {message}")
    assert error.count("\n") == 1


def stand_in(largest_step_bytes):
    """Programs that take no compiling."""
    return SimpleNamespace(
        buckets=[512], row_buckets=[256], largest_step_bytes=largest_step_bytes, compile_all=lambda *args: {}
    )


def in_process(model, gpu, *, tp, mem_fraction, show_progress, **config):
    """`plan`, without its process, up to where it would compile."""
    return plan_worker.make_report(Request(model, gpu, tp, mem_fraction, config, show_progress), every_bucket=False)


@pytest.mark.parametrize("part", ["_has_plugin", "_has_ptxas"])
def test_without_the_extra_a_sentence_says_how_to_get_it(part, monkeypatch):
    for name in ("_has_plugin", "_has_ptxas"):
        monkeypatch.setattr(deviceless, name, lambda name=name: name != part)
    with pytest.raises(ValueError) as raised:
        deviceless.compile_only_device(GPUS["h200"])
    assert str(raised.value).endswith("is not installed; get it with: pip install 'fastgen-jax[plan]'")


# What does not fit, by how much, and what would

TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("model", "gpu", "mem_fraction", "config", "short_gb", "would_fit"),
    [
        ("opt-13b", "l4", 0.75, {}, 25.71 + 0.1 - 15.98, [{"tp": 2}]),
        (
            *("llama2-7b", "rtx4090", 0.75, {"dtype": "float32"}),
            *(26.95 + 0.13 - 17.14, [{"tp": 2}, {"dtype": "bfloat16"}]),
        ),
        ("qwen2.5-0.5b", "l4", 0.02, {}, 0.988 - 0.426, [{"mem_fraction": 0.9}]),
        ("qwen2.5-0.5b", "l4", 0.75, {"gpu_memory_utilization": 0.01}, 0.988 - 0.1775, []),
    ],
)
def test_what_does_not_fit_says_what_would(model, gpu, mem_fraction, config, short_gb, would_fit, monkeypatch):
    monkeypatch.setattr(plan_worker, "compile_only_devices", lambda gpu, count: [None] * count)
    found = in_process(model, gpu, tp=1, mem_fraction=mem_fraction, show_progress=False, **config)
    assert not found["fits"]
    assert found["short_bytes"] / 1e9 == pytest.approx(short_gb, rel=0.02)
    assert found["would_fit"] == would_fit
    lines = list(cli_plan.describe(found))
    assert lines[-1].startswith("does not fit: ")
    flags = [f"--{name.replace('_', '-')} {value}" for change in would_fit for name, value in change.items()]
    assert f"; {' or '.join(flags) or 'no other tp, dtype, share or length'} would fit" in lines[-1]
    assert (found["pool_bytes"], found["pool_blocks"], found["buckets"]) == (0, 0, [])


@pytest.mark.parametrize(
    ("config", "step", "expected"),
    [
        ({"max_model_len": 4096}, 1e9, "and the KV of one sequence of 4,096 tokens are 0.68 GB more"),
        ({}, 2.6e9, "2.60 GB for a step and two blocks of KV are 0.17 GB more"),
    ],
)
def test_a_pool_too_small_is_one_sentence(config, step, expected, monkeypatch):
    """Llama-2-7B on an L4 leaves 2.50 GB for a step and the pool; 64 tokens are 34 MB."""
    monkeypatch.setattr(plan_worker, "compile_only_devices", lambda gpu, count: [None] * count)
    programs = stand_in(lambda: int(step))
    monkeypatch.setattr(Sizing, "programs", lambda *args: programs)
    found = in_process("llama2-7b", "l4", tp=1, mem_fraction=0.75, show_progress=False, **config)
    assert expected in found["message"]
    shorter = [change for change in found["would_fit"] if "max_model_len" in change]
    assert len(shorter) == ("max_model_len" in config)
    assert {"mem_fraction": 0.9} in found["would_fit"]
    assert ({"kv_cache_dtype": "fp8"} in found["would_fit"]) == ("max_model_len" in config)
    if shorter:
        assert shorter[0]["max_model_len"] == (int((2.501e9 - step) / (64 * 524288)) - 1) * 64 + 1


def test_8_bits_a_number_of_the_pool_are_half_of_what_is_kept_and_read():
    wide, narrow = (sizing(read_config("llama2-7b"), "h200", kv_cache_dtype=kv) for kv in ("auto", "fp8"))
    assert (wide.kv_dtype.name, narrow.kv_dtype.name) == ("bfloat16", "float8_e4m3fn")
    assert narrow.block_bytes == 64 * 2 * 32 * 32 * 128 == wide.block_bytes // 2
    assert (narrow.work.kv_bytes, narrow.weights_bytes) == (wide.work.kv_bytes // 2, wide.weights_bytes)
    assert narrow.backend.NAME == "mosaic_gpu"
    float32 = sizing(read_config("llama2-7b"), "h200", dtype="float32", kv_cache_dtype="fp8")
    assert float32.backend.NAME == "xla" and "float32" in float32.backend_reason


@pytest.mark.parametrize("num_tokens", [64, 128, 4096])
def test_a_pool_of_any_size_has_bounds(num_tokens, monkeypatch):
    """Llama-2-7B on an L4 leaves 2.50 GB, and 64 tokens are 34 MB: the step leaves room for so many and block 0."""
    monkeypatch.setattr(plan_worker, "compile_only_devices", lambda gpu, count: [None] * count)
    step = sizing(read_config("llama2-7b"), "l4").free_bytes - (num_tokens + 64) * 524288
    programs = stand_in(lambda: step)
    monkeypatch.setattr(Sizing, "programs", lambda *args: programs)
    found = in_process("llama2-7b", "l4", tp=1, mem_fraction=0.75, show_progress=False)
    context, most = min(1024, num_tokens), max(1, num_tokens // 1024)
    assert found["pool_tokens"] == num_tokens
    assert [bound["step"] for bound in found["roofline"]] == [
        *(f"decode, {n} x {context:,} tokens" for n in sorted({1, most})),
        "prompt, 512 tokens",
    ]
    row = SCRIPT["row"](found)
    assert (len(row), row[12]) == (len(SCRIPT["HEAD"]), most)


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(65, 32768), (64, 4097), (130, 32768)])
def test_a_pool_that_holds_a_window_holds_a_sequence_of_any_length(num_blocks, max_model_len, monkeypatch):
    """Mistral-7B's window of 4096 tokens begins anywhere in a block, so that 65 blocks hold it."""
    monkeypatch.setattr(plan_worker, "compile_only_devices", lambda gpu, count: [None] * count)
    step = sizing(read_config("mistral-7b"), "l4").free_bytes - (num_blocks + 1) * 64 * 131072
    programs = stand_in(lambda: step)
    monkeypatch.setattr(Sizing, "programs", lambda *args: programs)
    found = in_process("mistral-7b", "l4", tp=1, mem_fraction=0.75, show_progress=False)
    assert (found["pool_blocks"], found["max_model_len"]) == (num_blocks + 1, max_model_len)
    assert (found["window"], found["window_blocks"]) == (4096, 65)
    assert found["sequences"][16384] == num_blocks // 65
    text = "\n".join(line for row in cli_plan.memory_rows(found) for line in row)
    assert "every layer has a window, the widest of 4,096 tokens: 65 blocks hold one as long as it gets" in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MB"), (34e6, "34.0 MB"), (99.96e6, "100.0 MB"), (100e6, "0.10 GB"), (1.0222e12, "1,022.20 GB")],
)
def test_sizes_are_in_gb_or_mb(num_bytes, text):
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        ({"backend": "xla", "dtype": "float32"}, None),
        ({"dtype": "float32"}, "its kernels are for bfloat16 and float16, not float32, which runs on 'xla'"),
        ({"block_size": 48}, "block_size=48 is not one of 16, 32, 64, 128"),
    ],
)
def test_why_attention_is_not_the_gpus_own_is_told(config, reason, tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    monkeypatch.setattr(plan_worker, "compile_only_devices", lambda gpu, count: [None] * count)
    found = in_process(str(path), "l4", tp=1, mem_fraction=1e-6, show_progress=False, **config)
    assert found["backend_reason"] == reason
    assert list(cli_plan.describe(found))[1] == (f"attention is not mosaic_gpu: {reason}" if reason else "")


@pytest.mark.parametrize(("dies", "status"), [(False, 3), (True, 1)])
def test_that_it_does_not_fit_is_no_breakdown(dies, status, tmp_path, monkeypatch, capsys):
    def plan(*args, **kwargs):
        if dies:
            raise ChildProcessError("the process that compiles for l4 ended with status -9; see above why")
        return in_process(*args, **kwargs)

    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    monkeypatch.setattr(cli_plan, "plan", plan)
    monkeypatch.setattr(cli, "_drop_stdout", lambda: None)
    monkeypatch.setattr(plan_worker, "compile_only_devices", lambda gpu, count: [None] * count)
    assert cli.main(["plan", "--gpu", "l4", "--model", str(path), "--mem-fraction", "1e-6"]) == status
    assert ("ended with status -9" in capsys.readouterr().err) == dies


# The whole command

KEYS = {
    "weights_bytes",
    "pool_bytes",
    "pool_blocks",
    "buckets",
    "kernels",
    "roofline",
    "sequences",
    "step_bytes",
    "fits",
}


@needs_plugin
def test_the_command_tells_what_two_devices_reuse_and_exchange(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    found = plan(str(config), "h200", tp=2, max_num_batched_tokens=16, max_num_seqs=4, show_progress=False)
    (bucket,) = found["buckets"]
    assert bucket["aliased_bytes"] == found["reused_bytes"] == found["pool_bytes"] + 4 * 4 * 256
    assert bucket["exchanged"] == {"all-reduce": {"count": 5, "bytes": 5 * 16 * 256 * 2}}
    assert bucket["link_s"] == pytest.approx(5 * 16 * 256 * 2 / 450e9)  # twice (2 - 1) / 2 of it
    text = "\n".join(cli_plan.describe(found))
    assert "GB copied" not in text and "MB copied" not in text
    assert "Between the 2 devices, at 450 GB/s in one direction:" in text


@needs_plugin
def test_the_command_prints_json_of_one_device(tmp_path):
    config, report = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(TINY))
    flags = ["--max-num-batched-tokens", "16", "--max-num-seqs", "4", "--json"]
    command = "import sys; from fastgen_jax.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", command, "plan", "--model", str(config), "--gpu", "h200", *flags]
    run = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines() == [
        "measuring the largest step: 2 programs to compile",
        "compiling every bucket: 2 programs to compile",
    ]
    report.write_text(run.stdout)
    found = json.loads(run.stdout)
    assert set(found) >= KEYS
    layer = 256 * (4 + 2 + 2) * 64 + 256 * 256 + 3 * 256 * 512 + 2 * 256
    assert found["weights_bytes"] == 2 * (2 * 512 * 256 + 2 * layer + 256)
    assert found["pool_blocks"] == 4 * 256 // 64 + 1
    assert found["pool_bytes"] == found["pool_blocks"] * 64 * 2 * 2 * prod((2, 2, 64))
    assert [bucket["tokens"] for bucket in found["buckets"]] == [16]
    for bucket in found["buckets"]:
        assert bucket["aliased_bytes"] == found["reused_bytes"] == found["pool_bytes"] + 4 * 4 * 256
        assert bucket["temp_bytes"] > 0
        assert bucket["compile_s"] > 0
    if found["backend"] == "mosaic_gpu":
        assert {kernel["arch"] for kernel in found["kernels"]} == {"sm_90a"}
        assert all(0 <= kernel["smem_bytes"] <= GPUS["h200"].limits.shared_per_block for kernel in found["kernels"])
        assert {kernel["spill_bytes"] for kernel in found["kernels"]} == {0}
    lines = list(cli_plan.describe(found))
    assert any(line.startswith("A compile without the device does not autotune") for line in lines)
