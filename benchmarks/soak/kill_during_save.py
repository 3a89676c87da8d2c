"""Kills a process that saves without pause, again and again: is the newest checkpoint always whole?

python benchmarks/soak kill_during_save --kills 50 --out benchmarks/reports/2026-11-checkpoints

Each child goes on from the newest checkpoint and saves step after step, keeping three, until SIGKILL comes at a random
moment. Then every checkpoint that is there is read, its files checked and each bit compared. At the end come
100 damages (a flipped bit, a cut end, a missing file) at random places: each must be refused by the file's name.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import write_record

from jaxdist import checkpoint

MIB = 8


def state_of(step):
    """A state of random bits, different for each step."""
    noise = np.random.default_rng(step).integers(0, 2**32, MIB << 18, np.uint32)
    return {f"part{number}": part for number, part in enumerate(np.split(noise, 8))}


def save_without_pause(folder):
    first = checkpoint.resume(folder, state_of(0)).step
    with checkpoint.writing(folder, keep=3) as writer:
        print("ready", flush=True)
        for step in range(first + 1, first + 10_000):
            writer.save(state_of(step), step, data={"examples": 32 * step})


def same(folder, step):
    found = checkpoint.load(folder, step=step)
    wanted = state_of(step)
    same_bits = all(np.array_equal(found.state[name], wanted[name]) for name in wanted)
    return same_bits and found.data == {"examples": 32 * step} and found.state.keys() == wanted.keys()


def kill(folder, draw):
    """Kills once; returns the phase that it met, and whether all checkpoints are good."""
    command = [sys.executable, str(Path(__file__).parent), "kill_during_save", "--child", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        time.sleep(draw.uniform(0.0, 1.5))
        child.send_signal(signal.SIGKILL)
    left = {one.suffix for one in folder.iterdir()}
    filling = next(folder.glob("*.unfinished"), None)
    if filling is None:
        met = "dropping an old one" if ".deleted" in left else "between"
    elif (filling / "SHA256SUMS").exists():
        met = "before the commit"
    else:
        met = "checksums" if (filling / "arrays").exists() else "writing"
    newest = checkpoint.latest(folder)
    steps = [int(one.name) for one in folder.iterdir() if one.name.isdecimal()]
    return {"met": met, "newest": newest, "kept": len(steps), "good": sum(same(folder, step) for step in steps)}


def damage(folder, draw):
    """Damages a file; returns whether it was refused by its name."""
    files = sorted(file for file in (folder / str(checkpoint.latest(folder))).rglob("*") if file.is_file())
    file = draw.choice(files)
    content, how = file.read_bytes(), draw.choice(["flipped", "cut", "missing"])
    if how == "missing" or not content:
        file.unlink()
    else:
        place = draw.randrange(len(content))
        flipped = bytes([content[place] ^ 1 << draw.randrange(8)])
        file.write_bytes(content[:place] + (b"" if how == "cut" else flipped + content[place + 1 :]))
    try:
        checkpoint.load(folder)
        named = False
    except checkpoint.CheckpointDamagedError as error:
        named = error.file == file
    file.write_bytes(content)
    return {"how": how, "file": file.name, "named": named}


def add_options(parser):
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)


def main(given):
    if given.child:
        save_without_pause(given.child)
        return
    folder, draw = Path(tempfile.mkdtemp()), random.Random(given.seed)
    try:
        kills = []
        for number in range(given.kills):
            kills.append(kill(folder, draw))
            print(number, kills[-1], flush=True)
        damages = [damage(folder, draw) for _ in range(100)]
    finally:
        shutil.rmtree(folder)
    found = {"kills": kills, "damages": damages}
    met = [one["met"] for one in kills]
    print({name: met.count(name) for name in sorted(set(met))})
    print("all good:", all(one["good"] == one["kept"] for one in kills), "named:", sum(d["named"] for d in damages))
    write_record(given.out, "kill_during_save", found)
