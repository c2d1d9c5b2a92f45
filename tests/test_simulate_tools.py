"""What simulations are used for: capacity, traces, the paper's table, and the comparison with a real engine."""

import json
import math

import pytest
from tiny import VOCAB_SIZE, tiny_engine

from fastgen_jax import SamplingParams
from fastgen_jax.bench import grid_report, trace
from fastgen_jax.bench.capacity import capacity, cut_requests, max_rate, meets, poisson_runs
from fastgen_jax.bench.grid import Case
from fastgen_jax.bench.load import Request
from fastgen_jax.bench.measured_steps import StepTable
from fastgen_jax.bench.metrics import Record
from fastgen_jax.bench.replay import means, replay
from fastgen_jax.bench.simulator import SimulatedEngine, SimulatorConfig
from fastgen_jax.bench.step_table import measure_table, num_measurements
from fastgen_jax.bench.trace import Arrival, Trace, read_trace, synthetic_trace
from fastgen_jax.bench.validate import validate

CONFIG = SimulatorConfig(max_num_batched_tokens=128, max_num_seqs=16, block_size=16)


class Steady:
    """A system whose steps all take 10 ms."""

    def engine(self, config):
        return SimulatedEngine(self, config, num_blocks=1000, max_model_len=512)

    def device_seconds(self, rows):
        return 0.01

    def host_seconds(self, rows):
        return 0.0


# Capacity


@pytest.mark.parametrize("limit, found", [(3.7, 3.7), (0.0, 0.0), (11.0, 11.0), (99.0, 12.5)])
def test_the_highest_rate_by_bisection(limit, found):
    """Of a run of 11 requests in 1 s when all come at once; a limit beyond 1.25 times that is not seen."""

    def run(rate):
        return [Record(0, 1, (1.0,))] * 10 if rate <= limit else [Record(0, 1, (2.0,))] * 10

    def at_once(rate):
        return [Record(0, 1, (1.0,), "late")] + [Record(0, 1, (1.0,))] * 10 if math.isinf(rate) else run(rate)

    highest = max_rate(at_once, lambda records: all(r.error is None and r.end == 1.0 for r in records))
    assert highest == pytest.approx(min(found, 1.25 * 10), abs=1.25 * 10 / 2**8)


def test_where_all_at_once_pass_the_throughput_is_the_answer():
    assert max_rate(lambda rate: [Record(0, 1, (2.0,))] * 10, lambda records: True) == 5


@pytest.mark.parametrize("num_late, passes", [(0, True), (1, True), (2, False)])
def test_an_sla_is_met_by_99_of_100(num_late, passes):
    in_time, late = Record(0, 512, (1.0, 1.2)), Record(0, 512, (1.1, 1.2))
    assert meets(4)([in_time] * (100 - num_late) + [late] * num_late) is passes


def test_capacity_of_a_steady_system():
    """A step of 128 tokens every 10 ms is 128 prompts of 100 tokens a second, if none may wait long."""
    requests = cut_requests(100, 4, 80, 512, seed=0)
    found = capacity(Steady(), CONFIG, requests, sla=4, rate=200)
    assert 50 < found["max_rate"] < 200
    assert found["replicas"] == math.ceil(200 / found["max_rate"])
    assert found["by_block_size"][16] == found["max_rate"]
    rates = found["by_budget"]
    assert rates[128] == found["max_rate"] < rates[256] <= rates[512]


def test_a_setting_that_cannot_run_has_no_rate():
    config = SimulatorConfig(max_num_batched_tokens=512, max_num_seqs=16, block_size=16, policy="orca")
    requests = [Request([0] * 300, 4)] * 3
    found = capacity(Steady(), config, requests, sla=4)
    assert found["by_budget"][256] is None and found["by_budget"][512] > 0
    assert found["replicas"] is None


def test_poisson_runs_begin_anew():
    run = poisson_runs(Steady(), CONFIG, cut_requests(50, 4, 20, 512, seed=0), seed=3)
    assert run(30.0) == run(30.0) != run(20.0)


# Traces

LINES = [
    {"arrival": 0, "prompt_tokens": 40, "output_tokens": 3, "prefix": "a", "prefix_tokens": 32},
    {"arrival": 0.5, "prompt_tokens": 40, "output_tokens": 3, "prefix": "a", "prefix_tokens": 32},
    {"arrival": 0.5, "prompt_tokens": 40, "output_tokens": 3, "prefix": "b", "prefix_tokens": 32},
    {"arrival": 1.25, "prompt_tokens": 40, "output_tokens": 3},
]


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_from_a_file(tmp_path):
    found = read_trace(write(tmp_path, *LINES, ""))
    assert [(len(r.prompt_token_ids), r.max_tokens, r.arrival) for r in found] == [
        (40, 3, 0),
        (40, 3, 0.5),
        (40, 3, 0.5),
        (40, 3, 1.25),
    ]
    first, second, third, fourth = (r.prompt_token_ids for r in found)
    assert first[:32] == second[:32] and not set(first[32:]) & set(second[32:])
    assert not set(first) & set(third) and not set(first) & set(fourth)
    assert found[-1] == found[3]


def test_a_prefix_that_is_null_is_none(tmp_path):
    found = read_trace(write(tmp_path, GOOD | {"prefix": None, "prefix_tokens": 0}, GOOD | {"prefix": None}))
    first, second = (r.prompt_token_ids for r in found)
    assert len(first) == len(second) == 40 and not set(first) & set(second)


def test_what_a_trace_finds_in_the_prefix_cache(tmp_path):
    """The second request's prefix, 32 of 160 tokens."""
    config = SimulatorConfig(max_num_batched_tokens=128, max_num_seqs=16, block_size=16, prefix_caching=True)
    found = replay(Steady(), config, read_trace(write(tmp_path, *LINES)), sla=4)
    assert found["cached_share"] == 32 / 160
    assert found["summary"]["requests"] == 4 and found["virtual_s"] == pytest.approx(1.28)


GOOD = LINES[3]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: '{' is not JSON"),
        ("[1]", "line 2: '\\[1\\]' is not a JSON object"),
        (GOOD | {"tokens": 1}, "line 2: the field 'tokens' is not known; the fields are arrival, prompt_tokens"),
        ({"arrival": 1, "prompt_tokens": 1}, "line 2: the field 'output_tokens' is missing"),
        (GOOD | {"prompt_tokens": 1.5}, "line 2: prompt_tokens=1.5 must be a whole number"),
        (GOOD | {"prompt_tokens": True}, "line 2: prompt_tokens=True must be a whole number"),
        (GOOD | {"output_tokens": 0}, "line 2: prompt_tokens=40 and output_tokens=0 must both be at least 1"),
        (GOOD | {"arrival": "now"}, "line 2: arrival='now' must be a number"),
        (GOOD | {"arrival": -1}, "line 2: arrival=-1 is no time"),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 2: arrival=nan is no time"),
        (GOOD | {"prefix": "a"}, "line 2: prefix='a' with prefix_tokens=0 must be both there or neither"),
        (GOOD | {"prefix": "a", "prefix_tokens": 41}, "line 2: .* of at most prompt_tokens=40"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path, GOOD, line))


def test_an_empty_trace(tmp_path):
    with pytest.raises(ValueError, match="is empty; it takes at least one request"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(ValueError, match="is empty"):
        Trace([])


def test_a_request_too_long_is_found_before_any_is_served():
    with pytest.raises(ValueError, match="the prompt has 600 tokens; max_model_len=512 allows at most 511"):
        replay(Steady(), CONFIG, Trace([Arrival(0, 5, 1), Arrival(9e9, 600, 1)]), sla=4)


def test_a_synthetic_trace_has_bursts_and_the_means_it_was_asked_for():
    made = synthetic_trace(4_000, 10.0, prompt_mean=600, output_mean=50, max_model_len=4096, seed=5)
    requests = [made[i] for i in range(len(made))]
    arrivals = [r.arrival for r in requests]
    assert arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(400, rel=0.1)
    in_bursts = sum(arrival % 60 < 15 for arrival in arrivals) / len(arrivals)
    assert in_bursts == pytest.approx(0.25 * 2.5, abs=0.05)
    assert sum(len(r.prompt_token_ids) for r in requests) / 4_000 == pytest.approx(600, rel=0.1)
    assert sum(r.max_tokens for r in requests) / 4_000 == pytest.approx(50, rel=0.1)
    begins = {r.prompt_token_ids[0] for r in requests if r.prompt_token_ids[0] < 0}
    assert len(begins) == trace.PREFIXES
    again = synthetic_trace(4_000, 10.0, prompt_mean=600, output_mean=50, max_model_len=4096, seed=5)
    assert again[3_999] == made[3_999]


@pytest.mark.parametrize("values, parts, found", [([1, 3, 5, 7], 2, [2, 6]), ([1, 2, 3], 2, [1, 2.5]), ([4], 10, [4])])
def test_means_of_parts(values, parts, found):
    assert means(values, parts) == found


# The paper's table


def curve(policy: str, *points: tuple[int, float, float, float, float]) -> list[dict]:
    """Points of clients, requests/s, mean latency, effective throughput and P95 gap."""
    names = ("clients", "requests_per_s", "latency_mean", "effective", "gap_p95")
    case = {"model": "m", "gpu": "g", "tp": 1, "prompt_mean": 10, "output_mean": 5, "policy": policy}
    return [case | dict(zip(names, p, strict=True)) | {"effective": dict.fromkeys("246", p[3])} for p in points]


FAST = curve("splitfuse", (1, 1.0, 1.0, 1.0, 0.1), (4, 2.0, 2.0, 2.0, 0.1), (16, 4.0, 4.0, 3.0, 0.1))
SLOW = curve("prefill_first", (1, 1.0, 1.0, 1.0, 0.1), (4, 2.0, 3.0, 1.5, 0.2), (16, 3.0, 8.0, 0.0, 0.4))
NONE = curve("orca", (1, 1.0, 1.0, 1.0, 0.1), (4, 2.0, 3.0, 0.0, 0.2), (16, 2.5, 8.0, 0.0, 0.3))


@pytest.mark.parametrize("value, found", [(1.0, 1.0), (1.5, 1.5), (3.0, 3.0), (4.0, 4.0), (4.5, None), (0.5, None)])
def test_a_latency_between_two_points(value, found):
    assert grid_report.crossing(FAST, "requests_per_s", "latency_mean", value) == found


def test_latencies_at_the_same_throughput():
    assert grid_report.latencies(FAST, SLOW) == (3.0, 3.0, 8.0)


def test_the_rows_of_a_case():
    results = FAST + SLOW + NONE
    name = ("m, g", "10/5")
    assert list(grid_report.effective_rows(results)) == [
        (*name, sla, "3.00", "1.50", "1.00", "2.00", "3.00") for sla in "246"
    ]
    assert list(grid_report.latency_rows(results)) == [(*name, "3.00", "3.00 s", "8.00 s", "2.67")]
    assert list(grid_report.gap_rows(results)) == [(*name, "100 ms", "400 ms", "300 ms", "4.00", "3.00")]
    assert list(grid_report.paper_rows(results)) == []


def test_the_papers_rows(monkeypatch):
    monkeypatch.setattr(grid_report, "PAPER_CASE", Case("m", "g", 1, 10, 5))
    monkeypatch.setattr(grid_report, "PAPER_GAP_CASE", Case("m", "g", 1, 10, 5))
    rows = list(grid_report.paper_rows(FAST + SLOW + NONE))
    assert [row[1:] for row in rows] == [
        ("1.42, 0.63", "2.25", "3.00, 1.50", "2.00"),
        ("1.36, 0.67", "2.03", "-", "-"),  # neither ever takes 9 s
        ("7.00, 14.00", "2.00", "1.20, 1.40", "1.17"),
        ("-", "3.70", "0.10, 0.40", "4.00"),
    ]


# A real engine


def test_a_table_measured_on_an_engine_simulates_it():
    """Times are the machine's affair; what is computed is not."""
    engine = tiny_engine(max_num_batched_tokens=32)
    prompt, params = [[5, 6, 7] * 9], SamplingParams(max_tokens=9, ignore_eos=True)
    before = engine.generate(prompt, params)[0].token_ids
    told = []
    table = StepTable.from_json(json.loads(json.dumps(measure_table(engine, told.append))))
    assert sum(told) == num_measurements(engine)
    assert [size for size, _ in table.bucket_s] == engine._runner.packer.buckets
    assert (table.num_blocks, table.block_size, table.max_num_seqs, table.max_model_len) == (64, 16, 8, 256)
    assert all(seconds >= 0 for _, seconds in table.bucket_s) and table.key_s >= 0 and table.pair_s >= 0
    assert engine.generate(prompt, params)[0].token_ids == before

    requests = [Request([i % VOCAB_SIZE] * 20, 4 + i) for i in range(6)]
    found = validate(engine, table, requests, 2)
    for side in ("real", "simulated"):
        assert (found[side]["requests"], found[side]["failed"]) == (6, 0) and found[side]["duration"] > 0
    rates = (found[side]["output_tokens_per_s"] * found[side]["duration"] for side in ("real", "simulated"))
    assert [round(tokens) for tokens in rates] == [39, 39]
    assert found["ratio"]["gap_p95"] == found["simulated"]["gap_p95"] / found["real"]["gap_p95"]


def test_an_engine_that_holds_too_few_tokens_is_not_measured():
    with pytest.raises(ValueError, match="max_model_len=33 is too short to time; it takes 67"):
        measure_table(tiny_engine(max_model_len=33))
    measure_table(tiny_engine(max_model_len=67))


def test_a_busy_engine_is_not_measured():
    engine = tiny_engine()
    engine.add([5, 6, 7])
    with pytest.raises(ValueError, match="measured on an idle engine"):
        measure_table(engine)
