"""jaxdist, as one island of `failures.py`: DiLoCo over a folder, and a line in the log for each step.

An island takes its own steps between rounds; those that end a round have its report.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import sys
import time

import jax
import jax.numpy as jnp
import optax
from jax_model import compute_loss
from worker import DECAY, RATE, Problem, draw_batch, initial_params, open_log

import jaxdist as jd

PERIOD, ISLANDS = 4, 3


def main(name: str, folder: str, problem: str, pace: str, timeout: str, overlap: str = "") -> None:
    sizes = Problem(*map(int, problem.split(",")))
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jd.local_steps(optax.adamw(RATE, weight_decay=DECAY), outer, sync_period=PERIOD, axis=None)

    @jax.jit
    def take_step(state, batch):
        loss, gradients = jax.value_and_grad(compute_loss)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"], sync=())
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = jax.tree.map(jnp.asarray, initial_params(sizes))
    state = {"params": params, "opt": tx.init(params)}
    compiled = take_step.lower(state, draw_batch(sizes, 0, 0)).compile()
    log = open_log(folder, name)
    options = {"round_timeout": float(timeout), "begin_with": ISLANDS, "overlap": bool(overlap)}
    with jd.islands.join(os.path.join(folder, "run"), tx, name=name, **options) as island:
        state, number = island.enter(state), 0
        while True:
            state, loss = compiled(state, draw_batch(sizes, ord(name), number))
            loss, number = float(loss), number + 1
            if island.due(number - 1):
                state, report = island.meet(state)
                kept = {"round": report.round, "workers": len(report.members), "digest": report.digest}
                log(step=number, lost=False, counted=report.counted, loss=loss, **kept)
            else:
                log(step=number, lost=False, loss=loss)
            time.sleep(float(pace))


if __name__ == "__main__":
    main(*sys.argv[1:])
