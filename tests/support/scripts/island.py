"""One island as a process, or as several of a launcher: `island.py FOLDER NAME ROUNDS BEGIN_WITH OVERLAP TIMEOUT PACE`.

Process 0 prints one JSON line for each meeting: the report, and in `machine_seconds` how much of its wait was the
machine's and not the protocol's. `OVERLAP` is 0 or 1, `PACE` the time to sleep in each step. At SIGTERM it sends its
progress and leaves.
"""

import json
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist as jd


class MachineClock(threading.Thread):
    """Counts the seconds for which this process did not run, and those that calls of the store took.

    A thread that sleeps for 50 ms and wakes up later than that was stopped, or had no processor, for the difference.
    """

    PERIOD = 0.05

    def __init__(self):
        super().__init__(daemon=True)
        self._stalled, self._in_store, self._woke = 0.0, 0.0, time.monotonic()
        self.start()

    def run(self):
        while True:
            time.sleep(self.PERIOD)
            now = time.monotonic()
            self._stalled, self._woke = self._stalled + max(now - self._woke - self.PERIOD, 0.0), now

    def seconds(self):
        # A stall may have ended before the thread has noticed it.
        return self._in_store + self._stalled + max(time.monotonic() - self._woke - self.PERIOD, 0.0)

    def time_calls(self, store):
        def time_function(function):
            def call(*arguments):
                started = time.monotonic()
                try:
                    return function(*arguments)
                finally:
                    self._in_store += time.monotonic() - started

            return call

        return jd.islands.SharedStore(*map(time_function, store))


def main(folder, name, rounds, begin_with, overlap, timeout, pace):
    jd.initialize(heartbeat_timeout_seconds=20)
    mesh = jd.make_mesh({"data": jax.device_count()})
    reducer = jd.error_feedback(jd.compressed(jd.qsgd(4)))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jd.local_steps(optax.adam(0.05), outer, sync_period=4, reducer=reducer, axis=None)
    # Each process has examples of its own, around the goal of the island.
    rng = np.random.default_rng([len(name), jax.process_index()])
    goal = np.random.default_rng(len(name)).normal(size=(40, 30))
    examples = (goal + rng.normal(size=(jax.local_device_count(), 40, 30))).astype(np.float32)
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), examples)

    @jax.jit
    def step(state, batch):
        updates, opt = tx.update(state["params"] - batch.mean(0), state["opt"], state["params"], sync=())
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def make_state():
        params = jnp.zeros((40, 30))
        return {"params": params, "opt": tx.init(params)}

    state = jax.jit(make_state, out_shardings=NamedSharding(mesh, PartitionSpec()))()
    state = step(state, batch) and state  # compiled before the others wait
    clock = MachineClock()
    store = clock.time_calls(jd.islands.folder(folder))
    options = {"round_timeout": timeout, "begin_with": begin_with, "overlap": bool(overlap), "keep_every": 5}
    with jd.islands.join(store, tx, name=name, **options) as island:
        state, number = island.enter(state), 0
        while True:
            state, number = step(state, batch), number + 1
            time.sleep(pace)
            if jd.processes.preemption_requested(number):
                island.leave(state)
                return
            if island.due(number - 1):
                before = clock.seconds()
                state, report = island.meet(state)
                if jax.process_index() == 0:
                    line = report._asdict() | {"machine_seconds": clock.seconds() - before}
                    print(json.dumps(line), flush=True)
                if report.round >= rounds:
                    return


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:6]), *map(float, sys.argv[6:]))
