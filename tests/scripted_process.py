"""`fastgen` with engines that speak a script: `python scripted_process.py serve ANY --replicas 2 ...`.

Every prompt is answered "x" without end, a token every 10 ms; those of a prompt that begins with "slow" take 200 ms,
one that begins with "break" breaks the engine, and one that begins with "hang" hangs it. The model "cannot-load"
cannot be loaded.
"""

import sys
import time
from typing import Any

from fastgen_jax import cli
from fastgen_jax.serving import replica_process, supervisor
from fastgen_jax.serving.replica_process import ReplicaSettings


def load(settings: ReplicaSettings) -> Any:
    from scripted import TOKENIZER, scripted_engine, tokens

    if settings.model == "cannot-load":
        raise RuntimeError("the device does not answer")
    prompts: dict[int, str] = {}

    def script(seq: Any, index: int) -> int:
        if seq.seq_id not in prompts:
            prompts[seq.seq_id] = TOKENIZER.decode(seq.prompt_token_ids)
        if prompts[seq.seq_id].startswith("break"):
            raise OSError("the device is gone")
        if prompts[seq.seq_id].startswith("hang"):
            time.sleep(3600)
        time.sleep(0.19 if prompts[seq.seq_id].startswith("slow") else 0)
        return tokens("x")[0]

    engine = scripted_engine(script)
    dispatch = vars(engine)["_runner"].dispatch

    def slow_dispatch(*args: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return dispatch(*args, **options)

    vars(engine)["_runner"].dispatch = slow_dispatch
    return engine


if __name__ == "__main__":
    if sys.argv[1:] == ["replica"]:
        sys.exit(replica_process.run(ReplicaSettings.from_stdin(), load))
    supervisor.COMMAND = (sys.executable, __file__, "replica")
    replica_process.load_engine = load
    sys.exit(cli.main(sys.argv[1:]))
