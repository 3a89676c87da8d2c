"""Gradients that several calls of the step add up, around transformations whose updates are wider than gradients."""

import jax
import jax.numpy as jnp
import numpy as np
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
    run = jd.simulate(step, workers=2)
    for gradient, expected in ((1.0, 1.0), (3.0, 0.0)):
        state, updates = run(state, jnp.full(2, gradient))
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


@pytest.mark.parametrize("calls", [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
def test_calls_that_are_not_active_add_nothing(calls):
    """Worker 1 is active in some of the calls, and takes the step of those alone; its optimizer rests if in none."""
    inner = optax.trace(0.5)
    tx = jd.accumulate(jd.local_steps(inner, optax.sgd(1.0), sync_period=100), 2)
    state = jd.init_state(lambda: {"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 2)

    def step(state, batch):
        updates, opt = tx.update(batch[0, 0], state["opt"], state["x"], active=batch[0, 1] > 0)
        return {"x": state["x"] + updates, "opt": opt}, {}

    run = jd.simulate(step, 2)
    for number, active in enumerate(calls):
        state, _ = run(state, jnp.array([[1.0 + number, 1.0], [3.0 if active else 50.0, active]]))
    np.testing.assert_allclose(state["x"].value, [1.5, 3.0 * max(calls)])
    np.testing.assert_allclose(jax.tree.leaves(state["opt"].inner.inner)[0], [1.5, 3.0 * max(calls)])
