"""What communication costs on a link, beside PyTorch.

sudo python benchmarks/links compare --torch-python PYTHON --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "compare": "step time, exposed communication and bytes, on loopback and on shaped links",
    "report": "tables and plot once more, from the records of compare",
    "cluster": "whether this machine can have shaped links, and how exact they are",
    "collectives": "seconds of single collectives by size, beside what the model predicts",
    "chunks": "whether one chunk is coded while another one travels",
    "follow": "how long after a state is published a follower has it",
    "pipelined": "how much communication hides behind computation over shaped links",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
