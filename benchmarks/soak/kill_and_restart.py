"""Kills a random process of a job at a random moment, again and again: does it end as if nothing had happened?

python benchmarks/soak kill_and_restart --out benchmarks/reports/2026-11-faults

`jaxdist launch --restarts 4` runs `training.py` in two processes of two devices and starts it anew, from its newest
checkpoint, after each kill; after four it has done its steps, and is launched for more. Three methods share a job, each
with a model and a state of its own: their kills are the same. Kill k comes while the job is in its k-th lap of 20
steps, or, one in four, while it starts after the kill before. At the end of each lap the whole state is compared, leaf
by leaf and bit by bit, with that of an undisturbed job.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from common import write_record

from jaxdist import checkpoint

HERE = Path(__file__).parent
LAP, SAVE_EVERY, KILLS_PER_LAUNCH = 20, 5, 4
# A job that writes nothing for so many seconds, neither logs nor compiled programs nor checkpoints, hangs.
LIMIT = 120
GROUPS = (("exact", "ef_top_k", "slowmo"), ("power_sgd", "qsgd", "zero_1"), ("alq", "diloco", "gossip"))
# What each method must have to lose: leaves whose names contain these are others after each lap.
TO_LOSE = {
    "exact": ("mu",),
    "ef_top_k": ("residual",),
    "slowmo": ("outer",),
    "power_sgd": ("residual", ".q"),
    "qsgd": ("count",),
    "zero_1": ("mu",),
    "alq": ("levels",),
    "diloco": ("outer", "anchor"),
    "gossip": ("opt",),
}
# Starts are cheap where little is compiled, and that once; JAX writes its cache in process 0 alone.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def start(work, name, folder, methods, steps, *, restarts=0, save_every=SAVE_EVERY, pause=0.02):
    """Starts the launcher as a user would."""
    command = [sys.executable, "-m", "jaxdist.processes.launch", "-n", "2", "--restarts", str(restarts)]
    command += ["--logs", str(work / f"{name}-logs"), str(HERE / "training.py"), str(folder), "--methods", *methods]
    command += ["--steps", str(steps), "--save-every", str(save_every), "--pause", str(pause), "--devices", "2"]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FLAGS,
        "PYTHONPATH": str(HERE.parents[1]),
        "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with (work / f"{name}.err").open("w") as err:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=err)


class Job:
    """A started job, its logs and its checkpoints."""

    def __init__(self, work, name, folder, *arguments, **options):
        self.launcher = start(work, name, folder, *arguments, **options)
        self.folder, self.work, self.name = folder, work, name

    def said(self):
        """The output of the launcher itself."""
        return (self.work / f"{self.name}.err").read_text()

    def end(self):
        """Waits for the end of the job."""
        self.until(lambda: self.launcher.poll() is not None)
        if self.launcher.returncode:
            raise RuntimeError(f"{self.name}: {self.said()[-3000:]}")

    def log(self, attempt, process):
        file = self.work / f"{self.name}-logs" / (f"attempt-{attempt}" if attempt else "") / f"{process}.log"
        return file.read_text() if file.exists() else None

    def step(self, attempt, process):
        """The last step that an attempt has logged; -1 if there is none."""
        found = re.findall(r"^step (\d+):", self.log(attempt, process) or "", re.MULTILINE)
        return int(found[-1]) if found else -1

    def until(self, condition):
        """Waits until the condition is true, however slow the machine is, and returns its value."""
        written, end = None, time.monotonic() + LIMIT
        while not (found := condition()):
            if self.launcher.poll() is not None:
                raise RuntimeError(f"{self.name} ended too early: {self.said()[-3000:]}")
            if time.monotonic() > end:
                before, written, end = written, self.written(), time.monotonic() + LIMIT
                if written == before:
                    raise RuntimeError(f"{self.name} wrote nothing for {LIMIT} s: {self.said()[-3000:]}")
            time.sleep(0.003)
        return found

    def written(self):
        """The sizes of all files of the work, by which progress shows."""
        sizes = {}
        for path in self.work.rglob("*"):
            with contextlib.suppress(OSError):  # renamed since
                sizes[path] = path.stat().st_size
        return sizes

    def process(self, attempt, number):
        """The process id, among the children of the launcher; None before it runs."""
        wanted = {f"JAX_PROCESS_ID={number}".encode(), f"JAXDIST_ATTEMPT={attempt}".encode()}
        for child in Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split():
            if wanted <= set(Path(f"/proc/{child}/environ").read_bytes().split(b"\0")):
                return int(child)
        return None

    def phase(self, attempt, process):
        """The phase of the process, from its log and the files on disk."""
        if "from" not in (self.log(attempt, process) or ""):
            return "starting"
        if self.step(attempt, process) < 0:
            return "compiling"
        return "saving" if any(self.folder.glob("*.unfinished")) else "between saves"


def kill(job, number, draw):
    """Waits for the moment, kills, and returns the phase that the kill met. Each kill ends an attempt."""
    attempt, process = number % KILLS_PER_LAUNCH, draw.randrange(2)
    job.until(lambda: job.log(attempt, process) is not None)
    if attempt > 0 and draw.random() < 1 / 3:
        time.sleep(draw.uniform(0.0, 3.0))
    else:
        first = LAP * number + draw.randrange(2, LAP - 8)
        job.until(lambda: job.step(attempt, process) >= first)
        time.sleep(draw.uniform(0.0, 0.06))
    os.kill(job.until(lambda: job.process(attempt, process)), signal.SIGKILL)
    when, met = time.monotonic(), job.phase(attempt, process)
    step, newest = job.step(attempt, process), checkpoint.latest(job.folder)
    job.until(lambda: job.log(attempt + 1, process) is not None)
    seconds = round(time.monotonic() - when, 2)
    return {"kill": number, "process": process, "met": met, "step": step, "newest": newest, "restarted_s": seconds}


def differences(left, right):
    """The names of leaves that differ in any bit."""
    names = left.keys() | right.keys()
    return sorted(name for name in names if bits(left.get(name)) != bits(right.get(name)))


def bits(leaf):
    return [(x.shape, str(x.dtype), x.tobytes()) for x in map(np.asarray, jax.tree.leaves(leaf))]


def soak(methods, kills, seed, work):
    """Runs all kills of one job, and returns the changes in the state of each method."""
    draw, folders = random.Random(f"{seed} {methods}"), (work / "undisturbed", work / "killed")
    Job(work, "undisturbed", folders[0], methods, LAP * kills, save_every=LAP, pause=0.0).end()
    found = []
    for first in range(0, kills, KILLS_PER_LAUNCH):
        last = min(first + KILLS_PER_LAUNCH, kills)
        job = Job(work, f"killed-{first}", folders[1], methods, LAP * last, restarts=last - first)
        try:
            for number in range(first, last):
                found.append(kill(job, number, draw))
                print(*methods, found[-1], flush=True)
            job.end()
        finally:
            job.launcher.terminate()
        told = re.findall(r"ProcessFailedError: process (\d) was killed by SIGKILL", job.said())
        for one, process in zip(found[first:], told, strict=True):
            one["told"] = int(process)
    return {"kills": found, **compare_states(folders, methods, kills)}


def compare_states(folders, methods, kills):
    """The leaves of each method that differ after a lap, and those that a kill could lose."""
    differ, moved, before = {name: {} for name in methods}, {name: None for name in methods}, {}
    for end in range(LAP, LAP * kills + 1, LAP):
        left, right = (checkpoint.load(folder, step=end) for folder in folders)
        if left.data != right.data:
            raise RuntimeError(f"the place in the data differs after step {end}: {left.data} and {right.data}")
        for name in methods:
            mine, other = (of_method(one.state, name) for one in (left, right))
            differ[name][end] = differences(mine, other)
            changed = set(differences(mine, before.get(name, {})))
            moved[name] = changed if moved[name] is None else moved[name] & changed
            before[name] = mine
    return {"differ": differ, "moved": {name: sorted(leaves) for name, leaves in moved.items()}}


def of_method(state, name):
    """The leaves of a method: `params.NAME.`, `own.NAME.` and `opt.NAME.`."""
    return {leaf: value for leaf, value in state.items() if leaf.split(".")[1] == name}


def good(found):
    """Checks that nothing differs, there was something to lose, and the launcher named the process that was killed."""
    same = not any(leaves for laps in found["differ"].values() for leaves in laps.values())
    lost = [
        part for name, leaves in found["moved"].items() for part in TO_LOSE[name] if not any(part in x for x in leaves)
    ]
    return same and not lost and all(one["told"] == one["process"] for one in found["kills"])


def add_options(parser):
    parser.add_argument("--groups", nargs="+", type=int, default=range(len(GROUPS)), help="of methods (default: all)")
    parser.add_argument("--kills", type=int, default=20, help="of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the folder; existing results of other groups are kept")


def main(given):
    all_good = True
    for group in given.groups:
        work, began = Path(tempfile.mkdtemp()), time.monotonic()
        try:
            found = soak(GROUPS[group], given.kills, given.seed, work)
        finally:
            shutil.rmtree(work)
        found |= {"good": good(found), "seconds": round(time.monotonic() - began)}
        all_good &= found["good"]
        print(*GROUPS[group], {name: value for name, value in found.items() if name != "kills"}, flush=True)
        if given.out:
            file = given.out / "kill_and_restart.json"
            old = json.loads(file.read_text()) if file.exists() else {}
            write_record(given.out, "kill_and_restart", old | {" ".join(GROUPS[group]): found})
    return 0 if all_good else 1
