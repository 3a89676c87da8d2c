"""ZeRO beside PyTorch's DDP, `ZeroRedundancyOptimizer` and FSDP2: memory, time and bytes of two processes over gloo.

    python benchmarks/peers.py sharding --torch-python PYTHON --out benchmarks/reports/NAME

The same network, initial values and batches, AdamW, one thread each, on loopback. Every mode has two processes, which
stay up for the whole run and take turns. Memory is what `/proc` counts, less the same process before it had a model.
Once as memory comes (`default`), and once with freed memory kept by the process (`kept`), as the other benchmarks time
both systems: else much of a step is page faults.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import KEEP_MEMORY, write_record
from worker import Problem

sys.path.insert(1, str(Path(__file__).parents[1] / "links"))

import cluster

HERE = Path(__file__).parent

MODES = {"torch": ("ddp", "zero_1", "fsdp_2", "fsdp_3"), "jaxdist": ("exact", "zero_1", "zero_2", "zero_3")}
NAMES = {
    ("torch", "ddp"): "PyTorch DDP",
    ("torch", "zero_1"): "PyTorch DDP, `ZeroRedundancyOptimizer`",
    ("torch", "fsdp_2"): "PyTorch FSDP2, `reshard_after_forward=False`",
    ("torch", "fsdp_3"): "PyTorch FSDP2",
    ("jaxdist", "exact"): "jaxdist `all_reduce(exact())`",
    ("jaxdist", "zero_1"): "jaxdist `zero_redundancy`, stage 1",
    ("jaxdist", "zero_2"): "jaxdist `zero_redundancy`, stage 2",
    ("jaxdist", "zero_3"): "jaxdist stage 3, `zero.gathered_scan`",
}
WORKERS, WARM_UP = 2, 3
MALLOC = {
    "default": {},
    "kept": KEEP_MEMORY,
}


class Workers(cluster.Processes):
    """The processes of one mode: what they said when they were ready, and of their first steps."""

    about: list[dict[str, Any]]
    first: list[dict[str, Any]]

    def warm_up(self) -> None:
        self.about = self.answers()
        self.first = self.ask(steps=WARM_UP)


@contextlib.contextmanager
def start_modes(given: argparse.Namespace, malloc: str, places: list[Any]) -> Iterator[dict[tuple[str, str], Workers]]:
    """Starts every mode, one after the other, and lets each take its first steps."""
    started: dict[tuple[str, str], Workers] = {}
    pythons = {"torch": given.torch_python, "jaxdist": sys.executable}
    settings = MALLOC[malloc] | {"COMPILED": str(given.compiled.absolute())}
    try:
        for system, modes in MODES.items():
            for mode in modes if pythons[system] else ():
                arguments = [mode, ",".join(map(str, given.problem))]
                script = str(HERE / f"sharding_{system}.py")
                workers = started[system, mode] = Workers(pythons[system], script, places, settings, arguments)
                workers.warm_up()
        yield started
    finally:
        for workers in started.values():
            workers.close()


def measure(given: argparse.Namespace, malloc: str) -> Iterator[list[dict[str, Any]]]:
    """Yields, after each turn, a row for each mode: seconds of each step, losses, bytes sent, and memory by turn."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with cluster.loopback(WORKERS) as places, start_modes(given, malloc, places) as started:
        for key, workers in started.items():
            about = workers.about[0]
            losses = [statistics.mean(both) for both in zip(*(answer["losses"] for answer in workers.first))]
            rows[key] = {
                "system": key[0],
                "mode": key[1],
                "malloc": malloc,
                **about,
                "losses": losses,
                "load": os.getloadavg()[0],
            }
            rows[key] |= {"seconds": [], "peak": [], "now": [], "sent_bytes": []}
        for turn in range(given.turns):
            # The order turns around: machines drift.
            for key, workers in list(started.items())[:: 1 if turn % 2 == 0 else -1]:
                before, row = places[0].sent(), rows[key]
                answers = workers.ask(steps=given.steps)
                row["sent_bytes"].append((places[0].sent() - before) / given.steps)
                seconds = [max(both) for both in zip(*(answer["seconds"] for answer in answers))]
                row["seconds"] += [] if given.untimed else seconds
                row["losses"] += [statistics.mean(both) for both in zip(*(answer["losses"] for answer in answers))]
                for name in ("peak", "now"):
                    pairs = zip(answers, workers.about)
                    row[name].append(max(answer[name] - about["before"] for answer, about in pairs))
                print(f"{malloc} {key}: {1e3 * statistics.median(seconds):.0f} ms", flush=True)
            yield list(rows.values())


def make_table(found: dict[str, Any]) -> str:
    """Memory as it comes, times with kept memory where both were measured, and what the compiler says."""
    parameters, rows = found["parameters"], {(row["system"], row["mode"], row["malloc"]): row for row in found["rows"]}
    lines = [
        f"{parameters / 1e6:.1f} M parameters, two processes; bytes per parameter of a process: *between steps* and "
        "*at most* are resident memory without the process as it was before it had a model, *arguments* and "
        "*temporaries* are the compiler's. Times are medians, *kept* with freed memory kept.",
        "",
        "| system | between steps | at most | arguments | temporaries | sent, MB a step | step, ms | step, kept, ms |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for system, mode in dict.fromkeys(key[:2] for key in rows):
        default, kept = (rows.get((system, mode, malloc)) for malloc in MALLOC)
        known = default or kept
        sizes = [statistics.median(known[name]) for name in ("now", "peak")]
        sizes += [known[name] for name in ("arguments", "temporaries") if name in known]
        columns = [f"{size / parameters:.1f}" for size in sizes] + [""] * (4 - len(sizes))
        columns.append(f"{statistics.median(known['sent_bytes']) / 1e6:.1f}")
        times = [row["seconds"] if row else [] for row in (default, kept)]
        columns += [f"{1e3 * statistics.median(seconds):.0f}" if seconds else "" for seconds in times]
        lines.append(f"| {NAMES[system, mode]} | {' | '.join(columns)} |")
    ends = [row["losses"][-1] for row in found["rows"]]
    first = found["rows"][0]["losses"]
    apart = max(abs(a - b) / (1e-9 + abs(b)) for row in found["rows"] for a, b in zip(row["losses"][:5], first))
    lines += [
        "",
        f"Losses: {first[0]:.4f} at the first step, {min(ends):.4f} to {max(ends):.4f} at step {len(first)}; in the "
        f"first five steps they differ by {apart:.0e} at most.",
    ]
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch-python", help="a Python that has torch; without it only jaxdist runs")
    parser.add_argument("--problem", nargs="+", type=int, default=list(Problem()), help=" ".join(Problem._fields))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--malloc", nargs="+", choices=list(MALLOC), default=list(MALLOC))
    parser.add_argument("--untimed", action="store_true", help="memory alone: other work runs on the machine")
    parser.add_argument("--compiled", type=Path, default=Path("runs/peers-compiled"), help="cache of compiled programs")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report; a run adds to it")


def main(given: argparse.Namespace) -> None:
    problem = Problem(*given.problem)
    path = given.out / "sharding.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in before if row["malloc"] not in given.malloc]
    for malloc in given.malloc:
        rows: list[dict[str, Any]] = []
        for rows in measure(given, malloc):
            found = {"problem": problem._asdict(), "parameters": problem.parameters(), "rows": kept + rows}
            write_record(given.out, "sharding", found, make_table(found))
        kept += rows
    print(make_table(found))
