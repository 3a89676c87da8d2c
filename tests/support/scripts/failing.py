"""One of two processes of a job in which one cannot do its part of a save, without a watchdog.

    jaxdist launch -n 2 failing.py FOLDER

Prints, as JSON, what each of them came to in this process, and after how many seconds. `report` has cases that
another job of two processes tries.
"""

import contextlib
import errno
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist.checkpoint import _files, _runs
from jaxdist.checkpoint import writer as writing_module

FULL = ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']")


class Failing(NamedTuple):
    """Writes that have begun, of which one ends in an error."""

    begun: Any

    def result(self):
        raise FULL

    def cancel(self):
        for one in self.begun:
            one.cancel()


def begins_and_fails(coroutine):
    return [Failing(run(coroutine))]


def raises(*_):
    raise OSError(errno.EACCES, "Permission denied")


run = writing_module.run_to_end
# What fails, in which process.
FAILURES = {
    "the disk of 0": (0, mock.patch.object(writing_module, "run_to_end", begins_and_fails)),
    "the disk of 1": (1, mock.patch.object(writing_module, "run_to_end", begins_and_fails)),
    "the copy of 0": (0, mock.patch.object(writing_module, "run_to_end", raises)),
    "the copy of 1": (1, mock.patch.object(writing_module, "run_to_end", raises)),
    "the state of 1": (1, mock.patch.object(writing_module._manifest, "name_leaves", raises)),
    "the lock": (0, mock.patch.object(_files, "_lock_file", raises)),
    "the folder": (0, mock.patch.object(_files, "begin", raises)),
    "the commit": (0, mock.patch.object(_files, "commit", raises)),
}


def again(folder, state):
    """One save fails, in the copy or only later, and the next one tells those who have not heard of it."""
    found = []
    with checkpoint.writing(folder) as writer:
        for step in (2, 3, 4):
            with contextlib.ExitStack() as failing:
                if step == 2 and jax.process_index() == 1:
                    failing.enter_context(mock.patch.object(writing_module, "run_to_end", raises))
                found.append(tried(writer.save, state, step)[0])
    return [found, checkpoint.latest(folder)]


def tried(function, *arguments):
    began = time.monotonic()
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, getattr(error, "process", None), str(error), time.monotonic() - began]
    return ["", None, "", time.monotonic() - began]


def make_state(mesh):
    return jd.place({"w": jnp.arange(6.0), "e": jd.PerWorker(jnp.ones(5))}, mesh)


def report(mesh, root):
    state = make_state(mesh)
    found = {"again": again(root / "again", state)}
    found["different steps"] = tried(checkpoint.save, root / "different", state, jax.process_index())
    leaves = (np.float32(1.0), jnp.zeros(()), jax.random.key(0))
    found["not placed"] = [tried(checkpoint.save, root / "not placed", {**state, "own": leaf}, 1) for leaf in leaves]
    return found


def main():
    root = Path(sys.argv[1])
    jd.initialize(timeout_seconds=60)
    state = make_state(jd.make_mesh())

    def beside(folder):
        with checkpoint.writing(folder) as writer:
            writer.save(state, 2)
            writer.wait()

    results = {}
    for name, (whose, failure) in FAILURES.items():
        folder = root / name.replace(" ", "-")
        checkpoint.save(folder, state, 1)
        with failure if jax.process_index() == whose else contextlib.nullcontext():
            results[name] = [tried(checkpoint.save, folder, state, 2), tried(beside, folder)]
        results[name] += [checkpoint.resume(folder, state).step, tried(checkpoint.save, folder, state, 3)]
    with mock.patch.object(_runs, "VISIBLE_SECONDS", 1.0):
        results["own disks"] = tried(checkpoint.save, root / f"own-{jax.process_index()}", state, 1)
    results["own disks"] += [checkpoint.latest(root / f"own-{jax.process_index()}")]
    large, folder = 3_000_000_000, root / "large"
    checkpoint.save(folder, state, large)
    found = checkpoint.resume(folder, state), checkpoint.restore(folder, state, step=large)
    results["large"] = [found[0].step, found[1]["w"].addressable_data(0).tolist()]
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
