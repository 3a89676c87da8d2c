"""An island of several processes, over a store that process 0 alone asks: what each of them saw."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist as jd
from jaxdist.islands import bodies

ROUNDS = 3


def train(mesh, longest_whole):
    """The parameters after each round, and those that a second island finds in the run; each step halves the way to 1.

    The second one reads the parameters that were kept and the bodies of the rounds since.
    """
    tx = jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=1, reducer=jd.exact(), axis=None)

    @jax.jit
    def step(state):
        updates, opt = tx.update(state["params"] - 1.0, state["opt"], state["params"], sync=())
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def make_state():
        params = jnp.zeros(100)
        return {"params": params, "opt": tx.init(params)}

    state = jax.jit(make_state, out_shardings=NamedSharding(mesh, PartitionSpec()))()
    store, seen = jd.islands.memory(), []
    usual = bodies.LONGEST_WHOLE, bodies.PIECE
    bodies.LONGEST_WHOLE, bodies.PIECE = longest_whole, 64
    try:
        with jd.islands.join(store, tx, name="first", keep_every=10) as island:
            state = island.enter(state)
            for _ in range(ROUNDS):
                state, report = island.meet(step(state))
                seen.append([float(np.asarray(state["params"])[0]), *report.members])
        with jd.islands.join(store, tx, name="second", keep_every=10) as island:
            state = island.enter(state)
            seen.append(float(np.asarray(state["params"])[0]))
    finally:
        bodies.LONGEST_WHOLE, bodies.PIECE = usual
    return seen


def report(mesh):
    return {"whole": train(mesh, bodies.LONGEST_WHOLE), "in pieces": train(mesh, 100)}
