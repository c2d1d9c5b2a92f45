"""Processes that share a model read their own bytes of it, and hold no more than they need."""

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from fastgen_jax.serving.supervisor import free_port

NODE = Path(__file__).parent / "loading_node.py"
COUNT, NUM_FILES = 4, 8
CONFIG = {
    "model_type": "llama",
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
EVERYWHERE = ("layernorm.weight", "norm.weight")


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    e, f, kv, v = CONFIG["hidden_size"], CONFIG["intermediate_size"], 4 * 64, CONFIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (v, e), "lm_head.weight": (v, e), "model.norm.weight": (e,)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in (
            *((f"self_attn.{part}_proj", (e if part in "qo" else kv, e)) for part in "qkvo"),
            *((f"mlp.{part}_proj", (f, e)) for part in ("gate", "up")),
            ("mlp.down_proj", (e, f)),
            ("input_layernorm", (e,)),
            ("post_attention_layernorm", (e,)),
        ):
            shapes[f"{layer}.{name}.weight"] = shape
    return shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """About 300 MB in eight files, tensors dealt out in turn."""
    path, shapes = tmp_path_factory.mktemp("eight"), tensor_shapes()
    files: dict[str, dict[str, np.ndarray]] = {f"model-{i}.safetensors": {} for i in range(NUM_FILES)}
    for i, (name, shape) in enumerate(shapes.items()):
        files[f"model-{i % NUM_FILES}.safetensors"][name] = np.ones(shape, ml_dtypes.bfloat16)
    for name, tensors in files.items():
        save_file(tensors, path / name)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_four_processes_read_a_quarter_each(folder):
    port = free_port("127.0.0.1")
    nodes = [
        subprocess.Popen(
            [sys.executable, str(NODE), str(folder), str(rank), str(COUNT), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(COUNT)
    ]
    sizes = {name: 2 * prod(shape) for name, shape in tensor_shapes().items()}
    everywhere = sum(size for name, size in sizes.items() if name.endswith(EVERYWHERE))
    total = sum(sizes.values())
    largest = max(sizes.values()) // COUNT
    for node in nodes:
        out, err = node.communicate(timeout=120)
        assert node.returncode == 0, err[-2000:]
        read, grown, all_bytes = json.loads(out.splitlines()[-1])
        assert all_bytes == total
        assert read == (total - everywhere) // COUNT + everywhere
        # As for one process: its part of the model, and three times its largest tensor.
        assert grown < read + 3 * largest + (32 << 20)
