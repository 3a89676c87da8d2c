"""A worker is killed or stopped: how long the others wait, beside torchft and hivemind.

    python benchmarks/peers.py failures --torchft-python PYTHON --hivemind-python PYTHON --out benchmarks/reports/NAME

Three workers on loopback train the same small network; each step sleeps a little, as if there were more to compute. A
worker is killed by SIGKILL, and not started again, or stopped by SIGSTOP for some seconds. From the logs of the others:
the time from the event to the end of their next step and to that of the next step that the group takes together, the
longest time between two of their steps, the steps that were computed in vain, and whether their parameters have the
same bits afterwards. Timeouts are 5 s in every system, the lighthouse's wait
for members of torchft included; its wait for a heartbeat, and hivemind's matchmaking, are what their documentation
names.
"""

import argparse
import collections
import contextlib
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import append_rows
from worker import Problem

HERE = Path(__file__).parent
WORKERS, VICTIM = "abc", "c"
PROBLEM = Problem(width=256, blocks=4, inputs=64, examples=32)
NAMES = {
    "islands": "jaxdist islands, a round every 4 steps",
    "islands_overlap": "the same, `overlap=True`",
    "launch": "`jaxdist launch --restarts`, a checkpoint every 10 steps",
    "torchft": "torchft, DDP",
    "hivemind": "hivemind `Optimizer`",
}
Line = dict[str, Any]


def read_logs(folder: Path, name: str) -> list[Line]:
    """The lines of a worker, of all processes that it has had."""
    texts = [path.read_text() for path in folder.glob(f"{name}.*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return sorted(lines, key=lambda line: line["time"])


def find_process(folder: Path, name: str) -> int:
    """The process that writes the newest log of a worker."""
    newest = max(folder.glob(f"{name}.*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return int(newest.name.split(".")[1])


def send(process: int, number: signal.Signals) -> None:
    """Sends a signal to a worker and to its children, such as hivemind's daemon, as if its machine failed."""
    if os.getpgid(process) == process:
        os.killpg(process, number)
    else:
        os.kill(process, number)


def is_joint(line: Line) -> bool:
    """Whether the group took this step together: islands do when a round ends."""
    return not line["lost"] and "digest" in line


def summarize(lines: list[Line], when: float) -> dict[str, Any]:
    """What a survivor did around the event."""
    before, after = ([line for line in lines if (line["time"] > when) is late] for late in (False, True))
    steps = [line for line in after if not line["lost"]]
    around = [before[-1], *after]
    # A job that starts again repeats what it had done since its checkpoint.
    repeated = max(before[-1]["step"] - steps[0]["step"] + 1, 0) if steps else 0
    return {
        "next_step": steps[0]["time"] - when,
        "next_joint_step": next(line["time"] for line in after if is_joint(line)) - when,
        "longest_gap": max(b["time"] - a["time"] for a, b in itertools.pairwise(around)),
        "usual_gap": statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(before)),
        "lost": sum(line["lost"] for line in after) + repeated,
    }


def compare_params(logs: dict[str, list[Line]], start: float, end: float) -> dict[str, Any]:
    """The steps between two times that two workers or more took together.

    How many there are, after how many of them parameters differ, and how far their sizes are apart at most, relative.
    """
    found = collections.defaultdict(list)
    for lines in logs.values():
        for line in lines:
            if start < line["time"] <= end and is_joint(line):
                found[line.get("round", line["step"])].append(line)
    shared = [steps for steps in found.values() if len(steps) > 1]
    different = sum(len({line["digest"] for line in steps}) > 1 for steps in shared)
    sizes = [[line["magnitude"] for line in steps] for steps in shared if "magnitude" in steps[0]]
    apart = max((max(each) / min(each) - 1 for each in sizes), default=None)
    return {"shared": len(shared), "different": different, "apart": apart}


def read_version(system: str, given: argparse.Namespace) -> str:
    """The version of a system in its own Python."""
    pythons = {"torchft": given.torchft_python, "hivemind": given.hivemind_python}
    package = system if system in pythons else "jaxdist"
    code = f"import importlib.metadata as m; print('{package}', m.version('{package}'))"
    command = [pythons.get(system, sys.executable), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Run:
    """The processes of one system, for one event."""

    def __init__(self, system: str, given: argparse.Namespace, folder: Path):
        self.folder, self.processes, self.logs = folder, [], folder / "output"
        self.logs.mkdir()
        problem, pace, timeout = ",".join(map(str, PROBLEM)), str(given.pace), str(given.timeout)
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        self.environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
        cache = {"JAX_COMPILATION_CACHE_DIR": str(given.compiled.absolute())}
        self.environment |= cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        pythons = {"torchft": given.torchft_python, "hivemind": given.hivemind_python}
        python = pythons.get(system, sys.executable)
        if system == "launch":
            script = [str(HERE / "failing_launch.py"), str(folder), problem, pace]
            launcher = ["-m", "jaxdist.processes.launch", "-n", str(len(WORKERS)), "--restarts", "1"]
            self.start("launch", [python, *launcher, "--logs", str(self.logs), *script])
            return
        if system == "torchft":
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            # It waits for a third worker as long as for a dead one: its default, a minute, is for starts.
            options = ["--min_replicas", "2", "--join_timeout_ms", str(int(1000 * given.timeout))]
            lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"[::]:{port}", *options]
            self.start("lighthouse", lighthouse)
            self.environment["LIGHTHOUSE"] = f"http://localhost:{port}"
        for name in WORKERS:
            script, *overlap = system.split("_")
            command = [python, str(HERE / f"failing_{script}.py"), name, str(folder), problem, pace, timeout]
            self.start(name, command + overlap)

    def start(self, name: str, command: list[str]) -> None:
        with (self.logs / f"{name}.txt").open("w") as output:
            options = {"stdout": output, "stderr": subprocess.STDOUT, "env": self.environment}
            # A group of its own, so that children (hivemind's daemon) end with it.
            self.processes.append(subprocess.Popen(command, start_new_session=True, **options))

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def count_joint(self, name: str, since: float) -> int:
        return sum(is_joint(line) and line["time"] > since for line in read_logs(self.folder, name))

    def errors(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.logs.rglob("*.txt")))

    def close(self) -> None:
        for process in self.processes:
            for number in (signal.SIGCONT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def start_run(system: str, given: argparse.Namespace) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(system, given, Path(folder))
        try:
            yield run
        finally:
            run.close()


def measure(system: str, event: str, given: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """One event, from the start of the workers to some steps of the survivors after it."""
    survivors = [name for name in WORKERS if name != VICTIM]
    found: dict[str, Any] = {"system": system, "event": event, "timeout": given.timeout, "pace": given.pace}
    with start_run(system, given) as run:
        started = run.wait_until(
            lambda: all(run.count_joint(name, 0) >= given.before for name in WORKERS), max(90, given.patience)
        )
        if not started:
            return found | {"error": run.errors()}
        time.sleep(draw.random())
        victim, when = find_process(run.folder, VICTIM), time.monotonic()
        send(victim, signal.SIGKILL if event == "kill" else signal.SIGSTOP)
        resumed = when
        if event == "stop":
            time.sleep(given.stop)
            resumed = time.monotonic()
            send(victim, signal.SIGCONT)
        went_on = run.wait_until(
            lambda: all(run.count_joint(name, resumed) >= given.after for name in survivors), given.patience
        )
        logs = {name: read_logs(run.folder, name) for name in WORKERS}
        if not went_on:
            return found | {"error": run.errors()}
        each = [summarize(logs[name], when) for name in survivors]
        found |= {name: max(one[name] for one in each) for name in each[0]}
        if event == "stop":
            # What the stopped worker does by itself.
            run.wait_until(lambda: run.count_joint(VICTIM, resumed) >= given.after, 20)
            logs = {name: read_logs(run.folder, name) for name in WORKERS}
            back = [line["time"] - resumed for line in logs[VICTIM] if line["time"] > resumed and is_joint(line)]
            found |= {"stopped_seconds": resumed - when, "back_seconds": back[0] if back else None}
        members = survivors if event == "kill" and system != "launch" else list(WORKERS)
        found["params_before"] = compare_params(logs, 0.0, when)
        found["params_after"] = compare_params({name: logs[name] for name in members}, resumed, math.inf)
    return found


def make_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Seconds from the event, the slower of two survivors; median of the runs, and the longest in parentheses.",
        "",
        "| event | system | runs | a step, usually | next step | next step together | longest gap | steps in vain | "
        "parameters differ, before | after |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["event"], row["system"]].append(row)
    for (event, system), group in groups.items():
        done = [row for row in group if "error" not in row]
        name = f"| {event} | {NAMES[system]} | {len(done)} of {len(group)} |"
        if not done:
            lines.append(f"{name} | | | | | | |")
            continue
        columns = [
            f"{statistics.median(values):.1f} ({max(values):.1f})"
            if key != "usual_gap"
            else f"{statistics.median(values):.2f}"
            for key in ("usual_gap", "next_step", "next_joint_step", "longest_gap")
            for values in [[row[key] for row in done]]
        ]
        lost = sorted({row["lost"] for row in done})
        columns.append(" to ".join(str(x) for x in dict.fromkeys([lost[0], lost[-1]])))
        for when in ("params_before", "params_after"):
            params = [row[when] for row in done]
            apart = max((one["apart"] for one in params if one["apart"]), default=0.0)
            differ = f"{sum(one['different'] for one in params)} of {sum(one['shared'] for one in params)}"
            columns.append(differ + (f", by {apart:.0e}" if apart else ""))
        lines.append(f"{name} {' | '.join(columns)} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torchft-python", help="a Python that has torchft; without it torchft is left out")
    parser.add_argument("--hivemind-python", help="a Python that has hivemind; without it hivemind is left out")
    parser.add_argument("--systems", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--events", nargs="+", choices=["kill", "stop"], default=["kill", "stop"])
    parser.add_argument("--runs", type=int, default=3, help="of each event")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that a step sleeps")
    parser.add_argument("--timeout", type=float, default=5.0, help="of each system, seconds")
    parser.add_argument("--stop", type=float, default=12.0, help="seconds that a worker is stopped")
    parser.add_argument("--before", type=int, default=5, help="steps together before the event")
    parser.add_argument("--after", type=int, default=3, help="steps together after it")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to go on, and 90 or more to start")
    parser.add_argument("--compiled", type=Path, default=Path("runs/peers-compiled"), help="cache of compiled programs")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report; runs add up there")


def main(given: argparse.Namespace) -> None:
    there = {"torchft": given.torchft_python, "hivemind": given.hivemind_python}
    draw = random.Random(0)
    for system in given.systems:
        if system in there and not there[system]:
            continue
        for event in given.events:
            for _ in range(given.runs):
                found = measure(system, event, given, draw)
                found |= {"version": read_version(system, given), "load_after": os.getloadavg()[0]}
                print(
                    found.get("error", ""), {key: value for key, value in found.items() if key != "error"}, flush=True
                )
                append_rows(given.out, "failures", [found])
    path = given.out / "failures.jsonl"
    table = make_table([json.loads(line) for line in path.read_text().splitlines()])
    (given.out / "failures.md").write_text(table + "\n")
    print(table)
