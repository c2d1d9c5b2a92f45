"""What loading a model quantised takes of the host: memory, which is bounded, and time, which `pytest -s` shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from quantized_writers import gptq
from safetensors.numpy import save_file

CONFIG = {
    "model_type": "llama",
    "vocab_size": 5000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
E, F, KV, V, L = 2048, 5632, 512, 5000, 4
PROJECTIONS = {
    **{f"self_attn.{x}_proj": (KV if x in "kv" else E, E) for x in "qkvo"},
    **{f"mlp.{x}_proj": (F, E) for x in ("gate", "up")},
    "mlp.down_proj": (E, F),
}
LARGEST = 2 * F * E  # weights, of gate and up

PEAK = r"""
import json, re, statistics, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from fastgen_jax import checkpoint, kernels, models, pretrained
from fastgen_jax.models import llama
from fastgen_jax.sharding import WHOLE
from fastgen_jax.sizing import num_bytes

found, kind = checkpoint.resolve(sys.argv[1]), None if sys.argv[2] == "None" else sys.argv[2]
config = llama.from_hf(found.hf_config)

def load():
    start = time.process_time()
    backend = kernels.get_backend("xla")
    _, params = pretrained.load_model(found, config, backend, "bfloat16", WHOLE, False, quantize=kind)
    return params, time.process_time() - start

models.param_shapes(llama.Model(config, kernels.get_backend("xla")))
jax.block_until_ready(jax.device_put(np.ones(1 << 20, jnp.bfloat16)))
# Not getrusage: its maximum is inherited from the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
params, _ = load()
grown = peak() - before
seconds = statistics.median(load()[1] for _ in range(5))
print(json.dumps({"model": num_bytes(params), "grown": grown, "seconds": seconds}))
"""


def write(folder: Path, is_quantized: bool) -> Path:
    """About 0.4 GB in bfloat16, or of GPTQ, g128."""
    folder.mkdir()
    case = gptq(128)
    config = CONFIG | ({"quantization_config": case.config} if is_quantized else {})
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {"model.embed_tokens.weight": np.ones((V, E), ml_dtypes.bfloat16)}
    norms = ["model.norm", *(f"model.layers.{i}.{x}_layernorm" for i in range(L) for x in ("input", "post_attention"))]
    tensors |= {f"{name}.weight": np.ones(E, ml_dtypes.bfloat16) for name in norms}
    for name, (outputs, inputs) in PROJECTIONS.items():
        weight = rng.normal(size=(outputs, inputs)).astype(np.float32)
        parts = case.write(weight)[0] if is_quantized else {"weight": weight.astype(ml_dtypes.bfloat16)}
        tensors |= {f"model.layers.{i}.{name}.{part}": x for i in range(L) for part, x in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[bool, Path]:
    path = tmp_path_factory.mktemp("big")
    return {is_quantized: write(path / str(is_quantized), is_quantized) for is_quantized in (False, True)}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("kind", [None, "int8", "fp8", "int4", "gptq"])
def test_peak_memory_is_the_model_and_a_byte_for_each_weight_of_three_leaves(folders, kind):
    folder, quantize = folders[kind == "gptq"], None if kind == "gptq" else kind
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(quantize)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    in_16_bits = 2 * (V * E + L * sum(outputs * inputs for outputs, inputs in PROJECTIONS.values()))
    size, grown, per_gb = found["model"] / 1e6, found["grown"] / 1e6, found["seconds"] / in_16_bits * 1e9
    print(f"\n{kind}: {size:.0f} MB, grown by {grown:.0f}; {per_gb:.2f} CPU s for each GB of it in bfloat16")
    slack = 16 << 20  # the allocator's arenas and the pieces of tensors on their way
    bytes_each = 3 if kind else 6
    assert 0.9 * found["model"] < found["grown"] <= found["model"] + bytes_each * LARGEST + slack
