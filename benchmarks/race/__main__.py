"""Which method reaches a loss first over a slow link, beside PyTorch.

sudo python benchmarks/race measure steps --torch-python PYTHON --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "measure": "steps over links, losses by step, and whole runs",
    "tables": "tables and charts from the records of measure, and what the model predicts",
    "board": "enter a method in the board of benchmarks/board: bytes and seconds to a loss over 100 Mbit/s",
    "weight_gradients": "a step of the language models with JAX's own gradient of a product, and with a faster one",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
