"""Measures how much communication hides behind computation on CPUs with gloo, over shaped links.

    sudo python benchmarks/links pipelined --rate 1000 --out benchmarks/reports/NAME

The modes of `pipelined_step.py` take turns, a few steps at a time. *Exposed* is a mode's step less the step without
communication of the same turn; *hidden* is the part of `exact`'s exposed time that it saves. Needs root: the hosts are
network namespaces.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import cluster
from compare import System

MODES = ["none", "exact", "late", "late_thread", "pipelined:4", "layers"]
# Whole layers in the order in which they are ready, and the same across the border of steps; then by urgency, and in
# partitions of a quarter of a block, which has 3,074 KiB: those of other sizes are padded.
MODES += ["queue:barrier", "queue:fifo", "queue:priority", "queue:priority:769:1", "queue:priority:769:2"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of each link")
    parser.add_argument("--problem", choices=["lm", "mlp"], default="lm")
    parser.add_argument("--modes", nargs="*", default=MODES, help="as `pipelined_step.py` spells them")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of a mode at each turn")
    parser.add_argument("--out", type=Path)


def main(given: argparse.Namespace) -> None:
    if cluster.refusal():
        sys.exit(f"this needs shaped links, and cannot make them here: {cluster.refusal()}")
    records: list[dict] = []
    about = {"rate_mbit": given.rate, "hosts": given.hosts, "problem": given.problem, "steps": given.steps}

    def save():
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            name = f"links_{given.problem}_{given.hosts}x{given.rate:g}.json"
            (given.out / name).write_text(json.dumps({"about": about, "records": records}) + "\n")

    with cluster.hosts(given.hosts, given.rate) as places:
        system = System("pipelined_step.py", sys.executable, given.problem, places)
        about |= system.about
        try:
            for mode in given.modes:
                answers = system.run(mode, 0)
                losses = [statistics.mean(values) for values in zip(*(one["first_losses"] for one in answers))]
                print(f"{mode:21} ready; losses {' '.join(f'{loss:.6f}' for loss in losses)}", flush=True)
                records.append({"mode": mode, "repetition": -1, "losses": losses})
            for repetition in range(given.repetitions):
                for mode in given.modes if repetition % 2 == 0 else reversed(given.modes):
                    before = places[0].sent()
                    answers = system.run(mode, given.steps)
                    records.append(
                        {
                            "mode": mode,
                            "repetition": repetition,
                            "seconds": max(sum(answer["seconds"]) for answer in answers) / given.steps,
                            "bytes": (places[0].sent() - before) / given.steps,
                            "load": os.getloadavg()[0],
                        }
                    )
                save()
                print(table(records, given.modes), flush=True)
        finally:
            system.close()


def table(records: list[dict], modes: list[str]) -> str:
    turns = {mode: [r for r in records if r["mode"] == mode and r["repetition"] >= 0] for mode in modes}
    alone = [r["seconds"] for r in turns["none"]]
    exposed = {
        mode: [r["seconds"] - least for r, least in zip(turn, alone, strict=True)] for mode, turn in turns.items()
    }
    whole = statistics.median(exposed.get("exact", [0.0]))
    lines = ["| mode | step, ms | from-to | exposed, ms | hidden of exact's | sent, MB |", "|---|--:|--:|--:|--:|--:|"]
    for mode, turn in turns.items():
        times = sorted(1e3 * r["seconds"] for r in turn)
        waits = statistics.median(exposed[mode])
        hidden = f"{100 * (1 - waits / whole):.0f} %" if whole > 0 and mode not in ("none", "exact") else ""
        sent = statistics.median(r["bytes"] for r in turn) / 1e6
        spread = f"{times[0]:.0f}-{times[-1]:.0f}"
        lines.append(
            f"| {mode} | {statistics.median(times):.0f} | {spread} | {1e3 * waits:.0f} | {hidden} | {sent:.1f} |"
        )
    return "\n".join(lines)
