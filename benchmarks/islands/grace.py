"""Islands of which one is slow: goodput and pauses, with and without a grace, side by side.

    python benchmarks/islands grace --out benchmarks/reports/NAME

Four islands on the clock of the tests, which sleeps alone move, so that nothing depends on the machine; computing and
transfer take no time on it, and pauses are waits for others. In `slow` the last island takes a multiple of the time of
the others for each of its steps, in `changing` a step of any of them takes that long now and then. Goodput is the
number of examples that rounds have taken, as a share of those that the islands could have trained on without any wait.
Records of runs add up in a file.
"""

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path

import jax
import pytest
from common import ROOT, append_rows

sys.path.insert(0, str(ROOT / "tests" / "support"))

from island_paces import EXAMPLES, play_paces
from islands_run import commits_of

import jaxdist as jd

NAMES = ("a", "b", "c", "d")
# Without a grace first.
SCHEMES = (
    {},
    {"quorum": 3, "grace": 0.2},
    {"overlap": True},
    {"overlap": True, "quorum": 3, "grace": 0.2},
    {"overlap": True, "quorum": 3, "grace": 0.2, "fragments": 4},
)


def measure_grace(options):
    """A row for each kind of slowness and each scheme."""
    jax.config.update("jax_platforms", "cpu")
    # Islands that are late are what this is about.
    logging.getLogger("jaxdist.islands").setLevel(logging.ERROR)
    rows = []
    for kind in ("slow", "changing"):
        for scheme in SCHEMES:
            rows.append(measure_scheme(options, kind, scheme))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_scheme(options, kind, scheme):
    """What four islands keep of their time."""
    fragments = scheme.get("fragments", 1)
    # A round of a fragment takes as long whatever their number is.
    step, took = 1 / fragments, dict.fromkeys(NAMES, (0, 0.0))

    def pace(name, draws):
        is_slow = name == NAMES[-1] if kind == "slow" else draws.random() < options.share
        seconds = step * (options.times if is_slow else 1.0)
        took[name] = took[name][0] + 1, took[name][1] + seconds
        return seconds

    store = jd.islands.memory()
    with pytest.MonkeyPatch.context() as patch:
        found = play_paces(patch, NAMES, pace, store=store, seconds=options.seconds, **scheme)
    commits = commits_of(store)
    counted = sum(member.examples for commit in commits for member in commit.members) / fragments
    # Steps and their seconds, of each island by itself.
    possible = sum(EXAMPLES * options.seconds * steps / seconds for steps, seconds in took.values())
    # After that time islands end, and the last one is no quorum.
    meetings = [pair for played in found.values() for pair in zip(played.reports, played.ends, strict=True)]
    waits = [report.wait_seconds for report, end in meetings if end <= options.seconds]
    return {
        "kind": kind,
        "times": options.times,
        "overlap": False,
        "quorum": 1,
        "grace": None,
        "fragments": 1,
        **scheme,
        "seconds": options.seconds,
        "rounds": len(commits),
        "mean_members": round(statistics.mean(len(commit.members) for commit in commits), 2),
        "goodput": round(counted / possible, 3),
        "mean_pause_seconds": round(statistics.mean(waits), 3),
        "median_pause_seconds": round(statistics.median(waits), 3),
        "longest_pause_seconds": round(max(waits), 3),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60, help="of the clock; a step of the others takes one")
    parser.add_argument("--times", type=float, default=4, help="how many times longer a slow step takes")
    parser.add_argument("--share", type=float, default=0.1, help="of the steps that are slow where it changes")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    append_rows(given.out, "grace", measure_grace(given))
