"""One process of an island.

`island.py FOLDER NAME ROUNDS BEGIN_WITH OVERLAP FRAGMENTS OWNERS TIMEOUT GRACE PACE PATIENCE [POINTS]`: `FOLDER` may be
the address of an S3 server, `OVERLAP` is 0 or 1, a `GRACE` less than `TIMEOUT` begins with two islands, and `PACE` is
the time to sleep in each step. At each of the `POINTS`, joined by commas, the process stops itself. At SIGTERM it sends
its progress and leaves. Each process prints one JSON line for each meeting: the report, and in `machine_seconds` how
much of its wait was the machine's and not the protocol's.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist as jd


def seconds_without_processor():
    """For how long this thread was ready to run and did not, because others did; Linux alone tells."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except OSError:
        return 0.0


class MachineClock(threading.Thread):
    """Counts the seconds for which this process did not run, and those that calls of the store took.

    A thread that sleeps for 50 ms and wakes up later than that was stopped, or had no processor, for the difference.
    One that computes waits more often: it is told by the system. What both count only ever shortens the protocol's part
    on a machine that is busy.
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
        stalled = self._stalled + max(time.monotonic() - self._woke - self.PERIOD, 0.0)
        return self._in_store + stalled + seconds_without_processor()

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


class StopPoints:
    """Stops this process at one point after another, each time when it has met undisturbed since the last one.

    A point is "step", or a call of the store such as "before put bodies/" or "after create commit".
    """

    def __init__(self, points):
        self._left, self._lock, self._meetings = list(points), threading.Lock(), 0

    def met(self, report):
        with self._lock:
            self._meetings = self._meetings + 1 if report.counted and not report.late else 0

    def reach(self, point):
        with self._lock:
            if self._meetings >= 2 and self._left and self._left[0] == point:
                self._left.pop(0)
                self._meetings = 0
                os.kill(os.getpid(), signal.SIGSTOP)
                print(json.dumps({"stopped": point}), flush=True)

    def watch(self, store):
        def watch_function(kind, function):
            def call(*arguments):
                self._reach_call("before", kind, arguments)
                try:
                    return function(*arguments)
                finally:
                    self._reach_call("after", kind, arguments)

            return call

        return jd.islands.SharedStore(*map(watch_function, store._fields, store))

    def _reach_call(self, when, kind, arguments):
        # A deletion has no name: it is of many.
        name = arguments[0] if isinstance(arguments[0], str) else ""
        for part in ("bodies/", "drift/", "commit", "means/"):
            if part in name:
                self.reach(f"{when} {kind} {part}")
        self.reach(f"{when} {kind}")


def open_store(folder):
    if "://" not in folder:
        return jd.islands.folder(folder)
    return jd.islands.bucket(
        "s3://islands/run", endpoint=folder, region="us-east-1", access_key_id="key", secret_access_key="secret"
    )


def main(folder, name, rounds, begin_with, overlap, fragments, owners, timeout, grace, pace, patience, points=()):
    jd.initialize(heartbeat_timeout_seconds=20)
    mesh = jd.make_mesh({"data": jax.device_count()})
    # Owners average no codes.
    reducer = jd.exact() if owners else jd.error_feedback(jd.compressed(jd.qsgd(4)))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jd.local_steps(optax.adam(0.05), outer, sync_period=4, fragments=fragments, reducer=reducer, axis=None)
    # Each process has examples of its own, around the goal of the island.
    rng = np.random.default_rng([len(name), jax.process_index()])
    goal = np.random.default_rng(len(name)).normal(size=(40, 30))
    examples = (goal + rng.normal(size=(jax.local_device_count(), 40, 30))).astype(np.float32)
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), examples)

    @jax.jit
    def step(state, batch):
        goals = jnp.split(batch.mean(0), fragments, axis=1)
        gradients = [x - goal for x, goal in zip(state["params"], goals, strict=True)]
        updates, opt = tx.update(gradients, state["opt"], state["params"], sync=())
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def make_state():
        params = [jnp.zeros((40, 30 // fragments)) for _ in range(fragments)]
        return {"params": params, "opt": tx.init(params)}

    state = jax.jit(make_state, out_shardings=NamedSharding(mesh, PartitionSpec()))()
    state = step(state, batch) and state  # compiled before the others wait
    clock, stops = MachineClock(), StopPoints(points)
    store = clock.time_calls(stops.watch(open_store(folder)))
    options = {"round_timeout": timeout, "begin_with": begin_with, "overlap": bool(overlap), "keep_every": 5}
    options["owners"] = owners
    if grace < timeout:
        options |= {"grace": grace, "quorum": 2}
    with jd.islands.join(store, tx, name=name, **options) as island:
        state, number = island.enter(state), 0
        # Entering has all the time that a busy machine needs to compile.
        island._options = island._options._replace(patience=patience)
        while True:
            state, number = step(state, batch), number + 1
            time.sleep(pace)
            stops.reach("step")
            if jd.processes.preemption_requested(number):
                island.leave(state)
                return
            if island.due(number - 1):
                before = clock.seconds()
                state, report = island.meet(state)
                stops.met(report)
                line = report._asdict() | {"machine_seconds": clock.seconds() - before}
                print(json.dumps(line), flush=True)
                if report.round >= rounds:
                    return


if __name__ == "__main__":
    place, points = sys.argv[1:3], [one.split(",") for one in sys.argv[12:]]
    main(*place, *map(int, sys.argv[3:8]), *map(float, sys.argv[8:12]), *points)
