"""One of two processes that take steps under a watchdog, until something happens at step 20.

    python watched.py "killed 1" FILE

FILE then has the time.
"""

import os
import signal
import sys
import time

import jax
import numpy as np

import jaxdist as jd


def happen(what: str, file: str) -> None:
    verb, _, process = what.partition(" ")
    if process and int(process) != jax.process_index():
        return
    if process or jax.process_index() == 0:
        with open(file + ".part", "w") as out:
            out.write(str(time.time()))
        os.rename(file + ".part", file)
    if verb == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif verb == "asleep":
        time.sleep(60)
    elif verb == "raises":
        raise ValueError("bad data")


def main() -> None:
    assert jd.initialize(timeout_seconds=60)
    mesh = jd.make_mesh()

    def add(state, batch):
        mean = jax.lax.pmean(batch.mean(), "data")
        return state + mean, {"mean": mean}

    step = jd.distribute(add, mesh)
    state = jd.place(np.zeros((), np.float32), mesh)
    batch = jd.global_batch(np.ones(mesh.size, np.float32)[: jax.local_device_count()], mesh)
    with jd.watchdog(3) as watch:
        for number in range(100_000):
            if number == 21:
                happen(*sys.argv[1:])
            state, _ = watch(step, state, batch)
            if jd.preempted(number):
                print("left after step", number, flush=True)
                break
            time.sleep(0.01)


if __name__ == "__main__":
    main()
