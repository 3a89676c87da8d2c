"""Data parallelism over two processes: the same step as on one machine, with each process making its part of the batch.

    jaxdist launch -n 2 examples/two_processes.py

starts both on this machine; without `jaxdist launch` the script does that itself. On a cluster it runs as it is:
`srun python examples/two_processes.py`, or see examples/cluster. Prints the loss, and the bytes that one worker
sends in a step.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd


class TrainState(NamedTuple):
    params: Any
    opt_state: Any


TEACHER = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.power_sgd(rank=4))), optax.adam(0.1))


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"]))


def train_step(state, batch):
    loss, grads = jd.local_value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), jax.lax.pmean(loss, "data")


def make_state():
    params = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
    return TrainState(params, tx.init(params))


def train() -> None:
    process = jax.process_index()
    mesh = jd.make_mesh()  # the devices of all processes
    state = jd.init_state(make_state, mesh)
    step = jd.distribute(train_step, mesh)
    rng = np.random.default_rng(process)  # each process reads its own data
    with jd.processes.watchdog(60) as watch:  # names the process that all wait for
        for number in range(201):
            x = rng.standard_normal((32, 64)).astype(np.float32)
            state, loss = watch(step, state, jd.global_batch({"x": x, "y": x @ TEACHER}, mesh))
            if process == 0 and number % 50 == 0:
                print(f"step {number}: loss {float(loss):.4f}", flush=True)
    batch = jd.global_batch({"x": x, "y": x @ TEACHER}, mesh)
    sent = jd.analysis.collectives(step.lower(state, batch).compile())
    if process == 0:
        print(jd.analysis.table(sent), flush=True)


if __name__ == "__main__":
    if jd.initialize():
        train()
    else:
        jd.processes.launch.launch([sys.executable, __file__], 2)
