"""What tests of low-rank reducers share."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist as jd


def gradients(steps, workers, n=12, m=9, *, seed=0, unlike=1.0):
    """Noise around a mean of its own for each worker, over a decaying spectrum."""
    rng = np.random.default_rng(seed)
    spectrum = 0.8 ** np.arange(m)
    return (rng.standard_normal((steps, workers, n, m)) + unlike * rng.standard_normal((1, workers, n, m))) * spectrum


def compiled_for(mesh, reducer, shapes):
    """The program of one reduction on eight workers; nothing is allocated."""
    tx = jd.all_reduce(reducer)
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def step(state, batch):
        means, opt = tx.update(jax.tree.map(lambda x: x[0], batch), state["opt"])
        return {"means": means, "opt": opt}, {}

    state = jax.eval_shape(
        lambda: jd.init_state(
            lambda: {"means": jax.tree.map(lambda x: jnp.zeros(x.shape), like), "opt": tx.init(like)}, 8
        )
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), like)
    return jd.distribute(step, mesh).lower(state, batch).compile()
