"""Every block of the README does what it shows."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from scripted import TOKENIZER
from threaded import serving
from tiny import tiny_engine

from fastgen_jax.cli import build_parser
from fastgen_jax.models import families

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
BIN = Path(sys.executable).parent

BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [block for language, block in BLOCKS if language == "python"]
SHELL = [line for language, block in BLOCKS if not language for line in block.splitlines()]
COMMANDS = [line.partition("  #")[0].strip() for line in SHELL if re.search(r"\bfastgen generate|generate\.py", line)]
NEEDS_A_HUB_OR_A_FILE = ("llama2-7b", "mistral-7b", "./my-checkpoint")


def shown_after(command: str) -> str:
    """What the README shows below `$ command`."""
    (block,) = (block for _, block in BLOCKS if block.startswith(f"$ {command}\n"))
    return block.partition("\n")[2].strip()


def test_there_is_something_to_run():
    assert len(PYTHON) == 4
    assert len(COMMANDS) == 6


@pytest.mark.slow
def test_python_blocks_run(capsys):
    namespace: dict = {}
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), namespace)
    assert "Paris" in capsys.readouterr().out
    assert namespace["logits"].shape == (1, 49152)


def test_the_building_blocks_example_runs(capsys):
    text = (ROOT / "docs" / "kernels.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(block, "kernels.md", "exec"), {})
    assert capsys.readouterr().out == "(7, 8, 64) xla\n"


def test_the_plan_command_parses():
    (command,) = (line for line in SHELL if line.startswith("fastgen plan"))
    assert build_parser().parse_args(shlex.split(command)[1:]).gpu == "h200"


@pytest.mark.parametrize(
    "command", [line for line in SHELL if re.match("fastgen (serve|client|bench|simulate) ", line)]
)
def test_other_commands_parse(command):
    build_parser().parse_args(shlex.split(command.partition("  #")[0])[1:])


def test_curl_examples_are_answered():
    commands = [shlex.split(line) for line in SHELL if line.startswith("curl ")]
    assert len(commands) == 2
    with serving([tiny_engine(TOKENIZER)]) as served:
        for words in commands:
            (url,) = (word for word in words if word.startswith("http://127.0.0.1:8000/"))
            answer = httpx2.post(url.replace("http://127.0.0.1:8000", served.url), content=words[words.index("-d") + 1])
            assert answer.status_code == 200, answer.text
            assert "choices" in answer.text


def test_the_dockerfile_installs_and_starts_what_the_readme_does():
    text = (ROOT / "Dockerfile").read_text()
    entry, arguments = (
        json.loads(re.search(rf"^{name} (.*)$", text, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD")
    )
    assert build_parser().parse_args([*entry[1:], *arguments]).host == "0.0.0.0"
    (extras,) = re.findall(r"\./src\[([\w,]+)\]", text)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_shell_commands_parse(command):
    words = shlex.split(command.partition("|")[2] if command.startswith("echo") else command.partition(">")[0])
    start = words.index("generate") + 1 if "generate" in words else words.index("scripts/generate.py") + 1
    build_parser().parse_args(["generate", *words[start:]])


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if not any(name in c for name in NEEDS_A_HUB_OR_A_FILE)])
def test_shell_commands_run(command, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The sky is", "max_tokens": 4}\n')
    run = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout or (tmp_path / "answers.jsonl").read_text()


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_shows():
    recipe = re.search(r"^demo:.*\n\t(.*)$", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    command = recipe[1].replace(".venv/bin/", "")
    run = subprocess.run(
        command, shell=True, env=environment(), capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    first_sentence = run.stdout.partition(".")[0]
    assert len(first_sentence) > 40
    assert first_sentence in shown_after("make demo")


def test_the_two_commands_are_targets():
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
        assert shown_after(f"make {target}")


def test_the_table_of_families_is_what_the_code_says():
    with_table = runpy.run_path(str(ROOT / "scripts" / "model_table.py"))["with_table"]
    assert with_table(README) == README, "python scripts/model_table.py --write puts it right"
    assert with_table(README.replace("| `olmo` | OLMo", "| `olmo` | Olmo")) == README
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)[1:] == families()  # behind the head


def test_the_guide_to_adding_a_family_quotes_the_code():
    """Each block stands, as it is, in the file named last before it; that of a family is all of its file."""
    text, code = (ROOT / "docs" / "adding-a-family.md").read_text(), ""
    blocks = 0
    for found in re.finditer(r"`([\w/]+/\w+\.py)`|^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        file, block = found.groups()
        if file is not None:
            code = (ROOT / file).read_text()
        else:
            assert block == code if block.startswith('"""') else block in code
            blocks += 1
    assert blocks == 7


def test_extras_of_the_readme_exist():
    groups = re.findall(r"\.\[([\w,]+)\]", README)
    assert groups
    for extra in ",".join(groups).split(","):
        assert re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def environment() -> dict[str, str]:
    """This process's, with the commands of its virtual environment first on PATH."""
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
