"""The speed of the codes: alone, inside reducers, and what it means for a link.

python benchmarks/codecs speed --torch-python PYTHON --out benchmarks/reports/NAME
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))
from common import run_subcommand

SUBCOMMANDS = {
    "speed": "each code beside a copy of the array and beside PyTorch; on a GPU too",
    "selection": "top_k beside lax.top_k, lax.approx_max_k and torch.topk",
    "transports": "processor time of each code in each transport beside that of its parts, held to a bound",
    "coding": "what each code adds to a step of the classifier, without a link",
    "weights": "bytes of patches of published weights beside a whole copy and beside zstd; needs zstandard",
    "weight_parts": "bytes, memory and seconds of processes that publish weights that are split over them",
    "visible": "how many entries of a DiLoCo drift bfloat16 sees",
    "break_even": "the bandwidth below which each code beats a plain all-reduce",
}

if __name__ == "__main__":
    raise SystemExit(run_subcommand(__doc__, SUBCOMMANDS))
