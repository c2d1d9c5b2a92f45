"""Check and measure the attention kernels and a whole engine on the GPU at hand, in under five minutes.

python scripts/device_check.py --json device.json   # the table on stdout, every figure in the file
python scripts/device_check.py --rehearse           # in miniature, on any machine: tests the script, measures nothing

Runs from a checkout, installed or not, with jax, flax, numpy, transformers and safetensors; docs/device-check.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastgen_jax.bench.device.run import main

if __name__ == "__main__":
    sys.exit(main())
