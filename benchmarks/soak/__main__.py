"""Kills of processes at random moments: is what is on disk whole, and does a job end as if nothing had happened?

python benchmarks/soak kill_during_save --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "kill_during_save": "kills of a process that saves without pause, and damage to its checkpoints",
    "kill_and_restart": "kills of processes of a job that `jaxdist launch --restarts` starts again",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
