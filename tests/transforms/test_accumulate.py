"""Gradients that several calls of the step add up, around transformations whose updates are wider than gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdist as jd

SCALE = 4.0
CHAIN = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.5))
TRANSFORMATIONS = {
    "loss scale": (jnp.float16, SCALE, jd.transforms.dynamic_loss_scale(CHAIN, initial=SCALE)),
    "master copy": (jnp.bfloat16, 1.0, jd.zero_redundancy(optax.sgd(0.5), master_dtype=jnp.float32)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_updates_that_are_wider_than_gradients(name):
    dtype, scale, inner = TRANSFORMATIONS[name]
    tx = jd.accumulate(inner, 2)

    def step(state, batch):
        params, opt_state = state
        gradients = jax.tree.map(lambda x: jnp.full_like(x, scale * jnp.mean(batch)), params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), updates

    params = {"w": jnp.ones(3, dtype)}
    state = jd.place((params, tx.init(params)), 2)
    for gradient, expected in ((1.0, 1.0), (3.0, 0.0)):
        state, updates = jd.simulate(step, workers=2)(state, jnp.full(2, gradient))
        assert updates["w"].dtype == jnp.float32
        assert state[0]["w"].dtype == dtype
        assert jnp.ravel(state[0]["w"]).tolist() == [expected] * state[0]["w"].size
