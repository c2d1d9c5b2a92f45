"""`make` finds a Python that works: by name on PATH, else one that pyenv has; a dead shim is passed over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "find_python.sh"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def find(tmp_path: Path) -> subprocess.CompletedProcess:
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv"), "HOME": str(tmp_path)}
    return subprocess.run(["/bin/sh", SCRIPT], env=env, capture_output=True, text=True)


@pytest.fixture(autouse=True)
def nothing_else_works(tmp_path):
    """Whatever Python the system has is hidden behind names that fail, as the shims of inactive versions do."""
    for name in ("python3.14", "python3.13", "python3.12", "python3"):
        script(tmp_path / "bin" / name, "echo 'pyenv: not active' >&2; exit 127")


def test_the_first_name_that_runs(tmp_path):
    good = script(tmp_path / "bin" / "python3.13", f'exec {sys.executable} "$@"')
    assert find(tmp_path).stdout.strip() == str(good)


def test_then_a_version_that_pyenv_has(tmp_path):
    script(tmp_path / "pyenv" / "versions" / "3.11.9" / "bin" / "python", f'exec {sys.executable} "$@"')
    good = script(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python", f'exec {sys.executable} "$@"')
    assert find(tmp_path).stdout.strip() == str(good)


def test_else_one_line_that_names_what_was_looked_for(tmp_path):
    found = find(tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.count(os.linesep) == 1
    for name in ("python3.14", "python3.12", str(tmp_path / "pyenv")):
        assert name in found.stderr
