"""The cost of compression in accuracy: four simulated workers, real digits, equal seeds and batches.

python benchmarks/quality low_rank --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "low_rank": "low rank, top-k, signs and Accordion: accuracy and bytes",
    "levels": "adapted levels beside fixed ones: accuracy, loss and the error of the mean",
    "batches": "Accordion's batches beside small and large ones: accuracy and updates",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
