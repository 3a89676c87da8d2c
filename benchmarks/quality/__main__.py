"""The cost of compression in accuracy: simulated workers, real digits and text, equal seeds and batches.

python benchmarks/quality low_rank --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "low_rank": "low rank, top-k, signs and Accordion: accuracy and bytes",
    "levels": "adapted levels beside fixed ones: accuracy, loss and the error of the mean",
    "commands": "the methods of the pages' commands beside exact and their plain forms: held-out loss",
    "feedback": "codes with and without a memory of their errors, in steps, rounds and gossip: held-out loss",
    "starts": "values to start from: the step of CHOCO, eta of EF21, the size of messages",
    "batches": "Accordion's batches beside small and large ones: accuracy and updates",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
