"""Optimizer state on the host: the speed of its step there, and the memory that it frees on the device.

python benchmarks/host adam --torch-python PYTHON --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "adam": "AdamW on the host's processor beside PyTorch's fused one, in one leaf and in many",
    "memory": "the memory of a step on a TPU that is not attached, with state on the device or the host; needs libtpu",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
