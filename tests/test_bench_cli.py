"""`fastgen bench`: an engine's policies on the same work, what is written, what is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_engine

import fastgen_jax
from fastgen_jax import cli
from fastgen_jax.batch import FEW_TOKENS
from fastgen_jax.bench import curve, report, result
from fastgen_jax.bench.curve import StepTimes
from fastgen_jax.bench.load import random_corpus
from fastgen_jax.bench.metrics import Record
from fastgen_jax.bench.result import Limits, Results, Run, Step
from fastgen_jax.bench.session import policy_config
from fastgen_jax.bench.workload import CLOSED, LONG_PROMPT, OPEN, Load, Workload, closed_points, point_requests
from fastgen_jax.budget import Curve
from fastgen_jax.step_times import Steps

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench.py"
SMALL = ["--prompt-mean", "8", "--output-mean", "4", "--requests", "3", "--clients", "2", "--quiet"]


def bench(capsys, *args):
    """Exit status, stdout, stderr."""
    return cli.main(["bench", *args]), *capsys.readouterr()


@pytest.fixture
def engines(monkeypatch):
    """Has `fastgen bench` run a tiny model; the configurations it asks for."""
    asked = []

    def from_pretrained(_, *, revision, show_progress, **config):
        asked.append(config)
        engine = tiny_engine(**config)
        engine.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [3 + ord(c) % 100 for c in text])
        return engine

    monkeypatch.setitem(vars(fastgen_jax), "Engine", SimpleNamespace(from_pretrained=from_pretrained))
    return asked


def test_policies_run_on_the_same_work(capsys, engines, tmp_path):
    path = tmp_path / "found.json"
    status, out, err = bench(capsys, *SMALL, "--policy", "splitfuse,orca", "--json", str(path), "--no-prefix-caching")
    assert (status, err) == (0, "")
    assert re.findall(r"^(\w+) +2 clients +3 +0 ", out, re.MULTILINE) == ["splitfuse", "orca"]
    found = result.load([path])
    lengths = [[(record.num_prompt_tokens, record.output_tokens) for record in run.records] for run in found.runs]
    assert lengths[0] == lengths[1]
    for run in found.runs:
        assert sum(step.prompt for step in run.steps) == sum(prompt for prompt, _ in lengths[0])
        assert sum(step.decode for step in run.steps) == sum(output - 1 for _, output in lengths[0])
        assert {step.decode + step.prompt + step.padding for step in run.steps} <= {*FEW_TOKENS, 12, 16}  # buckets
    assert [config["policy"] for config in engines] == ["splitfuse", "orca"]


def test_a_policy_that_computes_prompts_whole_gets_the_budget_it_needs():
    points = closed_points(Workload(100, 10, num_requests=2), (1,), random_corpus())
    longest = max(len(r.prompt_token_ids) + r.max_tokens for r in point_requests(points))
    config = {"max_num_batched_tokens": 64, "dtype": "float32"}
    assert policy_config("splitfuse", config, points) == {**config, "policy": "splitfuse"}
    assert policy_config("orca", config, points) == {**config, "policy": "orca", "max_num_batched_tokens": longest}
    assert policy_config("orca", {}, points)["max_num_batched_tokens"] == longest


def test_the_curve_of_an_engines_steps(capsys, engines, monkeypatch, tmp_path):
    times = StepTimes({1: 0.5, 8: 0.5, 16: 1.0}, knee=8, budget=8, tokens=8, by_sequences={1: 0.5, 2: 0.25})
    monkeypatch.setattr(curve, "measure", lambda engine, show_progress: times)
    path = tmp_path / "curve.json"
    status, out, _ = bench(capsys, "--curve", "--quiet", "--json", str(path))
    assert status == 0
    assert re.search(r"8 +│ 500.0 +│ 16 +│ knee, the budget", out)
    assert json.loads(path.read_text())["by_sequences"] == {"1": 0.5, "2": 0.25}


def test_steps_are_timed_over_their_sequences(monkeypatch):
    engine = tiny_engine(max_num_batched_tokens="auto", max_model_len=12)
    with pytest.raises(ValueError, match="leave that flag out"):
        curve.measure(tiny_engine(), False)
    engine.step_curve, engine.max_num_batched_tokens = Curve({8: 0.5, 16: 1.0}), 16
    monkeypatch.setattr(Steps, "seconds", lambda self, rows, repeats: tuple(new for new, _ in rows))
    assert curve.measure(engine, False) == StepTimes(
        {8: 0.5, 16: 1.0},
        8,
        16,
        16,
        {2: (8, 8), 4: (4, 4, 4, 4), 8: (2,) * 8},  # one is too long, 16 too many
    )


def test_requests_that_can_never_run_are_refused_before_any_runs(capsys, engines):
    args = ["--prompt-mean", "400", "--requests", "1", "--clients", "1", "--quiet"]
    status, out, err = bench(capsys, *args)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"fastgen: error: .* tokens.*\n", err)


# Bad input that shows before anything is loaded

REFUSED = [
    (["--sla", "0"], "an SLA of 0.0 tokens/s is impossible; it must be a number above 0"),
    (["--sla", "2,-4"], "an SLA of -4.0 tokens/s is impossible; it must be a number above 0"),
    (["--sla", "fast"], "argument --sla: 'fast' is not numbers with commas between them"),
    (["--prompt-sla", "0"], "an SLA of 0.0 tokens/s is impossible; it must be a number above 0"),
    (["--ttft-limit", "0"], "a TTFT limit of 0.0 s is impossible; it must be above 0"),
    (["--tpot-limit", "-1"], "a TPOT limit of -1.0 s is impossible; it must be above 0"),
    (["--policy", "splitfuse,vllm"], "policy='vllm' is not known; choose splitfuse, prefill_first, orca"),
    (["--rate", "-1"], "a rate of -1.0 requests/s is impossible; it must be above 0"),
    (["--clients", "0"], "0 clients are too few; it takes at least 1"),
    (["--clients", "1,x"], "argument --clients: '1,x' is not whole numbers with commas between them"),
    (["--requests", "0"], "0 requests are too few; it takes at least 1"),
    (["--prompt-mean", "0"], "a mean length of 0.0 tokens is too short; it must be at least 1"),
    (["--output-cap", "0"], "a longest length of 0 tokens is too short; it must be at least 1"),
    (["--shared-prefix", "-1"], "a shared prefix of -1 tokens is impossible; it must be at least 0"),
    (["--long-prompt", "0"], "a long prompt of 0 tokens is too short; it must be at least 1"),
    (["--prompts-file", "/no/such/file"], "--prompts-file /no/such/file: No such file or directory"),
    (["--prompts-file", "/dev/null"], "--prompts-file /dev/null is empty; it must have text to cut prompts from"),
    (["--as-text"], "--tokenizer, --as-text, --api-key and --name are for a server; name it with --url"),
    (["--url", "x", "--as-text"], "--as-text needs the model's tokenizer; name it with --tokenizer"),
    (["--url", "x", "--dtype", "float32"], "dtype: these are settings of an engine, and --url names a server"),
    (["--from-json", "/no/such/file"], "--from-json /no/such/file: No such file or directory"),
    (["--rate", "1", "--clients", "1"], "argument --clients: not allowed with argument --rate"),
    (["--from-json", "x", "--json", "y"], "--json is for what is measured, and --from-json measures nothing"),
    (["--from-json", __file__], f"--from-json {__file__} is not a file that fastgen bench --json wrote"),
]


@pytest.mark.parametrize(("args", "sentence"), REFUSED)
def test_bad_input_is_one_sentence(capsys, args, sentence):
    assert bench(capsys, *args) == (2, "", f"fastgen: error: {sentence}\n")


def test_an_unknown_model_is_named(capsys):
    status, out, err = bench(capsys, "--model", "no-such-model")
    assert (status, out) == (2, "")
    assert "no-such-model" in err
    assert err.count("\n") == 1


def test_a_script_is_the_same_command():
    run = subprocess.run([sys.executable, SCRIPT, "--sla", "0"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)


# Saved results, tables and plots

DECODES = [Record(0.0, 8, (1.0, 2.0, 3.0, 7.0, 8.0)), Record(0.0, 8, (1.5, 2.5, 7.5, 8.5))]
RESULTS = Results(
    {"command": "fastgen bench", "date": "2024-01-01T00:00:00+00:00"},
    Limits(slas=(2, 0.5), ttft_limit=2.0),
    [
        Run(
            "splitfuse", Load(CLOSED, clients=1), [Record(0.0, 512, (1.0, 2.0))], (Step(1.0, 0, 8, 8),), {"dtype": "x"}
        ),
        Run("splitfuse", Load(CLOSED, clients=2), [Record(0.0, 512, (1.0, 4.0), "it broke off"), DECODES[0]]),
        Run("server", Load(OPEN, rate=0.5), [Record(0.0, 512, (1.0, 2.0), None, 6)]),
        Run("splitfuse", Load(LONG_PROMPT, clients=2), [*DECODES, Record(2.75, 2000, (7.0, 8.0))]),
    ],
)


def test_results_survive_their_file(tmp_path):
    path = tmp_path / "a.json"
    RESULTS.save(path)
    assert result.load([path]) == RESULTS
    assert result.load([path, path]).runs == RESULTS.runs * 2
    run = json.loads(path.read_text())["runs"][0]
    assert run["effective_throughput"] == {"2": 0.0, "0.5": 0.5}
    assert (run["goodput"], run["summary"]["requests_per_s"]) == (0.5, 0.5)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_gaps_around_a_long_prompt():
    # Sent at 2.75, its first token at 7: gaps that end before, and those that begin before 7 and end after 2.75.
    before, meanwhile = report.gaps_around_arrival(RESULTS.runs[3].records)
    assert before == [1.0, 1.0]
    assert meanwhile == [1.0, 4.0, 5.0]


def test_saved_results_are_shown_and_drawn(capsys, tmp_path):
    RESULTS.save(tmp_path / "a.json")
    args = ["--from-json", str(tmp_path / "a.json"), "--plots", str(tmp_path / "plots")]
    status, out, err = bench(capsys, *args)
    assert status == 1  # for a request failed
    table = [line.split() for line in out.splitlines()]
    assert table[1][:11] == ["splitfuse", "1", "client", "1", "0", "0.500", "1.0", "2.000", "1.000", "1.000", "1.000"]
    assert table[1][11:] == ["1000.0", "1000.0", "1000.0", "1000.0", "0.000", "0.500", "0.500"]
    assert "1 failed: it broke off" in out
    names = {"throughput_latency.png", "effective_throughput.png", "token_gaps.png", "batch_composition.png"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())
    assert err.count("wrote ") == 4


def test_saved_results_are_held_to_other_limits(capsys, tmp_path):
    RESULTS.save(tmp_path / "a.json")
    _, out, _ = bench(capsys, "--from-json", str(tmp_path / "a.json"), "--sla", "0.25")
    assert out.splitlines()[0].endswith("eff. at 0.25  goodput")
    assert out.splitlines()[1].split()[-2:] == ["0.500", "0.500"]


def test_plots_without_matplotlib_are_refused_at_once(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = bench(capsys, "--plots", "plots")
    assert (status, err) == (2, "fastgen: error: --plots needs an extra: pip install 'fastgen-jax[plots]'\n")
