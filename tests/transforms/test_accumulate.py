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


LOCAL = {
    "around": lambda: jd.accumulate(jd.local_steps(optax.sgd(0.5), optax.sgd(1.0), sync_period=2), 2),
    "inside": lambda: jd.local_steps(jd.accumulate(optax.sgd(0.5), 2, axis=None), optax.sgd(1.0), sync_period=4),
    "gossip": lambda: jd.accumulate(jd.gossip(optax.sgd(0.5), jd.topology.ring(8)), 2),
}


@pytest.mark.parametrize("name", LOCAL)
def test_models_that_differ_are_the_same_on_a_mesh(name, mesh):
    tx = LOCAL[name]()

    def step(state, batch):
        params, opt_state = state
        updates, opt_state = tx.update(params - batch[0], opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    found = []
    for place, run in ((8, jd.simulate(step, workers=8)), (mesh, jd.distribute(step, mesh))):
        state = jd.place((jd.PerWorker(jnp.ones(3)), tx.init(jnp.ones(3))), place)
        for number in range(4):
            state, _ = run(state, jnp.arange(8.0) + number)
        found.append(state[0].value)
    assert jnp.allclose(*found, atol=1e-6)
    assert not jnp.allclose(found[0], 1.0)


def test_what_is_not_a_count_or_a_flag_is_refused():
    params = {"w": jnp.ones(3)}
    tx = jd.accumulate(CHAIN, 2)
    with pytest.raises(ValueError, match=r"sync must be True or False, .* got 'no'"):
        tx.update(params, tx.init(params), params, sync="no")
