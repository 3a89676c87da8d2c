"""An ordinary job: it resumes from its newest checkpoint, trains, saves in the background, and ends at a step.

jaxdist launch -n 2 --restarts 4 benchmarks/soak/training.py FOLDER --methods ef_top_k diloco --steps 80

It trains one model by each method, all in one program. Batches are drawn from the number of the step, so that a resumed
job reads the same batches. Each step sleeps a little, as if there were something to compute: a job of
a second has no moments to be killed at.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd

BATCH, INPUTS, HIDDEN, OUTPUTS = 48, 12, 32, 4
PERIOD = 3  # of local steps; no divisor of the steps between two checkpoints, so that rounds are cut in two
ADAM = optax.adam(0.01)


def make_optimizer(reducer):
    return optax.chain(jd.all_reduce(reducer), ADAM)


# The transformation for so many workers.
METHODS = {
    "exact": lambda workers: make_optimizer(jd.exact()),
    "ef_top_k": lambda workers: make_optimizer(jd.error_feedback(jd.compressed(jd.top_k(0.1)))),
    "power_sgd": lambda workers: make_optimizer(jd.error_feedback(jd.power_sgd(rank=2))),
    "qsgd": lambda workers: make_optimizer(jd.compressed(jd.qsgd(4, bucket=64))),
    "alq": lambda workers: make_optimizer(jd.reducers.alq(3, bucket=64, update_steps=(2,), every=5)),
    "slowmo": lambda workers: jd.local_sgd.slowmo(
        optax.sgd(0.05, momentum=0.9), sync_period=PERIOD, learning_rate=0.05, buffers="maintain"
    ),
    "diloco": lambda workers: jd.local_sgd.diloco(optax.adamw(0.003), sync_period=PERIOD),
    "zero_1": lambda workers: jd.zero_redundancy(ADAM),
    "gossip": lambda workers: jd.gossip(
        ADAM, jd.topology.ring(workers), method=jd.decentralized.choco(jd.top_k(0.25), step_size=0.3)
    ),
}
OWN_PARAMETERS = ("slowmo", "diloco", "gossip")  # each worker's differ


class State(NamedTuple):
    """The states of all methods by name: replicated parameters, per-worker parameters, and optimizer states."""

    params: Any
    own: Any
    opt: Any


def make_state(transformations):
    """Makes the state of one worker."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": 0.3 * jax.random.normal(first, (INPUTS, HIDDEN)),
        "b1": jnp.zeros(HIDDEN),
        "w2": 0.2 * jax.random.normal(second, (HIDDEN, OUTPUTS)),
    }
    return State(
        {name: params for name in transformations if name not in OWN_PARAMETERS},
        jd.PerWorker({name: params for name in transformations if name in OWN_PARAMETERS}),
        {name: tx.init(params) for name, tx in transformations.items()},
    )


def batch(step):
    """The global batch of a step, the same for any number of workers."""
    x = np.random.default_rng(step).standard_normal((BATCH, INPUTS), np.float32)
    return {"x": x, "y": np.sin(x[:, :OUTPUTS]) + x[:, OUTPUTS : 2 * OUTPUTS] ** 2}


def loss(params, data):
    hidden = jnp.tanh(data["x"] @ params["w1"] + params["b1"][None])
    return jnp.mean((hidden @ params["w2"] - data["y"]) ** 2)


def make_step(transformations):
    def step(state, data):
        values, state = {}, State(dict(state.params), dict(state.own), dict(state.opt))
        for name, tx in transformations.items():
            models = state.own if name in OWN_PARAMETERS else state.params
            value, gradient = jd.local_value_and_grad(loss)(models[name], data)
            updates, state.opt[name] = tx.update(gradient, state.opt[name], models[name])
            models[name] = optax.apply_updates(models[name], updates)
            values[name] = jax.lax.pmean(value, "data")
        return state, values

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--methods", nargs="+", choices=METHODS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds that a step sleeps")
    given = parser.parse_args()

    jd.runtime.use_cpu_devices(given.devices)
    jd.initialize(timeout_seconds=60)
    mesh = jd.make_mesh()
    transformations = {name: METHODS[name](mesh.size) for name in given.methods}
    state = jd.init_state(lambda: make_state(transformations), mesh)
    jd.processes.check_consistency(state, mesh=mesh, recipe=vars(given))
    found = jd.checkpoint.resume(given.folder, state)
    state = found.state
    print("from", found.step, flush=True)

    step = jd.distribute(make_step(transformations), mesh)
    rows = BATCH // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    with jd.checkpoint.writing(given.folder) as writer, jd.processes.watchdog(60, step=found.step) as watch:
        for number in range(found.step, given.steps):
            local = jax.tree.map(lambda x: x[mine], batch(number))
            state, metrics = watch(step, state, jd.global_batch(local, mesh))
            time.sleep(given.pause)
            print(f"step {number}:", *(f"{name} {float(x):.6f}" for name, x in metrics.items()), flush=True)
            if (number + 1) % given.save_every == 0:
                writer.save(state, number + 1, data={"examples": BATCH * (number + 1)})


if __name__ == "__main__":
    main()
