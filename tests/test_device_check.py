"""The device check's plumbing, rehearsed on the CPU: what its stages keep, when they stop, what is made of it."""

import json
import subprocess
import sys
import time
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fastgen_jax.batch import FEW_TOKENS
from fastgen_jax.bench.device import parity, report, run, stages, token_gaps, torch_sdpa
from fastgen_jax.bench.device.attention import flops
from fastgen_jax.bench.device.record import FAILED, NO_TIME, OK, Record, new_entry
from fastgen_jax.bench.device.report import Target
from fastgen_jax.bench.device.sizes import FULL, REHEARSAL, Decodes, Heads, Prefill
from fastgen_jax.bench.device.whole_engine import Session, launch_kinds, least_work, read_bytes
from fastgen_jax.kernels import mosaic_gpu

SCRIPT = Path(__file__).parent.parent / "scripts" / "device_check.py"
ALL = tuple(chain.from_iterable(group.stages for group in run.GROUPS))
H200 = mosaic_gpu.MosaicGpu(mosaic_gpu.Target((9, 0), 132, mosaic_gpu.SMEM_BYTES[9, 0]))


def launch_here(names, path, limit_s, tick):
    """In this process: nothing is imported or compiled anew."""
    stages.run_stages(names, REHEARSAL, path, limit_s)
    tick()
    return ""


@pytest.fixture(scope="module")
def rehearsal():
    saved = []
    result = run.check_device(600, launch_here, lambda result: saved.append(json.dumps(result)))
    return result, [json.loads(text) for text in saved]


def test_a_rehearsal_runs_every_stage(rehearsal):
    result, saved = rehearsal
    stages_run = {name: (entry["status"], bool(entry["rows"])) for name, entry in result["stages"].items()}
    assert stages_run == dict.fromkeys(("peaks", "parity", "decode", "prefill", "engine", "gaps"), (OK, True))
    assert saved[-1] == json.loads(json.dumps(result))
    assert [list(each["stages"])[-1] for each in saved[::2]] == ["parity", "decode", "prefill", "gaps"]
    assert report.is_sound(result["stages"])


def test_a_pool_with_no_room_for_the_prompt_ends_the_stage_gaps():
    session = Session(REHEARSAL)
    engine = session.new_engine(REHEARSAL.whole_budget, num_blocks=5)
    with pytest.raises(RuntimeError, match="ran out of work"):
        token_gaps._gaps(session, engine, num_decodes=2)


BUCKETS = (*FEW_TOKENS, 16, 32)  # the first on a CPU only


def test_a_rehearsal_measures_what_it_should(rehearsal):
    measured = {name: entry["rows"] for name, entry in rehearsal[0]["stages"].items()}
    assert [row["of"] for row in measured["peaks"]] == ["device", "copy", "matmul"]
    assert len(measured["parity"]) == REHEARSAL.parity_cases
    assert [(row["batch"], row["policy"]) for row in measured["decode"]] == [
        (batch, policy)
        for batch in ("2 x 128", "1 x 64 + 1 x 512")
        for policy in ("waves", "proportional", "fixed(8)", "none")
    ]
    assert [(row["kind"], row["tokens"], row["rows"]) for row in measured["engine"] if row["of"] == "step"] == [
        ("decode", 1, 1), ("decode", 8, 8), *(("bucket", bucket, 1) for bucket in BUCKETS),
        ("sequences", 32, 1), ("sequences", 32, 8),
    ]  # fmt: skip
    generated = [(row["overlap"], row["tokens"], row["compiled"]) for row in measured["engine"] if "overlap" in row]
    assert generated == [(False, 16, 0), (True, 16, 0)] * 2
    for row, budget in zip(measured["gaps"], (32, 64), strict=True):
        assert (row["decodes"], row["budget"], row["compiled"]) == (2, budget, 0)
        assert len(row["before"]) == len(row["after"]) == REHEARSAL.gap_steps
    # 60 prompt tokens, at 30 a step beside 2 decodes or all at once; the steps are overlapped, so one more each.
    assert [len(row["during"]) for row in measured["gaps"]] == [3, 2]
    seconds = [row["seconds"] for rows in measured.values() for row in rows if "seconds" in row]
    assert len(seconds) > 20
    assert min(seconds) > 0


def test_a_decode_of_one_is_measured_before_the_other_programs_are_compiled(rehearsal):
    rows = rehearsal[0]["stages"]["engine"]["rows"]
    assert [row["of"] for row in rows[:3]] == ["weights", "step", "compile"]
    assert rows[1]["rows"] == 1
    assert {name for name in rows[2]["programs"] if "backbone" in name} == {f"backbone {bucket}" for bucket in BUCKETS}
    assert rows[-1]["of"] == "command buffers"


def test_a_profiler_that_fails_costs_its_own_answer(monkeypatch):
    monkeypatch.setattr(jax.profiler, "trace", lambda folder: raise_error(None))
    assert launch_kinds(lambda: None) == "unknown (ValueError: head_dim=7)"


def test_the_table_fits_a_screen(rehearsal):
    lines = report.table(rehearsal[0])
    assert all(any(line.startswith(f"== {name}: ok") for line in lines) for name in ALL)
    assert max(map(len, lines)) <= 130
    full = len(FULL.decodes) - len(REHEARSAL.decodes)  # at full size: a line a batch, the other stages' are as many
    assert len(lines) + full <= 65


def measure_first_then(action):
    def measure(stage):
        stage.add(of="first")
        action(stage)
        stage.add(of="second")

    return measure


def raise_error(stage):
    raise ValueError("head_dim=7\nand a trace of where")


def ask_for_more_time_than_there_is(stage):
    stage.check_time(stage.left_s + 1)


@pytest.mark.parametrize(
    ("action", "status", "note"),
    [(raise_error, FAILED, "ValueError: head_dim=7"), (ask_for_more_time_than_there_is, NO_TIME, "")],
)
def test_a_stage_that_stops_keeps_what_it_measured_and_leaves_the_others(tmp_path, action, status, note):
    record = Record(tmp_path / "stages.json", time.monotonic() + 60)
    record.run("stopped", measure_first_then(action))
    record.run("after", measure_first_then(lambda stage: None))
    found = json.loads((tmp_path / "stages.json").read_text())
    assert found["stopped"] | {"seconds": 0} == new_entry(status, note) | {"rows": [{"of": "first"}]}
    assert found["after"]["status"] == OK
    assert found["after"]["rows"] == [{"of": "first"}, {"of": "second"}]


def test_a_stage_without_time_is_not_begun(tmp_path):
    record = Record(tmp_path / "stages.json", time.monotonic())
    record.run("late", measure_first_then(lambda stage: None))
    assert json.loads((tmp_path / "stages.json").read_text()) == {"late": new_entry(NO_TIME)}


def test_a_stage_that_cannot_be_imported_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(stages.STAGES, "peaks", ("no_such_module", "measure"))
    monkeypatch.setitem(stages.STAGES, "prefill", ("torch_sdpa", "measure"))
    monkeypatch.setattr(torch_sdpa, "measure", lambda stage, sizes: stage.add(of="it"))
    stages.run_stages(("peaks", "prefill"), REHEARSAL, tmp_path / "stages.json", 60)
    found = json.loads((tmp_path / "stages.json").read_text())
    assert (found["peaks"]["status"], found["prefill"]["status"]) == (FAILED, OK)
    assert "no_such_module" in found["peaks"]["note"]


def test_the_budget_stops_later_stages_and_keeps_earlier_ones():
    def launch(names, path, limit_s, tick):
        started.append(names)
        path.write_text(json.dumps({name: new_entry(OK) for name in names}))
        time.sleep(0.5)
        return ""

    started = []
    result = run.check_device(0.5, launch, lambda result: None)
    assert started == [("peaks", "parity")]
    assert [entry["status"] for entry in result["stages"].values()] == [OK, OK] + [NO_TIME] * 4
    assert list(result["stages"]) == list(ALL)
    assert "no time" in "\n".join(report.table(result))
    assert not report.is_sound(result["stages"])


WRITE = "import json, sys, time; open(sys.argv[sys.argv.index('--out') + 1], 'w').write(json.dumps({}))"


@pytest.mark.parametrize(
    ("then", "note"),
    [("sys.exit(3)", "the process ended with exit code 3"), ("time.sleep(60)", "killed after 2 s")],
)
def test_a_process_that_crashes_or_hangs_loses_what_it_was_at(monkeypatch, then, note):
    monkeypatch.setattr(run, "GRACE_S", 0.5)
    measured = {"peaks": new_entry(OK), "parity": new_entry("running") | {"rows": [{"ok": True}]}}
    command = [sys.executable, "-c", WRITE.format(measured) + f"; {then}"]
    ticks = []
    group = run.Group(("peaks", "parity", "decode"), 1.0)
    found = run.run_group(group, 2.0, partial(run.launch_process, command=command), ticks.append)
    assert found == {
        "peaks": new_entry(OK),
        "parity": new_entry(FAILED, note) | {"rows": [{"ok": True}]},
        "decode": new_entry(FAILED, note),
    }
    assert ticks


def test_the_command_needs_no_package_to_say_what_it_takes(tmp_path):
    code = f"import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "--budget-s" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--budget-s", "0"], "--budget-s 0 must be a number of seconds above 0"),
        (["--budget-s", "nan"], "--budget-s nan must be a number of seconds above 0"),
        (["--budget-s", "inf"], "--budget-s inf must be a number of seconds above 0"),
        (["--json", "no/such/folder/device.json"], "--json no/such/folder/device.json must be a file in a folder"),
        (["--json", "."], "--json . must be a file in a folder that exists"),
    ],
)
def test_a_mistake_is_refused_at_the_start(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(run, "check_device", None)
    with pytest.raises(SystemExit) as raised:
        run.main(argv)
    assert raised.value.code == 2
    assert f"device_check.py: error: {message}" in capsys.readouterr().err


def test_what_torch_refuses_is_a_note(tmp_path, monkeypatch):
    lines = [{"seconds": 1.0, "bytes": 2}, {"refused": "RuntimeError: no kernel"}]
    done = SimpleNamespace(stdout="\n".join(map(json.dumps, lines)), stderr="a warning", returncode=0)
    asked = []
    monkeypatch.setattr(torch_sdpa.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch_sdpa.subprocess, "run", lambda *args, **kw: asked.extend(json.loads(kw["input"])) or done)
    record = Record(tmp_path / "stages.json", time.monotonic() + 60)
    of_16_gib = Decodes(Heads("", 32, 32, 128), ((256, 4096),))
    cases = [of_16_gib, Decodes(HEADS, ((1, 8),)), Decodes(HEADS, ((2, 8),))]
    record.run("decode", lambda stage: torch_sdpa.measure(stage, cases))
    assert [work[-1] for work in asked] == [[8], [8, 8]]
    entry = record.stages["decode"]
    assert entry["note"] == "torch refused K=2 2 x 8: RuntimeError: no kernel"
    assert entry["rows"] == [{"kv_heads": 2, "batch": "1 x 8", "policy": "torch", "seconds": 1.0, "bytes": 2}]


def test_absent_packages_are_stood_in_for(monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    stages.stand_in_for_missing({"no_such_package": ("no_such_package", "no_such_package.part"), "json": ("json",)})
    from no_such_package.part import anything

    assert issubclass(anything, Exception)
    assert sys.modules["json"] is json


def stage_of(*rows):
    return new_entry(OK) | {"rows": list(rows)}


def test_targets_are_judged_against_the_peaks_measured():
    def decode(megabytes, gb_s, policy="waves"):
        size = megabytes << 20
        return {"policy": policy, "kv_heads": 32, "batch": "b", "bytes": size, "seconds": size / (gb_s * 1e9)}

    def prefill(tflop_s, head_dim=128):
        work = {"flops": tflop_s * 1e12, "seconds": 1.0}
        return {"kv_heads": 8, "head_dim": head_dim, "chunk": 512, "context": 0, **work}

    def step(milliseconds, rows=1):
        return {"of": "step", "kind": "decode", "rows": rows, "context": 1023, "seconds": milliseconds / 1e3}

    measured = {
        "peaks": stage_of(
            {"of": "copy", "bytes": 4e12, "seconds": 1.0}, {"of": "matmul", "flops": 7e14, "seconds": 1.0}
        ),
        "decode": stage_of(decode(257, 3401), decode(257, 3399), decode(256, 100), decode(257, 9, "none")),
        "prefill": stage_of(prefill(421), prefill(419), prefill(9, head_dim=64)),
        "engine": stage_of({"of": "weights", "step_bytes": 12e9}, step(3.74), step(3.76), step(99, rows=16)),
        "gaps": stage_of(
            {"decodes": 8, "budget": 512, "prompt": 4000, "before": [0.01], "during": [0.01, 0.031], "after": [0.029]},
            {"decodes": 8, "budget": 4096, "prompt": 4000, "before": [0.01], "during": [0.1], "after": [0.01]},
        ),
    }
    assert [(target.name.split()[0], target.met) for target in report.targets(measured)] == [
        ("decode", True), ("decode", False),
        ("prefill", True), ("prefill", False),
        ("step", True), ("step", False),
        ("token", True), ("token", False), ("token", True),
    ]  # fmt: skip
    del measured["peaks"]
    assert [target.name for target in report.targets(measured)] == ["token gap, s"] * 3


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("", "", 0.85, 0.85), True),
        (Target("", "", 0.84, 0.85), False),
        (Target("", "", 1.25, 1.25, at_most=True), True),
        (Target("", "", 1.26, 1.25, at_most=True), False),
        (Target("", "", float("nan"), 0.85), False),
    ],
)
def test_a_target_is_met_at_its_limit(target, met):
    assert target.met is met


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        ({"error": 0.019, "value": 2.0, "padding": True}, True),
        ({"error": 0.021, "value": 2.0, "padding": True}, False),
        ({"error": float("nan"), "value": 2.0, "padding": True}, False),
        ({"error": 0.0, "value": 2.0, "padding": False}, False),
        (RuntimeError("the kernel failed\nand more"), False),
    ],
)
def test_a_parity_case_is_wrong_beyond_its_tolerance(found, ok):
    def program(*args):
        if isinstance(found, Exception):
            raise found
        return {name: np.asarray(value) for name, value in found.items()}

    compiled = Future()
    compiled.set_result(("a backend", program))
    row = parity.check(parity.draw(0, REHEARSAL), 0, compiled)
    assert row["ok"] is ok
    assert row.get("failed") == ("RuntimeError: the kernel failed" if isinstance(found, Exception) else None)


def test_parity_draws_every_value_the_kernels_are_for():
    cases = [parity.draw(index, FULL) for index in range(FULL.parity_cases)]
    assert len(set(cases)) == 40
    drawn = {(c.head_dim, c.block_size) for c in cases}
    assert drawn == {(d, b) for d in (64, 80, 96, 128, 256) for b in (16, 32, 64, 128)}
    assert {c.group for c in cases} == {1, 2, 3, 4, 5, 7, 8, 16}
    for case in cases:
        heads = case.num_kv_heads * case.group, case.num_kv_heads
        assert H200.supported(case.head_dim, *heads, case.block_size, case.dtype, "gpu") is None
        assert all(1 <= q_len <= kv_len <= FULL.parity_context for q_len, kv_len in case.rows)


def test_a_parity_batch_gives_every_token_a_slot_of_its_own():
    case = parity.draw(3, FULL)
    slots, cu_q_lens, kv_lens, tables, num_splits = parity.batch(case, 0)
    num_blocks = 3 + sum(-(-kv_len // case.block_size) for kv_len in kv_lens)  # as `compare` makes the pools
    assert len(set(slots)) == len(slots) == sum(kv_lens)
    assert case.block_size <= min(slots)  # block 0 is nobody's
    assert max(slots) < num_blocks * case.block_size
    assert cu_q_lens[-1] == case.num_tokens - case.pad_tokens
    assert len(kv_lens) == len(tables) == len(num_splits) == len(cu_q_lens) - 1 == len(case.rows) + case.pad_rows
    assert num_splits.max() > 1


HEADS = Heads("", 8, 2, 16)


def test_what_attention_takes_is_counted_by_hand():
    assert flops(Prefill(HEADS, chunk=2, context=3)) == 4 * 16 * 8 * (4 + 5)
    assert Decodes(HEADS, ((2, 70), (1, 512))).kv_lens == [70, 70, 512]
    assert torch_sdpa.dense_bytes(Decodes(HEADS, ((2, 70), (1, 512)))) == 2 * 2 * 3 * 512 * 2 * 16


def test_what_a_step_takes_is_counted_by_hand():
    session = Session(REHEARSAL)  # E 32, F 48, V 64, 2 layers, H 4, K 2, D 8
    layer = 32 * (4 + 2 + 2) * 8 + 32 * 32 + 3 * 32 * 48
    weights = 2 * (2 * layer + 32 * 64 + 5 * 32)  # bfloat16; the head and the norms, and not the embedding table
    assert read_bytes(session) == weights
    token = 2 * 2 * 2 * 8 * 2  # K and V, layers, K, D, bfloat16
    assert least_work(session, [(1, 9), (3, 2)]) == {
        "bytes": weights + token * (10 + 5 + 4),
        "flops": 2 * (4 * 2 * layer + 2 * 32 * 64) + 4 * 2 * 4 * 8 * (10 + 3 + 4 + 5),
    }
