"""One of two processes that take steps under a watchdog, until something happens at step 21, or before all ("late 1").

    python watched.py "killed 1" FILE [SECONDS]

FILE then has the time. SECONDS, 3 if it is left out, are those of the watchdog, which says when it names somebody. What
comes to a good end does so at step 40, and prints the state.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
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
    elif verb == "warned":
        signal.raise_signal(signal.SIGUSR1)
    elif verb == "asleep":
        time.sleep(60)
    elif verb in ("pauses", "late"):
        time.sleep(35)
    elif verb == "suspended":
        time.sleep(2)
    elif verb == "raises":
        raise ValueError("bad data")


def main() -> None:
    assert jd.initialize(timeout_seconds=60)
    mesh = jd.make_mesh()

    def add(state, batch):
        mean = jax.lax.pmean(batch.mean(), "data")
        return jnp.sin(state) + mean, {"mean": mean}

    step = jd.distribute(add, mesh)
    state = jd.init_state(lambda: jnp.zeros(()), mesh)  # without a message
    batch = jd.global_batch(np.ones(mesh.size, np.float32)[: jax.local_device_count()], mesh)
    jd.processes.check_consistency(state, mesh=mesh)
    what, file, seconds = sys.argv[1], sys.argv[2], float((*sys.argv[3:], 3)[0])
    with jd.processes.watchdog(seconds, on_timeout=lambda _: print("named at", time.time(), flush=True)) as watch:
        for number in range(40 if what.startswith(("pauses", "late", "nothing", "suspended")) else 100_000):
            if number == (0 if what.startswith("late") else 21):
                happen(what, file)
            state, _ = watch(step, state, batch)
            if jd.processes.preemption_requested(number):
                print("left after step", number, flush=True)
                break
            time.sleep(0.01)
    print("ended with", np.asarray(state).tobytes().hex(), flush=True)


if __name__ == "__main__":
    main()
