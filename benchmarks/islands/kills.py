"""Islands that are killed or stopped: how long the others wait.

    python benchmarks/islands kills --kills 10 --stops 3 --pace 0.25 --out benchmarks/reports/NAME    # and --grace 0.5
    python benchmarks/islands kills --owners 3 --fragments 2 --overlap --out benchmarks/reports/NAME

It plays the slow test of processes for figures. Records of runs add up in a file.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, append_rows

sys.path.insert(0, str(ROOT / "tests" / "support"))

from island_jobs import TIMEOUT, play_events


def measure_kills(options):
    """Kills and stops of processes over a folder, as in the slow test."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(options.cache or Path(folder, "cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        events = {"kills": options.kills, "stops": options.stops, "last_round": options.rounds}
        before, started = os.getloadavg()[0], time.monotonic()
        chosen = {name: getattr(options, name) for name in ("pace", "grace", "seed", "fragments", "owners")}
        chosen["overlap"] = int(options.overlap)
        found = play_events(Path(folder, "run"), Path(folder), **events, **chosen)
    found |= {"seconds": time.monotonic() - started, "load_before": before, "load_after": os.getloadavg()[0]}
    print(json.dumps(found), flush=True)
    return [found]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=15)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of a step; a round has four")
    parser.add_argument("--grace", type=float, default=TIMEOUT, help="seconds, once two of the three are there")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--owners", type=int, default=0, help="pieces of a mean, each averaged by one island")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--rounds", type=int, default=0, help="how many at least")
    parser.add_argument("--cache", type=Path, help="a folder for compiled programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    append_rows(given.out, "kills", measure_kills(given))
