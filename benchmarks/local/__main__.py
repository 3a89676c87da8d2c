"""Local methods, whose workers synchronize every H steps: held-out loss and bytes.

python benchmarks/local warm_start --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "warm_start": "the loss of local methods after synchronous starts of several lengths",
    "table": "tables from the log of `jaxdist compare --suite local`",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
