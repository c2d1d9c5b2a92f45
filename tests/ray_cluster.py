"""A Ray cluster on this machine with Serve on it, and a folder with the tiny model for its replicas to load."""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file
from scripted import NUM_TOKENS, TOKENIZER
from tiny import EOS, HF_CONFIG
from wide import wide_model

from fastgen_jax.checkpoint.parts import parts_of

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""No report to Ray's makers, no token in the home folder, no warning about GPUs. All of Ray's processes inherit it."""


def save_wide_model(folder: Path, max_len: int) -> None:
    """What `wide.wide_engine` runs, with more positions, as a checkpoint that `Engine.from_pretrained` loads."""
    model, params = wide_model()
    tensors = {}
    for path, leaf in traverse_util.flatten_dict(params).items():
        whole = np.asarray(leaf)
        for part in parts_of(path, whole.shape, model.config.fused()):
            tensors[part.tensor] = np.ascontiguousarray(whole[part.region])
    save_file(tensors, folder / "model.safetensors")
    config = HF_CONFIG | {"vocab_size": NUM_TOKENS, "max_position_embeddings": max_len, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    TOKENIZER.save_pretrained(folder)


@contextlib.contextmanager
def cluster(**resources: int) -> Iterator[str]:
    """The URL of Serve's proxy, for as long as the block runs; nothing of Ray's is left afterwards.

    resources: what Ray is to believe that there is, `num_cpus` and `num_gpus`.
    """
    os.environ.update(ENVIRONMENT)  # before the import, which reads some of it
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        try:
            ray.init("local", **resources, object_store_memory=100 << 20, _temp_dir=folder, **quiet)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
            serve.shutdown()
        finally:
            ray.shutdown()


def free(resource: str) -> float:
    """How much is left of "GPU", for example."""
    import ray

    return ray.available_resources().get(resource, 0)


def actors(deployment: str) -> list[str]:
    """Names of the actors of a deployment's replicas, those that are about to end included."""
    import ray

    every = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in every if f"#{deployment}#" in actor["name"])


def kill(actor: str) -> None:
    """At once, as if its machine had gone."""
    import ray

    ray.kill(ray.get_actor(actor, namespace="serve"))
