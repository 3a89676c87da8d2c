"""ZeRO under plain `jit`: any optimizer, leaves that do not divide, and what XLA:CPU makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdist as jd
from jaxdist import analysis
from jaxdist.zero import zero_shardings


@pytest.fixture(scope="module")
def mesh():
    return jd.make_mesh({"data": 4}, devices=jax.devices()[:4])


def params():
    return {"w": jax.random.normal(jax.random.key(0), (128, 130)) * 0.1, "odd": jnp.ones((7, 5)), "b": jnp.zeros(128)}


def loss(p, batch):
    x = jnp.tanh(batch @ p["w"][:, :128] + p["b"][None])
    return jnp.mean(jnp.square(x - 1)) + jnp.sum(jnp.square(p["odd"]))


def step_of(tx, gradients):
    def step(state, batch):
        grads = jax.grad(loss)(state[0], batch)
        if gradients is not None:
            grads = lax.with_sharding_constraint(grads, gradients)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    return step


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "tx", [optax.adafactor(1e-2), optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-2))]
)
@pytest.mark.parametrize("stage", [1, 3])
def test_equals_whole_state(tx, stage, mesh):
    start = params(), tx.init(params())
    found = zero_shardings(*start, mesh, stage=stage, smallest=100)
    where = found.params, found.opt_state
    rows = jax.NamedSharding(mesh, jax.P("data"))
    step = jax.jit(step_of(tx, found.gradients), in_shardings=(where, rows), out_shardings=where)
    state, expected = jax.device_put(start, where), start
    plain = jax.jit(step_of(tx, None))
    for batch in np.random.default_rng(0).normal(size=(3, 8, 128)).astype(np.float32):
        state = step(state, jax.device_put(batch, rows))
        expected = plain(expected, batch)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_bytes_of_arguments(mesh):
    tx = optax.adam(1e-2)
    start = params(), tx.init(params())
    entries, odd = 128 * 130 + 128, 35
    rows = jax.NamedSharding(mesh, jax.P("data"))
    for stage, expected in enumerate([3 * entries, entries + entries / 2, entries + entries / 2, 3 * entries / 4]):
        found = zero_shardings(*start, mesh, stage=stage, smallest=100)
        where = found.params, found.opt_state
        step = jax.jit(step_of(tx, found.gradients), in_shardings=(where, rows), out_shardings=where)
        memory = analysis.memory(step.lower(start, np.zeros((8, 128), np.float32)).compile())
        assert memory.arguments == pytest.approx(4 * (expected + 3 * odd + 2 * 128), abs=64)


def test_refusals(mesh):
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3, got 4"):
        zero_shardings({}, (), mesh, stage=4)
    with pytest.raises(ValueError, match="the mesh has no axis 'model'"):
        zero_shardings({}, (), mesh, stage=1, axis="model")
