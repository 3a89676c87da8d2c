"""What the library adds to a step, to its compilation and to the start of a job.

python benchmarks/overhead step --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "step": "all_reduce(exact()) under distribute beside a step with pmean written by hand",
    "compile_time": "seconds to compile against the number of leaves",
    "start_up": "seconds to import the library, and to the first loss of the README's program",
    "compile_cache": "seconds to the first step, with and without a cache of compiled programs",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
