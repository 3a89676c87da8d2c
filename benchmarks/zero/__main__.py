"""The stages of ZeRO, the codes of ZeRO++ and the owners of matrices: memory, bytes, loss and time.

python benchmarks/zero memory --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "memory": "memory and bytes of each stage on chips that are not attached, and the largest models; needs libtpu",
    "coded": "the loss of a small GPT with the codes of ZeRO++",
    "owners": "products, bytes and time of Muon, whose matrices are divided among the workers",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
