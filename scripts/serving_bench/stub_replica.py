"""The process of a replica over a `StubEngine`; its arguments: seconds of a step, seconds of a token, max_num_seqs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fastgen_jax.serving.replica_process import ReplicaSettings, run
from serving_bench.stub import Speed, StubEngine

if __name__ == "__main__":
    speed = Speed(float(sys.argv[1]), float(sys.argv[2]))
    settings = ReplicaSettings.from_stdin()
    sys.exit(run(settings, load=lambda _: StubEngine(speed, max_num_seqs=int(sys.argv[3]))))
