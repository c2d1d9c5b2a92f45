"""The comparison with other engines: its work, its checks, its table. No other engine is needed."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parent.parent / "scripts")
sys.path.insert(0, SCRIPTS)
try:
    from peers import comparison, process, report, workload
    from peers.process import Answer
    from peers.worker import Settings, kv_bytes_per_token
    from peers.workload import Case
finally:
    sys.path.remove(SCRIPTS)

TEXT = range(5000)
SMALL = Case("S", "3 small ones", (2, 4, 3), (2, 1, 3))


@pytest.mark.parametrize(
    ("name", "num_prompts", "prompt_lengths", "max_tokens"),
    [
        ("A", 32, (128, 128), (64, 64)),
        ("B", 8, (1024, 1024), (32, 32)),
        ("C", 64, (16, 900), (16, 128)),
        ("D", 1, (128, 128), (256, 256)),
    ],
)
def test_the_cases(name, num_prompts, prompt_lengths, max_tokens):
    case = workload.CASES[name]
    for lengths, (low, high) in ((case.prompt_lengths, prompt_lengths), (case.max_tokens, max_tokens)):
        assert len(lengths) == num_prompts
        assert low <= min(lengths) <= max(lengths) <= high
    assert case.num_output_tokens == sum(case.max_tokens)


def test_the_mixed_case_is_mixed_and_always_the_same():
    case = workload.CASES["C"]
    assert case.prompt_lengths[:4] == (92, 882, 597, 865)
    assert case.max_tokens[:4] == (23, 64, 125, 96)
    assert len(set(case.prompt_lengths)) > 50


@pytest.mark.parametrize("name", workload.CASES)
def test_prompts_are_cut_from_the_text_and_begin_differently(name):
    case = workload.CASES[name]
    prompts = workload.prompts(case, TEXT, 1)
    assert tuple(map(len, prompts)) == case.prompt_lengths
    assert all(prompt == list(range(prompt[0], prompt[0] + len(prompt))) for prompt in prompts)
    assert len({prompt[0] for prompt in prompts}) == len(prompts)


def test_repetitions_differ_and_are_the_same_for_everybody():
    first, again, second = (workload.prompts(SMALL, TEXT, repetition) for repetition in (1, 1, 2))
    assert first == again
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_first_tokens_differ_where_the_text_repeats_itself():
    prompts = workload.prompts(SMALL, [7, 7, 7, 7, 7, 8, 7, 9, 7, 7, 7, 7], 0)
    assert {prompt[0] for prompt in prompts} == {7, 8, 9}


@pytest.mark.parametrize("text", [range(3), [5] * 100, [5, 6] * 50])
def test_a_text_that_cannot_do(text):
    with pytest.raises(ValueError, match=f"a text of {len(text)} tokens is too short or too uniform for case S"):
        workload.prompts(SMALL, text, 0)


def test_the_text_is_english_and_long_enough():
    text = workload.english()
    assert len(text) > 400_000
    assert 'The "if" statement is used for conditional execution' in text


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ([[1, 1], [2]], "2 outputs came for the 3 prompts of case S"),
        ([[1, 1], [2], [3, 3]], "output 2 of case S has 2 tokens, not 3"),
        ([[1, 1], [], [3, 3, 3]], "output 1 of case S has 0 tokens, not 1"),
    ],
)
def test_outputs_of_other_lengths_are_refused(outputs, sentence):
    workload.check_lengths(SMALL, [[1, 1], [2], [3, 3, 3]])
    with pytest.raises(ValueError, match=sentence):
        workload.check_lengths(SMALL, outputs)


def test_where_outputs_differ():
    assert workload.differing([[1, 2, 3], [4, 5], [6, 7]], [[1, 2, 3], [4, 6], [9, 9]]) == {1: 1, 2: 0}


RESULTS = [
    report.Result("float32", "A", "fastgen", 32, 32, [2.0, 4.0, 1.0]),
    report.Result("float32", "A", "vllm_cpu", 31, 32, [1.0, 6.0, 3.0]),  # 0.5, 1.5 and 3 times ours
    report.Result("float32", "D", "vllm_cpu", 1, 1, [16.0]),  # ours never ran
    report.Result("bfloat16", "A", "fastgen", 20, 32, []),
    report.Result("bfloat16", "A", "vllm_cpu", 16, 32, [8.0]),
]


def test_the_table():
    rows = [line for line in report.markdown(RESULTS).splitlines() if line.startswith(("###", "| A", "| D"))]
    assert rows == [
        "### float32",
        "| A: 32 x 128 + 64 | fastgen | 1024.0 |  | 32/32 |",
        "| A: 32 x 128 + 64 | vllm_cpu | 682.7 | 1.50 (0.50..3.00) | 31/32 |",
        "| D: 1 x 128 + 256 | vllm_cpu | 16.0 |  | 1/1 |",
        "### bfloat16",
        "| A: 32 x 128 + 64 | vllm_cpu | 256.0 |  | 16/32 |",
    ]


def test_a_contestant_that_died_is_paired_as_far_as_it_came():
    assert report.ratios(RESULTS[0], report.Result("float32", "A", "hf_generate", 32, 32, [4.0, 4.0])) == [2.0, 1.0]


def test_the_json_keeps_every_time():
    first, *_, fourth, _ = json.loads(json.dumps(report.as_json(RESULTS)))
    assert first == {
        "dtype": "float32",
        "case": "A",
        "title": "32 x 128 + 64",
        "contestant": "fastgen",
        "seconds": [2.0, 4.0, 1.0],
        "output_tokens": 2048,
        "output_tokens_per_second": 1024.0,
        "equal": 32,
        "checked": 32,
    }
    assert fourth["output_tokens_per_second"] is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtypes": ("int8",)}, "there is no dtype 'int8'; choose from float32, bfloat16"),
        ({"cases": ("A", "E")}, "there is no case 'E'; choose from A, B, C, D"),
        ({"contestants": ("sglang",)}, "there is no contestant 'sglang'; choose from fastgen, hf_generate"),
        ({"repeats": 0}, "0 repetitions give no figures; ask for at least 1"),
        ({"threads": 0}, "0 threads cannot have a core each; choose from 1 to"),
        ({"threads": 10_000}, "10000 threads cannot have a core each; choose from 1 to"),
    ],
)
def test_bad_input(fields, sentence):
    valid = {"dtypes": ("float32",), "cases": ("A",), "contestants": ("fastgen",), "repeats": 1, "threads": 1}
    comparison.Plan(**valid)
    with pytest.raises(ValueError, match=sentence):
        comparison.Plan(**valid | fields)


def test_each_goes_first_in_turn():
    assert [comparison.rotated(["a", "b", "c"], by) for by in (0, 1, 2, 3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert comparison.rotated([], 1) == []


def test_kv_bytes(tmp_path):
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(Settings(tmp_path, "float32", 2)) == 2 * 30 * 3 * 64 * 4
    assert kv_bytes_per_token(Settings(tmp_path, "bfloat16", 2)) == 2 * 30 * 3 * 64 * 2


class Fake:
    """A contestant that generates its prompt's first token again and again. vllm_cpu is not there.

    wrong: those that count up from it instead, unless the prompt is alone. dies: those that their third call ends.
    """

    calls: list[tuple[str, str]]
    load_seconds = 0.0
    wrong: frozenset[str]
    dies: frozenset[str]

    def __init__(self, name: str, dtype: str, threads: int) -> None:
        if name == "vllm_cpu":
            raise process.Unavailable("vllm_cpu needs what is absent")
        self.name, self.num_runs, self.versions = name, 0, {"fake": "1"}

    def run(self, prompts, max_tokens):
        self.num_runs += 1
        Fake.calls.append((self.name, str(len(prompts))))
        if self.name in Fake.dies and self.num_runs == 3:
            raise process.Unavailable("it ran out of memory")
        step = int(self.name in Fake.wrong and len(prompts) > 1)
        outputs = [[p[0] + step * i for i in range(n)] for p, n in zip(prompts, max_tokens, strict=True)]
        return Answer(float(self.num_runs), outputs, [f"{self.name} is a fake"] if self.name == "fastgen" else [])

    def close(self):
        Fake.calls.append((self.name, "closed"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def compare(monkeypatch, *contestants: str, wrong=(), dies=(), dtypes=("float32",), repeats=3):
    monkeypatch.setattr(comparison, "Process", Fake)
    monkeypatch.setitem(workload.CASES, "S", SMALL)
    Fake.calls, Fake.wrong, Fake.dies = [], frozenset(wrong), frozenset(dies)
    found = comparison.Comparison(comparison.Plan(tuple(dtypes), ("S",), contestants, repeats, 1), TEXT)
    saved = []
    found.run(lambda: saved.append(len(found.results)))
    return found, saved


def test_a_comparison(monkeypatch):
    found, saved = compare(monkeypatch, "fastgen", "vllm_cpu", "openvino_genai", repeats=2)
    runs = [name for name, what in Fake.calls if what == "3"]
    assert runs == [
        "hf_generate",
        *("fastgen", "openvino_genai"),  # warming up
        *("openvino_genai", "fastgen"),
        *("fastgen", "openvino_genai"),
    ]
    ours = found.results["float32", "S", "fastgen"]
    assert (ours.num_equal, ours.num_checked, ours.seconds) == (3, 3, [2.0, 3.0])
    assert found.notes == ["vllm_cpu needs what is absent", "fastgen (float32): fastgen is a fake"]
    assert found.versions == {"fastgen": {"fake": "1"}, "openvino_genai": {"fake": "1"}}
    assert saved == [2, 2, 2]
    assert Fake.calls[3] == ("hf_generate", "closed")  # before anything is timed
    assert {name for name, what in Fake.calls[-2:] if what == "closed"} == {"fastgen", "openvino_genai"}


def test_wrong_tokens_are_counted_and_reported_in_float32(monkeypatch):
    found, _ = compare(monkeypatch, "fastgen", "openvino_genai", wrong=["openvino_genai"], dtypes=comparison.DTYPES)
    for dtype in comparison.DTYPES:
        assert found.results[dtype, "S", "fastgen"].num_equal == 3
        assert found.results[dtype, "S", "openvino_genai"].num_equal == 1  # the one of one token
    (note,) = (note for note in found.notes if "other tokens" in note)
    assert note == (
        "openvino_genai (float32), case S: other tokens than transformers for "
        "prompt 0 from token 1 on, prompt 2 from token 1 on"
    )


def test_the_reference_alone_settles_what_its_padding_changed(monkeypatch):
    found, _ = compare(monkeypatch, "fastgen", wrong=["hf_generate"])
    assert found.results["float32", "S", "fastgen"].num_equal == 3
    assert not [note for note in found.notes if "other tokens" in note]
    assert [what for name, what in Fake.calls if name == "hf_generate"] == ["3", "1", "1", "closed"]


def test_who_dies_keeps_what_it_did(monkeypatch):
    found, _ = compare(monkeypatch, "fastgen", "openvino_genai", dies=["openvino_genai"])
    assert found.results["float32", "S", "openvino_genai"].seconds == [2.0]
    assert found.results["float32", "S", "fastgen"].seconds == [2.0, 3.0, 4.0]
    assert "openvino_genai (float32) is out from case S on: it ran out of memory" in found.notes
