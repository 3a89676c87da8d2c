"""Several steps of a reducer for several workers, in one program on one device."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.comm import over
from jaxdist.reducers import Extras
from jaxdist.state import length_with_padding
from jaxdist.state.marks import Sharded, map_marked


def trajectory(reducer, updates, *, state=None, params=None):
    """Updates `[steps, W, *s]` -> `(means [steps, *s], owns [steps, W, *s], states [steps, W, ...])`.

    Every worker's mean is compared bit for bit. `state` replaces the reducer's first one; `params` are passed to it.
    """

    def one_worker(updates):
        first = jax.tree.map(lambda x: x[0], updates)

        def step(state, x):
            reduced, state = reducer.reduce(x, state, over("data"), Extras(params=params))
            return state, (reduced.mean, reduced.own, state)

        return jax.lax.scan(step, _cut(reducer.init(first)) if state is None else state, updates)[1]

    updates = jax.tree.map(jnp.asarray, updates)
    means, owns, states = jax.jit(jax.vmap(one_worker, in_axes=1, out_axes=1, axis_name="data"))(updates)
    for leaf in jax.tree.leaves(means):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:, :1], leaf.shape))
    return jax.tree.map(lambda x: np.asarray(x[:, 0]), means), jax.tree.map(np.asarray, owns), states


def _cut(state):
    """This worker's part of what is `Sharded`."""
    comm = over("data")

    def one(marks, leaf):
        for mark in marks:
            if isinstance(mark, Sharded):
                length = length_with_padding(mark, comm.size)
                leaf = jnp.pad(leaf.ravel(), (0, length - leaf.size)).reshape(comm.size, -1)[comm.index]
        return leaf

    return map_marked(one, state)
