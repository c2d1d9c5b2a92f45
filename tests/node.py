"""One of several processes that share a model: `node.py FOLDER RANK COUNT PORT ENGINE`, the last a JSON object.

The leader writes what it generated as JSON, and with "wait" in ENGINE goes on until it is killed. With "fault", a
process fails: in "load" or in "step" as it does these, or as "leave" when it should close.
"""

import json
import os
import sys
import time

folder, rank, count, port, config = sys.argv[1], *map(int, sys.argv[2:5]), json.loads(sys.argv[5])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={config['tensor_parallel'] // count}"
)

from fastgen_jax import Engine, SamplingParams, checkpoint, multihost  # noqa: E402 (after the environment)
from fastgen_jax.runner import ModelRunner  # noqa: E402

wait, fault = config.pop("wait", False), config.pop("fault", None)


def fail(*args: object, **kwargs: object) -> None:
    raise RuntimeError("a fault")


if fault == "load":
    checkpoint.load_params = fail
if fault == "step":
    ModelRunner._do_step = fail
try:
    group = multihost.join(f"127.0.0.1:{port}", count, rank, timeout=config.pop("timeout", 60))
    if group.leads:
        engine = Engine.from_pretrained(folder, group=group, show_progress=False, **config)
        prompts = [list(range(5, 5 + n)) for n in (3, 20, 40, 9)]
        every = (
            SamplingParams(max_tokens=16, ignore_eos=True),
            SamplingParams(max_tokens=8, temperature=0.9, top_p=0.8, seed=1, ignore_eos=True, logprobs=2),
        )
        found = [[r.token_ids for r in engine.generate(prompts, params, show_progress=False)] for params in every]
        print(json.dumps([found, engine.stats().compiled_after_warm_up, engine.stats().preemptions]), flush=True)
        while wait:
            engine.generate(prompts, every[0], show_progress=False)
            time.sleep(0.01)
        if fault == "leave":
            fail()
        engine.close()
        engine.close()  # does nothing
    else:
        print("following", flush=True)
        group.follow(folder, show_progress=False, **config)
except (ValueError, TimeoutError) as error:
    print(f"fastgen: error: {error}", file=sys.stderr, flush=True)
    os._exit(2)  # JAX's own end would wait for the others
