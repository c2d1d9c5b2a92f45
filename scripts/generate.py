"""The same as `fastgen generate`: python scripts/generate.py --model llama2-7b "Once upon a time"."""

import sys

from fastgen_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
