"""A process of a job that goes on with as many processes as it is given, each with one device.

    jaxdist launch -n N elastic.py FOLDER STEPS

Top-k with feedback and DiLoCo learn one batch, in one program. What a restored state holds goes to `FOLDER-N`.
"""

import sys
import time
from typing import Any, NamedTuple

import jax
import optax
from problems import batch, loss, params

import jaxdist as jd
from jaxdist import checkpoint

TOP_K = jd.error_feedback(jd.compressed(jd.top_k(0.25)))
SHARED = optax.chain(jd.all_reduce(TOP_K), optax.adam(0.02))
OWN = jd.local_sgd.diloco(optax.adam(0.02), sync_period=3, reducer=TOP_K)


class State(NamedTuple):
    shared: Any
    own: Any
    shared_opt: Any
    own_opt: Any


def make_state():
    return State(params(), jd.PerWorker(params()), SHARED.init(params()), OWN.init(params()))


def train_step(state, data):
    value, gradient = jd.local_value_and_grad(loss)(state.shared, data)
    updates, shared_opt = SHARED.update(gradient, state.shared_opt, state.shared)
    shared = optax.apply_updates(state.shared, updates)
    own_value, gradient = jd.local_value_and_grad(loss)(state.own, data)
    updates, own_opt = OWN.update(gradient, state.own_opt, state.own)
    own = optax.apply_updates(state.own, updates)
    return State(shared, own, shared_opt, own_opt), jax.lax.pmean((value, own_value), "data")


def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    jd.initialize(timeout_seconds=60)
    mesh = jd.make_mesh()
    state = jd.init_state(make_state, mesh)
    jd.processes.check_consistency(state, mesh=mesh, recipe={"steps": steps})
    found = checkpoint.resume(folder, state)
    state = found.state
    if found.step:
        checkpoint.save(f"{folder}-{mesh.size}", state, found.step)
    run, rows = jd.distribute(train_step, mesh), 24 // mesh.size
    part = jax.tree.map(lambda x: x[jax.process_index() * rows :][:rows], batch(24))
    with checkpoint.writing(folder) as writer, jd.processes.watchdog(60, step=found.step) as watch:
        for number in range(found.step, steps):
            state, losses = watch(run, state, jd.global_batch(part, mesh))
            print("step", number, *map(float, losses), flush=True)
            time.sleep(0.01)
            if (number + 1) % 5 == 0:
                writer.save(state, number + 1, data={"examples": 24 * (number + 1)})


if __name__ == "__main__":
    main()
