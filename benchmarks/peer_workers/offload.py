"""AdamW on the host's processor: `offload.host` beside DeepSpeed's CPU Adam and PyTorch's fused AdamW.

    python benchmarks/peers.py offload --torch-python PYTHON --deepspeed-python PYTHON --out benchmarks/reports/NAME

DeepSpeed's optimizer is the host's part of ZeRO-Offload; the device's part needs a GPU. Each system and size runs in a
process of its own, on all cores, and they take turns. Memory is that of the process without what it had after its
imports: parameters and gradients, 8 bytes an entry, and what the optimizer adds, of which two moments are 8. Times are
taken with kept memory, memory as it comes. `bound` is the time of the 28 bytes of an entry at the bandwidth of `x + 1`
in place, in the same turn.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import run_process, write_record
from worker import bytes_at_start, read_memory, reset_peak, take_output

sys.path.insert(1, str(Path(__file__).parents[1] / "host"))

import adam

HERE = Path(__file__).parent

NAMES = {
    "jaxdist": "jaxdist `offload.host(adamw)`",
    "optax": "optax `adamw`",
    "deepspeed": "DeepSpeed `DeepSpeedCPUAdam`",
    "torch": "PyTorch `AdamW(fused=True)`",
}


def make_steps(system: str, entries: int, leaves: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    if system == "torch":
        return adam.make_torch_steps(entries, leaves)
    if system == "deepspeed":
        ops = importlib.import_module("deepspeed.ops.adam")
        options = {"lr": 1e-3, "weight_decay": 1e-4, "adamw_mode": True}
        return adam.make_torch_steps(entries, leaves, lambda params: ops.DeepSpeedCPUAdam(params, **options))
    return adam.make_jax_steps(entries, leaves, offloaded=system == "jaxdist")


def start_library(system: str) -> dict[str, str]:
    """Imports a library and starts what it starts at its first use, such as compiling; its versions."""
    step, _ = make_steps(system, 64, 1)
    step()
    packages = {"torch": ["torch"], "deepspeed": ["deepspeed", "torch"]}.get(system, ["jax"])
    return {name: importlib.import_module(name).__version__ for name in packages}


def measure_child(system: str, entries: int, leaves: int, seconds: float) -> dict[str, Any]:
    versions = start_library(system)
    before = bytes_at_start()
    step, copy = make_steps(system, entries, leaves)
    step()
    reset_peak()
    if seconds:
        return {"step": adam.times(step, seconds), "copy": adam.times(copy, seconds / 4)}
    for _ in range(3):
        step()
    return {"versions": versions} | {name: size - before for name, size in read_memory().items()}


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    pythons = {"torch": given.torch_python, "deepspeed": given.deepspeed_python}
    systems = [name for name in NAMES if pythons.get(name, sys.executable)]
    rows: dict[tuple[int, int, str], dict[str, Any]] = {}
    for turn in range(given.turns):
        for entries in given.entries:
            for leaves in given.leaves:
                for system in systems[:: 1 if turn % 2 == 0 else -1]:
                    command = [pythons.get(system) or sys.executable, str(HERE.parent / "peers.py"), "offload"]
                    command += ["--out", str(given.out), "--child", system, str(entries), str(leaves)]
                    row = rows.setdefault(
                        (entries, leaves, system),
                        {"system": system, "entries": entries, "leaves": leaves, "step": [], "copy": []},
                    )
                    threads = {"OMP_NUM_THREADS": str(os.cpu_count()), "DS_ACCELERATOR": "cpu"}
                    if turn == 0:
                        row |= run_process([*command, "--seconds", "0"], threads)
                    if given.seconds:
                        settings = threads | adam.KEEP_MEMORY
                        timed = run_process([*command, "--seconds", str(given.seconds)], settings)
                        row["step"] += timed["step"]
                        row["copy"] += timed["copy"]
                    rows[entries, leaves, system] = row
                    print(f"{entries:10} {leaves:4} {system:10} turn {turn}", flush=True)
    return list(rows.values())


def make_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| entries | leaves | system | step, ms | entries a second | of the bound | bytes an entry | at most |",
        "|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        speed = "| | |"
        if row["step"]:
            step, bound = statistics.median(row["step"]), adam.BYTES * statistics.median(row["copy"]) / 8
            speed = f"{1e3 * step:.1f} | {row['entries'] / step / 1e9:.2f} G | {bound / step:.0%} |"
        now, peak = (row[name] / row["entries"] for name in ("now", "peak"))
        name = f"2^{row['entries'].bit_length() - 1} | {row['leaves']} | {NAMES[row['system']]}"
        lines.append(f"| {name} | {speed} {now:.1f} | {peak:.1f} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch-python", help="without it PyTorch is left out")
    parser.add_argument("--deepspeed-python", help="a Python that has deepspeed; without it DeepSpeed is left out")
    parser.add_argument("--entries", type=int, nargs="+", default=[2**24, 2**26], help="of all leaves together")
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each system and turn; 0: memory alone")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    parser.add_argument("--child", nargs=3, metavar=("SYSTEM", "ENTRIES", "LEAVES"), help=argparse.SUPPRESS)


def main(given: argparse.Namespace) -> None:
    if given.child:
        system, *sizes = given.child
        # Libraries print, at their first import and while they compile.
        output = take_output()
        print(json.dumps(measure_child(system, *map(int, sizes), given.seconds)), file=output)
        return
    rows = measure(given)
    write_record(
        given.out, "offload", {"cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}, make_table(rows)
    )
    print(make_table(rows))
