"""The same as `fastgen bench`: python scripts/bench.py --clients 1,2,4 --json bench.json."""

import sys

from fastgen_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
