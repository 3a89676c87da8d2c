"""Many steps of workers that step by themselves, in one program on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd


def targets(steps, workers=4, n=6, seed=0):
    """`[steps, W, n]`: where each worker is drawn to at each step, around a center of its own."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(1, workers, n)) + 0.3 * rng.normal(size=(steps, workers, n))).astype(np.float32)


def to_target(params, target):
    """The gradient of `|params - target|²/2`."""
    return jax.tree.map(jnp.subtract, params, target)


def run(tx, drawn, start=None, *, gradient=to_target, **extras):
    """Parameters `[steps, W, ...]`, anchors `[steps, ...]` and the last state `[W, ...]`.

    `drawn [steps, W, ...]` is a tree like the parameters; extras `[steps]` are agreed, `[steps, W]` each worker's.
    """
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), drawn) if start is None else start
    axes = {name: 1 if np.ndim(value) == 2 else None for name, value in extras.items()}

    def worker(drawn, extras):
        def step(state, inputs):
            params, opt_state = state
            target, given = inputs
            updates, opt_state = tx.update(gradient(params, target), opt_state, params, **given)
            params = optax.apply_updates(params, updates)
            return (params, opt_state), (params, jd.local_sgd.global_params(opt_state))

        state, (local, anchors) = jax.lax.scan(step, (params, tx.init(params)), (drawn, extras))
        return local, anchors, state[1]

    mapped = jax.vmap(worker, in_axes=(1, axes), out_axes=(1, 1, 0), axis_name="data")
    local, anchors, state = jax.jit(mapped)(*jax.tree.map(jnp.asarray, (drawn, extras)))
    for leaf in jax.tree.leaves(anchors):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:, :1], leaf.shape))
    return jax.tree.map(np.asarray, local), jax.tree.map(lambda x: np.asarray(x[:, 0]), anchors), state
