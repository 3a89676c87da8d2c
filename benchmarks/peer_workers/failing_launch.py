"""jaxdist, as one process of `jaxdist launch --restarts` in `failures.py`: an all-reduce, checkpoints every ten steps.

The launcher starts the whole job again, which resumes from its newest checkpoint: a line in the log for each step.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_model import compute_loss
from worker import DECAY, RATE, Problem, describe, draw_batch, initial_params, open_log

import jaxdist as jd

SAVE_EVERY = 10


class State(NamedTuple):
    params: Any
    opt: Any


def main(folder: str, problem: str, pace: str) -> None:
    sizes = Problem(*map(int, problem.split(",")))
    jd.initialize(timeout_seconds=60)
    mesh, rank = jd.make_mesh(), jax.process_index()
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.adamw(RATE, weight_decay=DECAY))

    def make_state() -> State:
        params = jax.tree.map(jnp.asarray, initial_params(sizes))
        return State(params, tx.init(params))

    def take_step(state: State, batch: Any) -> tuple[State, jax.Array]:
        loss, gradients = jd.local_value_and_grad(compute_loss)(state.params, batch)
        updates, opt = tx.update(gradients, state.opt, state.params)
        return State(optax.apply_updates(state.params, updates), opt), jax.lax.pmean(loss, "data")

    found = jd.checkpoint.resume(os.path.join(folder, "saved"), jd.place(make_state(), mesh))
    state, step = found.state, jd.distribute(take_step, mesh)
    log = open_log(folder, "abc"[rank])
    with jd.checkpoint.writing(os.path.join(folder, "saved")) as writer:
        for number in range(found.step, 10**9):
            state, loss = step(state, jd.global_batch(draw_batch(sizes, rank, number), mesh))
            shown = float(loss)
            known = describe(np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state.params))
            log(step=number + 1, lost=False, **known, loss=shown)
            if (number + 1) % SAVE_EVERY == 0:
                writer.save(state, number + 1)
            time.sleep(float(pace))


if __name__ == "__main__":
    main(*sys.argv[1:])
