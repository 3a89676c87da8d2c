"""What other systems do, measured beside ours on the same problems.

python benchmarks/peers.py sharding --torch-python PYTHON --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

from common import run_subcommand

# Before this folder, in which other commands are.
sys.path.insert(0, str(Path(__file__).parent / "peer_workers"))

SUBCOMMANDS = {
    "consensus": "errors of BlueFog's tutorial, and its recursions",
    "sharding": "memory, time and bytes of ZeRO beside PyTorch's FSDP2",
    "offload": "AdamW on the host beside DeepSpeed's and PyTorch's: time and memory of a step",
    "failures": "a process is killed or stopped: how long the others wait, beside torchft and hivemind",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
