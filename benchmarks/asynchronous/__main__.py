"""Workers of unequal speed: the rules of `jaxdist.asynchronous` on a virtual clock and on real processes.

python benchmarks/asynchronous stragglers --jobs 2 --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "stragglers": "virtual seconds to a loss of each rule under stragglers, at its best rate, also where links bind",
    "stragglers_report": "tables and plot from the records of stragglers",
    "uneven": "methods for workers of unequal speed beside their baselines, in virtual seconds",
    "processes": "seconds to a loss on real processes with a slow worker, and the loss with one that is killed",
    "events": "events a second of the virtual clock, and gradients a second with a model",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
