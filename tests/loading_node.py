"""One of several processes that load one checkpoint: `loading_node.py FOLDER RANK COUNT PORT`.

It writes, as JSON, the bytes that it read and by how many its memory grew at most.
"""

import json
import os
import re
import sys
from pathlib import Path

folder, rank, count, port = Path(sys.argv[1]), *map(int, sys.argv[2:5])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("XLA_FLAGS", None)

import jax  # noqa: E402 (after the environment)

from fastgen_jax import checkpoint, kernels, models, multihost  # noqa: E402
from fastgen_jax.checkpoint.safetensors_files import SafetensorsSource  # noqa: E402
from fastgen_jax.sharding import Shards  # noqa: E402

group = multihost.join(f"127.0.0.1:{port}", count, rank, timeout=60)
hf_config = json.loads((folder / "config.json").read_text())
family = models.family(hf_config["model_type"])
config, shards = family.from_hf(hf_config), Shards.over(jax.devices())
model = family.Model(config, kernels.get_backend("xla"), shards)
whole, _ = models.param_shapes(model.clone(shards=Shards()))
cut = checkpoint.Cut(shards, *models.param_shapes(model), config.fused(shards))


def peak() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


source, before = SafetensorsSource(folder), peak()
params = checkpoint.load_params(source, whole, dtype="bfloat16", fused=config.fused(), cut=cut, progress=False)
print(json.dumps([source.bytes_read, peak() - before, sum(x.nbytes for x in jax.tree.leaves(params))]), flush=True)
if group.leads:
    group.close()
else:
    group.wait()
