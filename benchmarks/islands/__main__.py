"""Islands: what kills, late islands and meetings cost.

python benchmarks/islands quality --seed 0 --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "quality": "held-out loss with kills, late islands and joins",
    "kills": "how long a SIGKILL or SIGSTOP of a process holds the others",
    "stops": "how long a stop in each part of a round holds the others, and when the stopped island counts again",
    "endurance": "hundreds of rounds over a server that fails, with kills, stops, and slow or many islands",
    "grace": "goodput and pauses with slow islands, with and without a grace",
    "cost": "bytes and seconds of a meeting on a shaped link, and its processor time",
    "size": "peak memory, bytes and seconds of meetings of large models",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
