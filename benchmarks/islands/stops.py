"""Islands of which one is stopped in each part of a round: how long the others wait, and when it counts again.

    python benchmarks/islands stops --out benchmarks/reports/NAME
    python benchmarks/islands stops --bucket --overlap --out benchmarks/reports/NAME

It plays the slow test of stops for figures, over a folder or over a bucket of moto's S3 server. Records of runs add up
in a file.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, append_rows

sys.path.insert(0, str(ROOT / "tests" / "support"))

from buckets import s3_server
from island_jobs import play_stops


def measure_stops(options):
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder, "cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        before, started = os.getloadavg()[0], time.monotonic()
        with s3_server() if options.bucket else contextlib.nullcontext(str(Path(folder, "run"))) as place:
            chosen = {"fragments": options.fragments, "owners": options.owners, "overlap": int(options.overlap)}
            found = play_stops(place, Path(folder), seconds=options.seconds, **chosen)
    found |= {"bucket": options.bucket, "seconds": time.monotonic() - started}
    found |= {"load_before": before, "load_after": os.getloadavg()[0]}
    print(json.dumps(found), flush=True)
    return [found]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=10.0, help="of a stop")
    parser.add_argument("--bucket", action="store_true", help="over moto instead of a folder")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--owners", type=int, default=0, help="pieces of a mean, each averaged by one island")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    append_rows(given.out, "stops", measure_stops(given))
