"""Enters a method in the board of `benchmarks/board`: bytes and seconds to a loss over 100 Mbit/s.

    python benchmarks/race board my_method:make --title "My method" --by "A. Person"
    python benchmarks/race board ef:power_sgd:4 --title "PowerSGD, rank 4, feedback"
    taskset -c 0 python benchmarks/race board --costs

The first argument is a method as `jaxdist compare --reducers` takes it; modules are looked for in
`benchmarks/board/methods`. The command trains with three seeds, and records the steps to the loss and what the compiled
step sends. Then it measures what a worker computes and encodes in a step, for all entries with `--costs`. It writes
`entries.json`, and the table in `benchmarks/board/README.md` and `docs/board.md`.
"""

import argparse
import csv
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tables
from common import ROOT, write_record

from jaxdist._cli import race
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import costs
from jaxdist.analysis.cost import Link
from jaxdist.analysis.step_time import Schedule, StepCost, Traffic, step_seconds

FOLDER = ROOT / "benchmarks" / "board"
METHODS = FOLDER / "methods"
PAGES = (FOLDER / "README.md", ROOT / "docs" / "board.md")
# The rules of the board, which its README explains.
TARGET = 2.6
STEPS = 96
SEEDS = 3
WORKERS = 4
BATCH = 32
MODEL = "gpt:demo"
OPTIMIZER = "adamw:2e-3"
# Medians of a step, of which the least counts: that which other work on the machine disturbed least.
TURNS = 3
LINK = Link("100 Mbit/s", tables.LATENCY, 100e6 / 8 * tables.PAYLOAD)
TABLE = re.compile(r"^\| method \|.*\n(?:\|.*\n)*", re.MULTILINE)

Entry = dict[str, Any]


def train(method: str, optimizer: str) -> Entry:
    """The steps to the target with each seed, and the bytes and hops of a step, from `jaxdist compare --link`."""
    settings = {"optimizer": optimizer, "steps": STEPS, "model": MODEL, "target": TARGET, "link": "100mbit"}
    settings |= {"seeds": SEEDS, "devices": WORKERS, "batch": BATCH}
    # Milliseconds. In this run the workers share the cores: `measure_costs` measures one of them.
    settings["compute"] = 1
    with tempfile.TemporaryDirectory() as out:
        settings |= {"out": out, "table": f"{out}/run.csv"}
        options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        paths = os.pathsep.join([str(METHODS), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "jaxdist._cli", "compare", "--reducers", method, *options]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths})
        with Path(out, "run-links.csv").open() as file:
            (found,) = csv.DictReader(file)
        _, curves = race.read_curves(Path(out, "log.jsonl"))
    steps = curves[method].steps_to(TARGET).tolist()
    if not all(map(math.isfinite, steps)):
        raise SystemExit(f"{method} reached {TARGET} after {steps} of {STEPS} steps; to be entered, every seed must")
    sent = {"wire_bytes": float(found["wire_bytes_per_step"]), "hops": float(found["hops_per_step"])}
    return {"method": method, "optimizer": optimizer, "steps": steps, **sent}


def measure_costs(entries: list[Entry]) -> None:
    """Adds the seconds that one worker of a step computes and encodes on this machine, one entry after the other."""
    workload, examples = parse.parse_workload("text", MODEL), BATCH // WORKERS
    computed: dict[str, float] = {}
    for entry in entries:
        name, optimizer = entry["method"], entry["optimizer"]
        # Once for all methods that go around the same optimizer, so that noise does not put them in order.
        if optimizer not in computed:
            steps = [costs.measure_compute(workload, optimizer, examples, repetitions=9) for _ in range(TURNS)]
            computed[optimizer] = min(steps)
        sizes = {"workers": WORKERS, "examples": examples, "compute": computed[optimizer]}
        method = parse.parse_method(name, optimizer, STEPS)
        turns = [costs.measure_cost(name, method, workload, optimizer=optimizer, **sizes) for _ in range(TURNS)]
        compute, coding = min(turn.compute for turn in turns), min(turn.coding for turn in turns)
        print(f"{name}: computation {1e3 * compute:.1f} ms, coding {1e3 * coding:.2f} ms", flush=True)
        entry |= {"compute": compute, "coding": coding, "schedule": [*turns[0].schedule]}


def step_of(entry: Entry) -> float:
    """Seconds of a step over the link, as `jaxdist compare --link` predicts them."""
    traffic = Traffic(entry["wire_bytes"], entry["hops"])
    return step_seconds(StepCost(entry["compute"], entry["coding"], traffic, Schedule(*entry["schedule"])), LINK)


def make_table(entries: list[Entry]) -> str:
    """A row for each entry whose step was measured, the one with the fewest seconds first."""
    head = ["method", "seconds", "MB sent", "steps", "kB a step", "ms a step", "by", "commit"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * 5 + "---|---|"]
    measured = [(step_of(entry), statistics.mean(entry["steps"]), entry) for entry in entries if "compute" in entry]
    for step, mean, entry in sorted(measured, key=lambda row: row[0] * row[1]):
        sent = entry["wire_bytes"]
        fewest, most = min(entry["steps"]), max(entry["steps"])
        numbers = [f"{step * mean:.1f} ({step * fewest:.1f}-{step * most:.1f})", f"{sent * mean / 1e6:.1f}"]
        numbers += [f"{mean:.0f} ({fewest:.0f}-{most:.0f})", f"{sent / 1e3:,.0f}", f"{1e3 * step:.0f}"]
        cells = [f"{entry['title']}, `{entry['method']}`", *numbers, entry["by"], f"`{entry['commit']}`"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def read_entries() -> list[Entry]:
    return json.loads((FOLDER / "entries.json").read_text())


def find_commit() -> str:
    """The commit of the sources, which must be as they are there: a row of the table can be repeated."""
    changed = subprocess.run(["git", "status", "--porcelain", "jaxdist"], cwd=ROOT, capture_output=True, check=True)
    if changed.stdout:
        raise SystemExit("jaxdist has changes that are not committed: a row names the commit that it was trained with")
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", nargs="?", help="MODULE:FUNCTION, or the spelling of a method of the library")
    parser.add_argument("--title", help="what the table calls it; by default its spelling")
    parser.add_argument("--by", default="jaxdist", help="whose entry it is")
    parser.add_argument("--optimizer", default=OPTIMIZER, help="at the learning rate of your choice")
    parser.add_argument("--costs", action="store_true", help="measure the steps of all entries anew, on this machine")


def main(given: argparse.Namespace) -> None:
    sys.path.insert(0, str(METHODS))
    entries = read_entries()
    entered: list[Entry] = []
    if given.method:
        commit = find_commit()
        entry = train(given.method, given.optimizer)
        entered = [entry | {"title": given.title or given.method, "by": given.by, "commit": commit}]
        entries = [entry for entry in entries if entry["method"] != given.method] + entered
        # What takes minutes is not lost if the rest is interrupted: `--costs` completes it.
        write_record(FOLDER, "entries", entries)
    measure_costs(entries if given.costs else entered)
    write_record(FOLDER, "entries", entries)
    for page in PAGES:
        page.write_text(TABLE.sub(lambda _: make_table(entries), page.read_text()))
    print(make_table(entries))
