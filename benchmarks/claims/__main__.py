"""Claims of papers in scenes where they can appear.

python benchmarks/claims papers ringmaster --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "papers": "post-local SGD, SlowMo on SGP, AdaComm, Ringmaster, Ringleader, DABMD: one claim a call",
    "regret": "the regret of DABMD and AMB beside fixed batches on a stream of digits, and the clock of stragglers",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
