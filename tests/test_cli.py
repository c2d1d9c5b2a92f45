"""The command line: what goes to stdout, what to stderr, what is refused, and with which exit status."""

import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_engine
import pytest
from fake_engine import FakeEngine

from fastgen_jax import cli, cli_flags
from fastgen_jax.cli_output import Printer
from fastgen_jax.types import EngineConfig, SamplingParams

FAKE = [sys.executable, str(Path(fake_engine.__file__))]
SCRIPT = Path(__file__).parent.parent / "scripts" / "generate.py"


class Terminal(io.StringIO):
    """A stdin that says it is a terminal, and ends with Ctrl-D."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    fake_engine.install(monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


@pytest.fixture
def run(capsys):
    """Runs `fastgen generate ARGS`: exit status, stdout, stderr."""

    def run(*args):
        status = cli.main(["generate", *args])
        return status, *capsys.readouterr()

    return run


def engine():
    return FakeEngine.made


# Flags

SAMPLING = {
    "max_tokens": (["--max-tokens", "none"], None),
    "min_tokens": (["--min-tokens", "7"], 7),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "40"], 40),
    "min_p": (["--min-p", "0.05"], 0.05),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-1.5"], -1.5),
    "frequency_penalty": (["--frequency-penalty", "0.2"], 0.2),
    "logit_bias": (["--logit-bias", "5=-2.5", "--logit-bias", '{"6": 1, "7": 2}'], {5: -2.5, 6: 1, 7: 2}),
    "allowed_token_ids": (["--allowed-token-ids", "1,2", "--allowed-token-ids", "3"], (1, 2, 3)),
    "stop": (["--stop", "END", "--stop", "a b"], ("END", "a b")),
    "stop_token_ids": (["--stop-token-ids", "8,9"], (8, 9)),
    "ignore_eos": (["--ignore-eos"], True),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "seed": (["--seed", "11"], 11),
    "n": (["--n", "2"], 2),
    "logprobs": (["--logprobs", "3"], 3),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "echo": (["--echo"], True),
    "return_full_text": (["--return-full-text"], True),
}
ENGINE = {
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "kv_cache_dtype": (["--kv-cache-dtype", "fp8"], "fp8"),
    "block_size": (["--block-size", "32"], 32),
    "num_blocks": (["--num-blocks", "99"], 99),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "256"], 256),
    "max_step_ms": (["--max-step-ms", "50"], 50.0),
    "max_num_seqs": (["--max-num-seqs", "8"], 8),
    "max_model_len": (["--max-model-len", "1024"], 1024),
    "backend": (["--backend", "reference"], "reference"),
    "quantization": (["--quantization", "int8"], "int8"),
    "tensor_parallel": (["--tp", "4"], 4),
    "expert_parallel": (["--expert-parallel"], True),
    "seed": (["--engine-seed", "3"], 3),
    "overlap": (["--no-overlap"], False),
    "policy": (["--policy", "splitfuse"], "splitfuse"),
    "prefix_caching": (["--no-prefix-caching"], False),
    "warm_up": (["--warm-up"], True),
    "compile_cache": (["--no-compile-cache"], False),
}


def test_every_field_has_a_flag():
    assert set(SAMPLING) == {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(ENGINE) == {f.name for f in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_flag_sets_its_field_and_no_other(run, name):
    flags, value = SAMPLING[name]
    assert run("--json", "hello", *flags)[0] == 0
    assert engine().added == [("hello", FakeEngine.default_params.replace(**{name: value}))]


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_flag_reaches_the_engine_and_no_other_does(run, name):
    flags, value = ENGINE[name]
    assert run("hello", *flags)[0] == 0
    expected = {"warm_up": False, name: value}
    rest = {"name": "smollm2-135m", "revision": None, "show_progress": None}
    loaded = engine().loaded
    if name != "seed":
        assert 0 <= loaded.pop("seed") < 2**31
    assert loaded == rest | expected


def test_what_is_not_given_is_the_models_default(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "default_params", SamplingParams(temperature=0.6, top_k=9, max_tokens=500))
    assert run("hello", "--top-k", "3", "--min-tokens", "200")[0] == 0
    assert engine().added[0][1] == SamplingParams(temperature=0.6, top_k=3, max_tokens=500, min_tokens=200)


def test_the_model_and_its_revision(run):
    assert run("hello", "--model", "llama2-7b", "--revision", "main")[0] == 0
    assert (engine().loaded["name"], engine().loaded["revision"]) == ("llama2-7b", "main")


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        ([], "smollm2-135m"),
        (["opt-125m"], "opt-125m"),
        (["--x", "1", "opt-125m"], "opt-125m"),
        (["opt-125m", "--x", "1"], "opt-125m"),
        (["--model", "opt-125m", "--x", "1"], "opt-125m"),
    ],
)
def test_a_command_without_a_prompt_takes_the_model_first_or_by_name(argv, model):
    parser = cli.Parser()
    parser.add_argument("--x")
    cli_flags.add_model_argument(parser, positional=True)
    assert parser.parse_args(argv).model == model


def test_a_model_given_twice_is_refused():
    parser = cli.Parser()
    cli_flags.add_model_argument(parser, positional=True)
    with pytest.raises(ValueError, match="not allowed with"):
        parser.parse_args(["opt-125m", "--model", "opt-350m"])


# Text


def test_stdout_has_the_text_alone_and_stderr_the_speed(run):
    status, out, err = run("the sky is")
    assert (status, out) == (0, " THE SKY IS\n")
    talk, loaded, summary = err.splitlines()
    assert talk == "a library talks"
    assert loaded.startswith("smollm2-135m loaded in ")
    assert summary == (
        "1 prompt (3 tokens), 3 generated (length), the first after 0.50 s, the others in 1.00 s (2.0 tokens/s)"
    )


def test_quiet_says_nothing_of_its_own(run):
    assert run("the sky", "--quiet") == (0, " THE SKY\n", "a library talks\n")
    assert engine().loaded["show_progress"] is False


def test_one_prompt_streams_as_it_comes():
    process = subprocess.Popen([*FAKE, "generate", "a b c d e f g h i j " * 20], stdout=subprocess.PIPE)
    first = os.read(process.stdout.fileno(), 100)
    assert process.poll() is None
    assert first.startswith(b" A")
    rest = process.communicate()[0]
    assert (first + rest).split() == b"A B C D E F G H I J ".split() * 12 + b"A B C D E F G H".split()


def test_a_text_that_ends_in_a_newline_gets_no_second(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "script", {"p": ["one\n", "two\n"]})
    assert run("p")[1] == "one\ntwo\n"


@pytest.mark.parametrize("flag", ["--echo", "--return-full-text"])
def test_an_echo_begins_with_the_prompt(run, flag):
    assert run("the sky", flag)[1] == "the sky THE SKY\n"


def test_samples_are_printed_in_order(run):
    _, out, err = run("hi", "--n", "3")
    assert out == " HI #0\n\n HI #1\n\n HI #2\n"
    assert "1 prompt (3 tokens), 3 generated in " in err


def test_characters_that_stdout_lacks_are_replaced():
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*FAKE, "generate", "caf\u00e9 \u732b"], capture_output=True, env=env)
    assert (done.returncode, done.stdout) == (0, b" CAF? ?\n")


# Where prompts come from


def test_a_prompt_from_stdin_loses_its_last_newline(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines \n"))
    assert run()[0] == 0
    assert engine().added[0][0] == "two\nlines "


@pytest.mark.parametrize("source", ["file", "-"])
def test_a_file_has_one_prompt_to_a_line(run, monkeypatch, tmp_path, source):
    text = "three words here\r\n\none\ntwo words"
    path = tmp_path / "prompts.txt"
    path.write_text(text, newline="")
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    status, out, err = run("--prompts", str(path) if source == "file" else "-")
    assert (status, out) == (0, " THREE WORDS HERE\n\n ONE\n\n TWO WORDS\n")
    assert "3 prompts (9 tokens), 6 generated in " in err


def write_jsonl(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_jsonl_file_has_prompts_token_ids_and_conversations_with_their_own_params(run, tmp_path):
    messages = [{"role": "user", "content": "hello\u2028you"}]
    path = write_jsonl(
        tmp_path,
        '{"prompt": "a b c", "max_tokens": 2, "logit_bias": {"7": -1}}',
        '{"prompt": [70, 80, 90], "seed": 4}',
        json.dumps({"messages": messages, "stop": "x"}, ensure_ascii=False),
    )
    status, out, _ = run("--prompts", path, "--top-k", "5", "--max-tokens", "9")
    assert (status, out) == (0, " A B\n\n 70 80 90\n\n HELLO YOU\n")
    usual = SamplingParams(top_k=5, max_tokens=9)
    assert engine().added == [
        ("a b c", usual.replace(max_tokens=2, logit_bias={7: -1})),
        ([70, 80, 90], usual.replace(seed=4)),
        ([0], usual.replace(stop="x")),
    ]
    assert engine().chats == [messages]


def test_json_has_one_object_for_each_sample_in_order(run, tmp_path):
    path = write_jsonl(tmp_path, '{"prompt": "a b c"}', '{"prompt": "d", "n": 2, "logprobs": 1}')
    status, out, _ = run("--prompts", path, "--json")
    first, second, third = map(json.loads, out.splitlines())
    assert status == 0
    assert first == {
        "prompt_index": 0,
        "sample_index": 0,
        "text": " A B C",
        "token_ids": [0, 1, 2],
        "finish_reason": "length",
        "num_prompt_tokens": 3,
        "num_generated_tokens": 3,
        "num_preemptions": 0,
        "timings": {"first_token": 0.5, "queue": 0.25, "tokens": [0.5, 0.75], "total": 1.5},
    }
    assert [(r["prompt_index"], r["sample_index"], r["text"]) for r in (second, third)] == [
        (1, 0, " D #0"),
        (1, 1, " D #1"),
    ]
    assert second["logprobs"] == [{"token_id": 0, "logprob": -0.5, "top": [[0, -0.5], [9, -2.0]]}]


def test_json_of_prompt_logprobs_begins_with_none(run):
    entry = json.loads(run("a", "--json", "--prompt-logprobs", "1")[1])
    assert entry["prompt_logprobs"][0] is None
    assert entry["prompt_logprobs"][1]["token_id"] == 0


def test_chat_makes_a_prompt_a_message_of_the_users(run):
    assert run("hello", "--chat")[1] == " HELLO\n"
    assert engine().chats == [[{"role": "user", "content": "hello"}]]


def test_a_plain_prompt_is_continued_even_by_a_chat_model(run):
    assert run("hello")[0] == 0
    assert engine().chats == []


def test_system_implies_chat_and_yields_to_a_conversations_own(run, tmp_path):
    own = [{"role": "system", "content": "rhyme"}, {"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path, '{"prompt": "hello"}', json.dumps({"messages": own}))
    assert run("--prompts", path, "--system", "be brief")[0] == 0
    brief = {"role": "system", "content": "be brief"}
    assert engine().chats == [[brief, {"role": "user", "content": "hello"}], own]


# What is refused


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["hi", "--foo"], "--foo"),
        (["hi", "--top-p", "x"], "argument --top-p: 'x' is not a number"),
        (["hi", "--max-tokens", "many"], "argument --max-tokens: 'many' is not a whole number or none"),
        (["hi", "--logit-bias", "5"], "argument --logit-bias: '5' is not ID=BIAS or a JSON object"),
        (["hi", "--logit-bias", '{"a": 1}'], "argument --logit-bias: "),
        (["hi", "--stop-token-ids", "1;2"], "argument --stop-token-ids: '1;2' is not token ids"),
        (["hi", "--top-p", "3"], "top_p=3.0 is out of range"),
        (["hi", "--temp", "1"], "--temp"),
        (["hi", "--dtype", "int8"], "dtype='int8' is not supported; choose float32"),
        (["hi", "--min-tokens", "200"], "min_tokens=200 is more than max_tokens=128"),
        (["hi", "--logprobs", "1"], "with --json only"),
        (["hi", "--prompts", "x.txt"], "a prompt and --prompts were given"),
        (["hi", "--system", "s", "--no-chat"], "--no-chat forbids"),
        (["too long"], "error: the prompt does not fit"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: No such file"),
        (["\udcff"], "is not valid UTF-8"),
        ([], "stdin is empty; give one as an argument, on stdin, or many with --prompts FILE"),
        (["--prompts", "-"], "stdin is empty"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run, args, said):
    status, out, err = run(*args)
    *_, last = err.splitlines()
    assert (status, out) == (2, "")
    assert last.startswith("fastgen: error: ")
    assert said in last
    assert "Traceback" not in err and "usage:" not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON: "),
        ('["a"]', 'a line is a JSON object with "prompt" or "messages"'),
        ("{}", '"prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "one of them"),
        ('{"prompt": "a", "temprature": 1}', "SamplingParams has no field 'temprature'"),
        ('{"prompt": "a", "top_p": 3}', "top_p=3 is out of range"),
        ('{"prompt": "a", "min_tokens": 9, "max_tokens": 4}', "min_tokens=9 is more than max_tokens=4"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias maps token ids to numbers"),
        ('{"prompt": [1, "a"]}', '"prompt" is a string or a list of token ids'),
        ('{"prompt": null}', '"prompt" is a string or a list of token ids'),
        ('{"messages": [{"role": "user"}]}', '"messages" is a list of'),
        ('{"prompt": "too long"}', "the prompt does not fit"),
        ('{"prompt": "a", "logprobs": 2}', "with --json only"),
    ],
)
def test_a_mistake_in_a_line_names_the_line(run, tmp_path, line, said):
    path = write_jsonl(tmp_path, '{"prompt": "fine", "echo": true}', "", line)
    status, out, err = run("--prompts", path)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"fastgen: error: {path} line 3: ")
    assert said in err


def test_an_empty_file_holds_no_prompt(run, tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("\n \n")
    assert run("--prompts", str(path))[::2] == (2, f"fastgen: error: {path} holds no prompt\n")


def test_a_file_that_is_not_text_is_refused(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xff\xfe")
    assert run("--prompts", str(path))[::2] == (2, f"fastgen: error: --prompts {path} is not UTF-8 text\n")


def test_chat_without_a_template_is_refused(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "has_template", False)
    status, out, err = run("hi", "--chat")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == "fastgen: error: no chat template"


def test_a_stdin_that_is_not_text_is_refused():
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([*FAKE, "generate"], input=b"\xff\xfe", capture_output=True, env=env)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"fastgen: error: the prompt on stdin is not utf-8 text\n"


def test_an_error_that_is_not_the_users_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "step", lambda self: int("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        run("hi")


def test_no_command_is_a_mistake(capsys):
    assert cli.main([]) == 2
    assert capsys.readouterr().err == "fastgen: error: the following arguments are required: COMMAND\n"


@pytest.mark.parametrize("stdin", ["closed", "/dev/null", "empty pipe"])
def test_a_stdin_that_is_not_there_is_no_reason_to_wait(stdin):
    close = " <&-" if stdin == "closed" else ""
    source = subprocess.DEVNULL if stdin == "/dev/null" else subprocess.PIPE
    command = ["sh", "-c", f'"$@"{close}', "sh", *FAKE, "generate"]
    process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("fastgen: error: no prompt: ")


def test_a_silent_stdin_is_waited_for_aloud():
    process = subprocess.Popen(
        [*FAKE, "generate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline() == "fastgen: waiting for a prompt on stdin\n"
    assert process.communicate("late")[0] == " LATE\n"


# Endings


def hear_ctrl_c() -> None:
    """For `preexec_fn`: tests started in the background of a shell are deaf to it, and hand that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_keeps_the_text_and_ends_the_line():
    process = subprocess.Popen(
        [*FAKE, "generate", "word " * 100],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_ctrl_c,
    )
    first = os.read(process.stdout.fileno(), 5)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    *words, end = (first + rest).decode().split(" ")
    assert len(words) < 100 and end == "WORD\n"


def test_ctrl_c_right_behind_a_piece_ends_the_line_too():
    class Out(io.StringIO):
        def flush(self):
            if self.getvalue() == "half":
                raise KeyboardInterrupt

    out = Out()
    printer = Printer([(0, 0)], out)
    with pytest.raises(KeyboardInterrupt):
        printer.piece((0, 0), "half")
    printer.end_line()
    assert out.getvalue() == "half\n"


def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen([*FAKE, "generate", "word " * 100], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(3)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=30) == 141
    assert "Traceback" not in err and "Exception" not in err


def test_a_closed_stdout_is_a_mistake():
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *FAKE, "generate", "hi"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "stdout is closed" in done.stderr


# Conversations


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def talk(monkeypatch, run, typed, *args):
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    return run(*args)


def test_a_terminal_gets_a_conversation_with_a_history(run, monkeypatch):
    status, out, err = talk(monkeypatch, run, "hello you\n\nmore\n")
    assert (status, out) == (0, " HELLO YOU\n MORE\n")
    assert engine().chats == [
        [user("hello you")],
        [user("hello you"), assistant(" HELLO YOU"), user("more")],
    ]
    assert err.count(">>> ") == 4 and err.count("tokens/s") == 1
    assert "Ctrl-D ends" in err


def test_a_conversation_has_a_system_message_and_can_be_forgotten(run, monkeypatch):
    assert talk(monkeypatch, run, "one\n/new\ntwo\n", "--system", "be brief")[0] == 0
    brief = {"role": "system", "content": "be brief"}
    assert engine().chats[1:] == [[brief, user("one")], [brief, user("two")]]


@pytest.mark.parametrize(("has_template", "args"), [(False, []), (True, ["--no-chat"])])
def test_without_a_template_a_terminal_gets_continuations(run, monkeypatch, has_template, args):
    monkeypatch.setattr(FakeEngine, "has_template", has_template)
    status, out, _ = talk(monkeypatch, run, "a b\nc\n", *args)
    assert (status, out) == (0, " A B\n C\n")
    assert [prompt for prompt, _ in engine().added] == ["a b", "c"]


def test_a_message_that_cannot_run_leaves_the_conversation(run, monkeypatch):
    monkeypatch.setattr(FakeEngine, "has_template", False)
    status, out, err = talk(monkeypatch, run, "too long\nfine\n")
    assert (status, out) == (0, " FINE\n")
    assert "the prompt does not fit" in err


@pytest.mark.parametrize("flags", [["--json"], ["--n", "2"], ["--logprobs", "0"], ["--echo"]])
def test_what_a_conversation_cannot_show_is_refused(run, monkeypatch, flags):
    status, out, err = talk(monkeypatch, run, "hello\n", *flags)
    assert (status, out) == (2, "")
    assert f"{flags[0]} has no place in a conversation" in err


def read_until(fd, end, seconds=20.0):
    """What a terminal shows, until it shows `end`."""
    shown, until = "", time.monotonic() + seconds
    while end not in shown and time.monotonic() < until:
        shown += os.read(fd, 1000).decode()
    assert end in shown
    return shown


@pytest.fixture
def terminal():
    """Runs the fake command on a terminal of its own: the process, and the file descriptor of its other end."""
    started = []

    def start(*args):
        ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm"}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        process = subprocess.Popen([*FAKE, *args], **ends, env=env, start_new_session=True, preexec_fn=hear_ctrl_c)
        started.append((process, ours))
        os.close(theirs)
        return started[-1]

    yield start
    for process, ours in started:
        process.kill()
        process.wait()
        os.close(ours)


def interrupt(process):
    """Ctrl-C until the process ends; its status. One between readline's prompt and its first wait is lost on it."""
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            continue
    return None


def test_on_a_terminal_ctrl_c_stops_an_answer_and_then_the_command(terminal):
    process, screen = terminal("generate")
    read_until(screen, ">>> ")
    os.write(screen, b"word " * 100 + b"\n")
    read_until(screen, " WORD WORD")
    process.send_signal(signal.SIGINT)
    shown = read_until(screen, ">>> ")
    assert "(abort)" in shown and shown.count("WORD") < 90
    assert interrupt(process) == 130


def test_on_a_terminal_a_prompt_is_answered_and_what_was_shown_meanwhile_goes(terminal):
    process, screen = terminal("generate", "the sky")
    shown = read_until(screen, "tokens/s)")
    assert "reading the prompt" in shown
    assert " THE SKY\r\n1 prompt (3 tokens)" in shown
    assert process.wait(timeout=20) == 0


# The command


def test_help_imports_nothing_heavy_and_shows_examples():
    heavy = ["jax", "flax", "numpy", "transformers", "torch", "rich"]
    code = (
        f"import sys; from fastgen_jax.cli import main; status = main(['generate', '--help']); "
        f"sys.exit(status or str([m for m in {heavy} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert 'fastgen generate "The capital of France is"' in done.stdout


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_and_version_are_no_errors(capsys, argv):
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("fastgen 0." if argv == ["--version"] else "usage: fastgen ")
    assert ("examples:" in out) == (argv != ["--version"])


def test_the_script_is_the_command():
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:23]) == (0, "usage: fastgen generate")


@pytest.mark.slow
def test_the_default_model_continues_a_prompt():
    command = [str(Path(sys.executable).with_name("fastgen")), "generate", "--max-tokens", "4"]
    done = subprocess.run([*command, "The capital of France is"], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:7]) == (0, " Paris.")
    assert "4 generated (length)" in done.stderr


@pytest.mark.slow
def test_the_default_model_answers_a_message_in_json():
    command = [sys.executable, str(SCRIPT), "--chat", "--max-tokens", "8", "--json", "--logprobs", "2"]
    done = subprocess.run(command, input="What is 2 + 2?\n", capture_output=True, text=True)
    entry = json.loads(done.stdout)
    assert (done.returncode, entry["num_generated_tokens"]) == (0, len(entry["token_ids"]))
    assert entry["num_prompt_tokens"] > 20  # the template brings a system message
    assert "answer" in entry["text"]
    assert [len(token["top"]) for token in entry["logprobs"]] == [2] * len(entry["token_ids"])
