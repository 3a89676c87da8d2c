"""Many steps of decentralized methods on quadratic losses, in one program on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist import topology as graphs


def quadratics(workers, n=6, seed=0):
    """Curvatures and optima `[W, n]` of the workers' losses `a/2 (x - b)²`, which differ."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.5, 2, (workers, n)), rng.normal(size=(workers, n))


def run(tx, a, b, start, *, steps=20, known=None, noise=None, every=True, dtype=np.float32, **extras):
    """Parameters `[steps, W, n]` (the last ones with `every=False`) and the last state `[W, ...]`.

    `start [W, n]`; the state is initialized with `known [n]`, zeros if it is left out. `noise [steps, W, n]` is added
    to the gradients. Extras are `[steps]`, agreed, or `[steps, W]`.
    """
    noise = np.zeros((steps, 1, 1)) if noise is None else noise
    noise = np.broadcast_to(noise, (steps, *start.shape))
    a, b, start, noise = (np.asarray(x, dtype) for x in (a, b, start, noise))
    known = np.zeros(start.shape[1:]) if known is None else known
    axes = {name: 1 if np.ndim(value) == 2 else None for name, value in extras.items()}

    def worker(a, b, start, noise, extras):
        def step(state, inputs):
            params, opt_state = state
            updates, opt_state = tx.update(a * (params - b) + inputs[0], opt_state, params, **inputs[1])
            params = optax.apply_updates(params, updates)
            return (params, opt_state), params if every else None

        state, params = jax.lax.scan(step, (start, tx.init(jnp.asarray(known, dtype))), (noise, extras))
        return params if every else state[0], state[1]

    mapped = jax.vmap(worker, in_axes=(0, 0, 0, 1, axes), out_axes=(1 if every else 0, 0), axis_name="data")
    params, state = jax.jit(mapped)(*jax.tree.map(jnp.asarray, (a, b, start, noise, extras)))
    return np.asarray(params), state


def gradient(a, b):
    """What `run` gives the workers, for the references."""
    return lambda t, x: a * (x - b)


def matrices(graph, steps):
    return [graphs.matrix(graph, t) for t in range(steps)]


# The page's problem: ring of 8, losses a/2 (x - b)², their mean is least at 5.
CURVATURES = np.array([1.0, 2, 1, 2, 1, 2, 1, 4])[:, None]
OPTIMA = np.array([0.0, 1, 2, 3, 4, 5, 6, 10])[:, None]


def apart(x):
    """The root mean square distance of workers from their mean, `x [..., W, n]`."""
    return np.sqrt(np.square(x - x.mean(-2, keepdims=True)).sum(-1).mean(-1))
