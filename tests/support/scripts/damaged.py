"""One of two processes that read checkpoints which are damaged, for both or for one of them alone.

    jaxdist launch -n 2 damaged.py FOLDER [CASE ...]

Prints, as JSON, what each reading came to in this process. Of `DAMAGES` it tries those that are named. What a process
alone sees lies in a folder of its own.
"""

import contextlib
import errno
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist.checkpoint import _files, reader


def flip(file):
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def cut(file):
    file.write_bytes(file.read_bytes()[:-20])


def refuses(folder, *_):
    raise OSError(errno.EIO, "Input/output error", str(folder))


def largest(folder):
    return max((file for file in (folder / "arrays").rglob("*") if file.is_file()), key=lambda x: x.stat().st_size)


WHATEVER = {"skip_damaged": True, "allow_fresh_start": True}
# What happens to checkpoint 3, and to the eyes of which process.
DAMAGES = {
    "a file for both": (None, lambda folder: flip(largest(folder))),
    "the checksums for both": (None, lambda folder: cut(folder / "SHA256SUMS")),
    "the checksums for 0": (0, lambda folder: cut(folder / "SHA256SUMS")),
    "the checksums for 1": (1, lambda folder: (folder / "SHA256SUMS").unlink()),
    "the folder for 1": (1, shutil.rmtree),
}


def tried(function, *arguments, **options):
    try:
        found = function(*arguments, **options)
    except (ValueError, OSError, checkpoint.CheckpointPeerError) as error:
        file = getattr(error, "file", None)
        return [type(error).__name__, "" if file is None else file.name, str(error)]
    return [found.step, list(found.damaged), found.state["w"].addressable_data(0).tolist()]


def main():
    root = Path(sys.argv[1])
    jd.initialize(timeout_seconds=60)
    process, mesh = jax.process_index(), jd.make_mesh()

    def state(value):
        return jd.place({"w": jnp.full(3, value), "e": jd.PerWorker(jnp.full(1000, value))}, mesh)

    results = {}
    for name in sys.argv[2:]:
        whose, damage = DAMAGES[name]
        folder = root / name.replace(" ", "-")
        for step in (2, 3):
            checkpoint.save(folder, state(float(step)), step)
        if whose in (None, process):
            if whose is not None:
                folder = Path(shutil.copytree(folder, f"{folder}-{process}"))
            if whose == process or process == 0:
                damage(folder / "3")

        multihost_utils.sync_global_devices(name)
        results[name] = [tried(checkpoint.resume, folder, state(0.0))]

        results[name] += [tried(checkpoint.resume, folder, state(0.0), skip_damaged=True)]
    folder = root / "unreadable-for-1"
    checkpoint.save(folder, state(2.0), 2)
    with mock.patch.object(_files, "check", refuses) if process == 1 else contextlib.nullcontext():
        results["unreadable"] = [tried(checkpoint.resume, folder, state(0.0))]
        results["unreadable"] += [tried(checkpoint.resume, folder, state(0.0), **WHATEVER)]
        results["unreadable"] += [tried(checkpoint.restore, folder, state(0.0))]
    with mock.patch.object(reader, "fill", refuses) if process == 1 else contextlib.nullcontext():
        results["unread"] = [tried(checkpoint.resume, folder, state(0.0), **WHATEVER)]
        results["unread"] += [tried(checkpoint.restore, folder, state(0.0))]
    with mock.patch.object(_files, "steps", refuses) if process == 0 else contextlib.nullcontext():
        results["unlisted"] = [tried(checkpoint.resume, folder, state(0.0), **WHATEVER)]
    if process == 0:
        flip(largest(folder / "2"))
    multihost_utils.sync_global_devices("flipped")
    results["none left"] = [tried(checkpoint.resume, folder, state(0.0), skip_damaged=True)]
    results["none left"] += [tried(checkpoint.resume, folder, state(0.0), **WHATEVER)]
    results["no such step"] = tried(checkpoint.restore, folder, state(0.0), step=7)
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
