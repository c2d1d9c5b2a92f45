"""What the server does under load and when things break (docs/serving.md has the figures).

python scripts/bench_serving.py kill               # kill -9 a replica under 32 streams, ten times
python scripts/bench_serving.py connections        # 1,000 streams at once; 200 clients that hang up
python scripts/bench_serving.py overload           # twice the capacity for a minute
python scripts/bench_serving.py routing            # the router against round robin
python scripts/bench_serving.py overhead           # HTTP against Engine.generate, SmolLM2
python scripts/bench_serving.py all --json serving.json

All but the last one run against engines without a model, whose steps only take time; the servers, the router and the
replicas are real processes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fastgen_jax.bench import machine

PARTS = ("kill", "connections", "overload", "routing", "overhead")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the figures here")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for part in PARTS if args.part == "all" else (args.part,):
        module = __import__(f"serving_bench.{part}", fromlist=["run"])
        results[part] = module.run()
        print(f"{part}:", *(f"  {name}: {value}" for name, value in results[part].items()), sep="\n", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps({**machine.about(), "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
