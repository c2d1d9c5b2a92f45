"""The simulated engine against timelines worked by hand, its step models against hand arithmetic, and its policies."""

import argparse
import json
import random
from dataclasses import replace

import pytest

from fastgen_jax import cli, cli_simulate
from fastgen_jax.bench import grid
from fastgen_jax.bench.deployment import Deployment
from fastgen_jax.bench.drive import closed_loop, open_loop
from fastgen_jax.bench.load import Request
from fastgen_jax.bench.measured_steps import MeasuredSteps, StepTable, interpolate
from fastgen_jax.bench.simulator import SimulatedEngine, SimulatorConfig
from fastgen_jax.bench.step_model import Roofline, keys_and_pairs
from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.cli_flags import given
from fastgen_jax.gpus import GPUS, LINKS
from fastgen_jax.roofline import Work
from fastgen_jax.scheduler import Row, Sequence
from fastgen_jax.sizing import Sizing
from fastgen_jax.types import POLICIES, EngineConfig


class ConstantSteps:
    """Every step takes the same."""

    def __init__(self, device_s: float = 1.0, host_s: float = 0.0):
        self.device_s, self.host_s = device_s, host_s

    def device_seconds(self, rows):
        return self.device_s

    def host_seconds(self, rows):
        return self.host_s


def engine(steps=None, num_blocks=1000, **config) -> SimulatedEngine:
    config = SimulatorConfig(**{"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 4} | config)
    return SimulatedEngine(steps or ConstantSteps(), config, num_blocks=num_blocks, max_model_len=500)


def times(records) -> list[tuple[float, ...]]:
    return [record.token_times for record in records]


def row(start: int, num_new: int) -> Row:
    return Row(Sequence(0, [0], 1), start, num_new, True)


# Timelines. A: 4 prompt tokens and 3 of output, B: 20 and 2; 16 tokens a step

TWO = [Request([0] * 4, 3), Request([0] * 20, 2)]
#   step 1: A4 B12, step 2: A1 B8, step 3: A1 B1
STEPS = {
    # overlap, seconds of the device and the host -> ends of the three steps
    (False, 1.0, 0.0): (1.0, 2.0, 3.0),
    (True, 1.0, 0.0): (1.0, 2.0, 3.0),
    (False, 1.0, 0.25): (1.25, 2.5, 3.75),  # host and device by turns
    (True, 1.0, 0.25): (1.25, 2.25, 3.25),  # the host's part hides behind the device's
    (True, 0.25, 1.0): (2.0, 3.0, 3.25),  # the other way round; nothing is left to plan after the third
}


@pytest.mark.parametrize("overlap, device_s, host_s", STEPS)
def test_two_requests_at_once(overlap, device_s, host_s):
    first, second, third = STEPS[overlap, device_s, host_s]
    records = closed_loop(engine(ConstantSteps(device_s, host_s), overlap=overlap), TWO, 2)
    assert times(records) == [(first, second, third), (second, third)]
    assert [(record.sent, record.num_prompt_tokens) for record in records] == [(0, 4), (0, 20)]


# A: 4 and 3. B, 10 and 2, comes while the first step runs
ARRIVING = [Request([0] * 4, 3), Request([0] * 10, 2, arrival=0.5)]


@pytest.mark.parametrize(
    "policy, a, b",
    [
        ("splitfuse", (1, 2, 3), (2, 3)),  # A4, A1 B10, A1 B1
        ("orca", (1, 2, 3), (2, 3)),
        ("prefill_first", (1, 3, 4), (2, 3)),  # A4, B10, A1 B1, A1
    ],
)
def test_a_request_that_arrives_in_mid_run(policy, a, b):
    records = open_loop(engine(overlap=False, policy=policy), ARRIVING)
    assert times(records) == [a, b]
    assert [record.sent for record in records] == [0, 0.5]


def test_overlapped_a_new_request_waits_for_the_step_already_dispatched():
    records = open_loop(engine(overlap=True), ARRIVING)  # A4 and A1 are dispatched before B is seen
    assert times(records) == [(1, 2, 3), (3, 4)]


def test_one_client_sends_when_its_last_request_has_ended():
    records = closed_loop(engine(overlap=False), [Request([0] * 4, 2)] * 2, 1)
    assert times(records) == [(1, 2), (3, 4)]
    assert [record.sent for record in records] == [0, 2]


def test_the_clock_waits_but_never_goes_back():
    idle = engine()
    idle.wait(5)
    idle.wait(3)
    assert idle.now() == 5 and not idle.has_work and idle.step() == []


def test_too_small_a_pool_preempts_and_every_token_still_comes():
    small = engine(num_blocks=1 + 6, overlap=False)  # 24 tokens; both want 20 in the end
    records = closed_loop(small, [Request([0] * 8, 12)] * 2, 2)
    assert small.num_preemptions > 0 and [len(record.token_times) for record in records] == [12, 12]


def test_a_shared_prefix_is_computed_once():
    prompt = list(range(12))
    cached = engine(prefix_caching=True, overlap=False)
    closed_loop(cached, [Request([*prompt, 100], 1), Request([*prompt, 200], 1)], 1)
    assert (cached.num_tokens, cached.num_cached_tokens) == (13 + 1, 12)


def test_the_same_work_takes_the_same_time():
    rng = random.Random(1)
    work = [Request([0] * rng.randint(1, 99), rng.randint(1, 20), arrival=i * 0.7) for i in range(40)]
    first, second = (open_loop(engine(ConstantSteps(0.3, 0.1)), work) for _ in range(2))
    assert first == second


def test_a_request_that_can_never_run_is_refused():
    with pytest.raises(ValueError, match="the prompt has 500 tokens"):
        engine().check(Request([0] * 500, 1))


@pytest.mark.parametrize(
    "field, message",
    [
        ({"policy": "fifo"}, "policy='fifo' is not known; choose splitfuse, prefill_first, orca"),
        ({"block_size": 0}, "block_size=0 is out of range; for a simulation it must be a whole number from 1"),
        ({"max_num_batched_tokens": "auto"}, "max_num_batched_tokens='auto' is out of range; .* a whole number"),
        ({"max_num_batched_tokens": 4}, "max_num_seqs=256 is more than max_num_batched_tokens=4"),
        ({"max_model_len": 1}, "max_model_len=1 holds no prompt and token"),
    ],
)
def test_a_configuration_that_cannot_be(field, message):
    with pytest.raises(ValueError, match=message):
        SimulatorConfig(**field)


# The roofline

GPU = replace(GPUS["a100-80"], bandwidth_gb_s=1, bf16_tflops=1e-2)  # 1e9 bytes/s and 1e10 operations/s
# Two layers; the head's 100 weights are 200 of the 1,200 bytes
WORK = Work(weights_bytes=1200, layer_params=500, head_params=100, kv_bytes=8, pair_flops=4, windows=(None, None))


def roofline(**options) -> Roofline:
    return Roofline(WORK, GPU, **{"hidden_size": 10, "vocab_size": 10, **options})


GAPS_S = 2 * 16 * 1.5e-6
BYTE_S, FLOP_S, ATTENTION_FLOP_S = 1e-9 / 0.8, 1e-10 / 0.65, 1e-10 / 0.4
HEAD_S = (200 + 160) * BYTE_S  # and four passes over 10 float32 logits


@pytest.mark.parametrize(
    "rows, seconds",
    [
        # one decode at 9: layers by their 1,000 bytes; 10 keys and 1 new one in each of 2 layers
        ([row(9, 1)], 1000 * BYTE_S + 22 * 8 * BYTE_S + HEAD_S),
        # a prompt of 40: layers by 2 * 500 * 40 operations, attention by 820 pairs of 4 operations in 2 layers
        ([row(0, 40)], 40_000 * FLOP_S + 80 * 8 * BYTE_S + 6560 * ATTENTION_FLOP_S + HEAD_S),
        # a chunk of 2 at 100: layers by their bytes, attention by 102 keys in 2 layers and not by 203 pairs
        ([row(100, 2)], 1000 * BYTE_S + 4 * 8 * BYTE_S + 1632 * BYTE_S + HEAD_S),
    ],
)
def test_seconds_of_a_step_by_hand(rows, seconds):
    assert roofline().device_seconds(rows) == pytest.approx(GAPS_S + seconds)


def test_a_step_is_padded_to_its_buckets():
    rows = [row(9, 1)] * 3
    exact, padded = roofline(), roofline(buckets=[16, 32], row_buckets=[4])
    layers = 16_000 * FLOP_S - 1000 * BYTE_S  # of 3 tokens, reading the weights takes longer
    head = 160 * BYTE_S  # the logits of a fourth row
    assert padded.device_seconds(rows) - exact.device_seconds(rows) == pytest.approx(layers + head)


def test_all_reduces_of_tensor_parallelism():
    """4 of them, each 3/2 of 5 tokens' 20 bytes over 0.75 of NVLink's 300 GB/s."""
    rows = [row(0, 5)]
    extra = roofline(tp=4, vocab_size=40).device_seconds(rows) - roofline().device_seconds(rows)
    assert extra == pytest.approx(4 * 15e-6 + 4 * 1.5 * 5 * 20 / 225e9)


def test_the_hosts_part():
    assert roofline().host_seconds([row(9, 1)] * 10) == pytest.approx(0.63e-3 + 10 * 17e-6)


@pytest.mark.parametrize(
    "start, num_new, window", [(0, 1, None), (7, 5, None), (0, 5, 8), (6, 4, 8), (0, 9, 4), (20, 3, 4)]
)
def test_keys_and_pairs_by_counting(start, num_new, window):
    seen = [set(range(max(0, i + 1 - (window or 999)), i + 1)) for i in range(start, start + num_new)]
    assert keys_and_pairs(start, num_new, window) == (len(set().union(*seen)), sum(map(len, seen)))


# The table

TABLE = StepTable(
    bucket_s=((16, 1.0), (32, 1.5), (64, 3.5)),
    row_s=((8, 0.25), (16, 0.5)),
    key_s=0.01,
    pair_s=0.001,
    prompt_s=0.0625,
    tile_tokens=22,
    step_s=0.125,
    step_row_s=0.5,
    num_blocks=11,
    block_size=8,
    max_num_batched_tokens=64,
    max_num_seqs=16,
    max_model_len=100,
    about={},
)


@pytest.mark.parametrize("size, seconds", [(1, 1.0), (16, 1.0), (24, 1.25), (32, 1.5), (48, 2.5), (64, 3.5), (96, 5.5)])
def test_between_measured_sizes_and_beyond(size, seconds):
    assert interpolate(TABLE.bucket_s, size) == seconds


def test_a_curve_of_one_size():
    assert [interpolate(((16, 2.0),), size) for size in (1, 16, 99)] == [2.0, 2.0, 2.0]


def test_seconds_of_a_step_by_the_table():
    model = MeasuredSteps(TABLE, SimulatorConfig(max_num_batched_tokens=64, max_num_seqs=16))
    # 20 tokens in a bucket of 32; 10 rows in one of 16; 9 decodes at 4 see 5 keys each; 11 of a prompt at 2
    rows = [row(4, 1)] * 9 + [row(2, 11)]
    pairs = (11 * 2 + 66) * 2  # 11 queries cost as many as 22
    expected = 1.5 + 0.5 + 45 * 0.01 + 0.0625 + pairs * 0.001 + 0.125 + 10 * 0.5
    assert model.device_seconds(rows) == pytest.approx(expected)
    assert TABLE.prompt_row_s(10, 44) == pytest.approx(0.0625 + (44 * 10 + 44 * 45 / 2) * 0.001)
    assert model.host_seconds(rows) == 0


def test_a_tables_engine_has_the_same_pool_in_other_blocks():
    pools = [TABLE.engine(SimulatorConfig(block_size=size)).block_pool.num_blocks for size in (8, 16, 4)]
    assert pools == [11, 6, 21]
    with pytest.raises(ValueError, match="max_model_len=101 is more than the measured engine's 100"):
        TABLE.engine(SimulatorConfig(max_model_len=101))


def test_a_table_through_a_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE.to_json()))
    assert StepTable.load(path) == TABLE


@pytest.mark.parametrize(
    "change", [{"format": "2"}, {"key_s": None}, {"bucket_s": []}, {"bucket_s": [[32, 1], [16, 1]]}]
)
def test_what_is_no_table(tmp_path, change):
    path = tmp_path / "table.json"
    value = TABLE.to_json() | change
    path.write_text(json.dumps({name: part for name, part in value.items() if part is not None}))
    with pytest.raises(ValueError, match="is not a step table"):
        StepTable.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        StepTable.load(tmp_path / "none.json")


# The paper's claims, in what does not hang on a figure of the model

CASE = grid.Case("llama2-70b", "a100-80", 4, 2600, 128)


@pytest.fixture(scope="module")
def at_16_clients():
    return {policy: grid.run_point(grid.Point(CASE, policy, 16), num_requests=64) for policy in POLICIES}


def test_splitting_prompts_shortens_the_longest_gaps(at_16_clients):
    splitfuse, prefill_first, orca = (at_16_clients[policy]["gap_p95"] for policy in POLICIES)
    assert 3 * splitfuse < min(prefill_first, orca)


def test_splitting_prompts_costs_no_throughput(at_16_clients):
    splitfuse, prefill_first, orca = (at_16_clients[policy]["requests_per_s"] for policy in POLICIES)
    assert splitfuse > 0.97 * max(prefill_first, orca)


def test_more_requests_keep_an_sla_when_prompts_are_split(at_16_clients):
    splitfuse, prefill_first, orca = (at_16_clients[policy]["effective"]["4"] for policy in POLICIES)
    assert splitfuse > 1.3 * max(prefill_first, orca)


def test_a_step_of_few_tokens_reads_the_experts_that_they_take():
    """Two of four for each token; a decode at 9 reads 10 keys and writes one in each of 2 layers."""
    work = replace(WORK, experts_bytes=800, num_experts=4, experts_per_token=2)
    model = Roofline(work, GPU, hidden_size=10, vocab_size=10)
    for num_rows, read in ((1, 1400), (2, 1800), (3, 1800)):
        head_s = (200 + num_rows * 160) * BYTE_S
        seconds = (read + num_rows * 22 * 8) * BYTE_S + head_s
        assert model.device_seconds([row(9, 1)] * num_rows) == pytest.approx(GAPS_S + seconds)


@pytest.mark.parametrize("dense", [[], [1]])
def test_a_deployment_of_a_mixture_is_that_of_all_its_layers(dense, tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "mlp_only_layers": dense,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    deployment = Deployment.of(str(tmp_path), GPUS["h200"])
    whole = Sizing(config, GPUS["h200"], EngineConfig(dtype="bfloat16"), tp=1, mem_fraction=1)
    assert (deployment.work, deployment.weights_bytes) == (whole.work, whole.weights_bytes)


@pytest.mark.parametrize("flags", [["--quantization", "int4"], ["--kv-cache-dtype", "fp8"], ["--dtype", "float32"]])
def test_a_deployment_is_of_what_the_engine_flags_say(flags):
    parser = argparse.ArgumentParser()
    cli_simulate.add_command(parser.add_subparsers())
    args = parser.parse_args(["simulate", "--model", "llama2-7b", "--gpu", "h200", *flags])
    config = EngineConfig(**{"dtype": "bfloat16"} | given(args, EngineConfig))
    whole = Sizing(read_config("llama2-7b"), GPUS["h200"], config, tp=1, mem_fraction=1)
    found = cli_simulate._system(args)
    assert (found.work, found.weights_bytes) == (whole.work, whole.weights_bytes)
    assert found != Deployment.of("llama2-7b", GPUS["h200"])
    assert cli_simulate._config(args, prefix_caching=False) == SimulatorConfig(prefix_caching=False)


def test_deployments_by_their_published_sizes():
    """Weights, and bytes of KV a token: 2 x 32 layers x 4,096 x 2 bytes; 2 x 80 x 2 heads of 128 x 2 on each of 4."""
    seven, seventy = (grid.deployment(*system) for system in [("llama2-7b", "h100", 1), ("llama2-70b", "a100-80", 4)])
    assert seven.weights_bytes == 2 * 6_738_415_616
    assert seven.work.layer_params == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert seven.work.kv_bytes * 32 == 524_288 and seventy.work.kv_bytes * 80 == 81_920
    assert seven.num_blocks(64) == (int(84_942_979_072 * 0.9) - 2 * 6_738_415_616 - 2**30) // (64 * 524_288)


@pytest.mark.parametrize(
    ("model", "size", "layers"),
    [
        ("gpt2", 124_439_808, 12),
        ("exaone3.5-7.8b-instruct", 7_818_448_896, 32),
        ("smollm3-3b", 3_075_098_624, 36),
        ("gemma3-4b", 3_880_263_168, 34),
    ],
)
def test_models_whose_layers_are_told_otherwise_are_cut_to_their_first_layers(model, size, layers):
    """By other names, or one by one; in a text_config."""
    deployment = Deployment.of(model, GPUS["h200"])
    assert (deployment.weights_bytes, len(deployment.work.windows)) == (2 * size, layers)


# Mistakes

CHEAP = ["--model", "llama2-7b", "--gpu", "h100"]


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "it takes --model and --gpu, or --table"),
        (["--model", "llama2-8b", "--gpu", "h100"], "'llama2-8b' is no folder"),
        (["--model", "llama2-7b", "--gpu", "h10"], "gpu='h10' is not known; did you mean 'h100'?"),
        (["--model", "llama2-70b", "--gpu", "h100"], "llama2-70b does not fit: 138.0 GB of weights"),
        (["--model", "llama2-70b", "--gpu", "h100", "--tp", "3"], "tensor_parallel=3 cannot share out 64 heads"),
        ([*CHEAP, "--tp", "0"], "tensor_parallel=0 is out of range"),
        ([*CHEAP, "--sla", "0"], "an SLA of 0.0 tokens/s is impossible"),
        ([*CHEAP, "--rate", "0"], "a rate of 0.0 requests/s is impossible; it must be above 0"),
        ([*CHEAP, "--policy", "fifo"], "policy='fifo' is not known; choose splitfuse, prefill_first, orca"),
        ([*CHEAP, "--backend", "xla"], "backend means nothing to a simulated engine; it has block_size"),
        ([*CHEAP, "--max-model-len", "9999"], "max_model_len=9999 is more than the model's 4096 positions"),
        ([*CHEAP, "--prompt-mean", "5000"], "prompts of 5000 tokens and outputs of up to 256 are more than"),
        ([*CHEAP, "--requests", "0"], "0 requests are too few"),
        ([*CHEAP, "--trace", "nowhere.jsonl"], "the trace nowhere.jsonl cannot be read"),
        ([*CHEAP, "--trace", "synthetic", "--rate", "0"], "a rate of 0.0 requests/s is impossible"),
        (["--table", "nowhere.json"], "nowhere.json cannot be read"),
        (["--grid", "square"], "argument --grid: invalid choice: 'square'"),
        (["--grid", "paper", "--trace", "synthetic"], "not allowed with argument"),
        (["--grid", "guide", "--workers", "0"], "0 workers are too few"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, message):
    assert cli.main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fastgen: error: ") and message in err and err.count("\n") == 1


def test_every_link_is_of_a_known_gpu():
    assert set(LINKS) <= {gpu.name for gpu in GPUS.values()}
