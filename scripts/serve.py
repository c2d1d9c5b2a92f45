"""The same as `fastgen serve`: python scripts/serve.py llama2-7b --replicas 2."""

import sys

from fastgen_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
