"""Gradients that JAX types as `unreduced`: each worker has a term of a sum that was not taken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType

import jaxdist as jd
from jaxdist import analysis

X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
W = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
F16 = jd.compressors.cast(jnp.float16)
WRAPPERS = {
    "all_reduce": lambda reducer: optax.chain(jd.all_reduce(reducer), optax.sgd(1.0)),
    "delay": lambda reducer: optax.chain(jd.all_reduce(reducer, delay=1), optax.sgd(1.0)),
    "accumulate": lambda reducer: jd.accumulate(optax.chain(jd.all_reduce(reducer), optax.sgd(1.0)), 1),
    "zero_redundancy": lambda reducer: jd.zero_redundancy(optax.sgd(1.0), reducer=reducer),
}


def make_mesh(model=None):
    axes = {"data": 2} if model is None else {"data": 2, "model": model}
    kinds = (AxisType.Explicit,) * len(axes)
    devices = jax.devices()[: 2 * (model or 1)]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def loss_fn(w, x):
    return jnp.mean(jnp.square(jnp.matmul(x, w)))


def reduced_grad(w, x):
    """JAX's own idiom: the gradient of a parameter that is typed reduced is not summed."""
    return jax.grad(loss_fn)(jax.reshard(w, P(*jax.typeof(w).sharding.spec.partitions, reduced={"data"})), x)


def step_outside(tx):
    def step(state, x):
        grads = reduced_grad(state["w"], x)
        assert jax.typeof(grads).sharding.spec.unreduced == {"data"}
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}

    return jax.jit(step)


def run(tx, mesh, spec=None, calls=1):
    spec = P() if spec is None else spec
    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: {"w": jnp.asarray(W), "opt": tx.init(jnp.asarray(W))}, mesh)
        state["w"] = jax.device_put(state["w"], jax.NamedSharding(mesh, spec))
        x, step = jax.device_put(X, jax.NamedSharding(mesh, P("data"))), step_outside(tx)
        for _ in range(calls):
            state = step(state, x)
        return state, step.lower(state, x).compile()


def wanted():
    # Of the mean over rows and columns of (x w)².
    return W - 2 * X.T.astype(np.float64) @ (X @ W) / (8 * 3)


@pytest.mark.parametrize("name", WRAPPERS)
def test_terms_of_a_sum_are_gradients_outside_of_a_map(name):
    state, _ = run(WRAPPERS[name](jd.exact()), make_mesh(), calls=2 if name == "delay" else 1)
    np.testing.assert_allclose(state["w"], wanted(), rtol=1e-5)


def test_terms_beside_a_further_axis():
    tx = optax.chain(jd.all_reduce(jd.compressed(F16), specs=P(None, "model")), optax.sgd(1.0))
    w = np.concatenate([W, W[:, :1]], axis=1)
    mesh = make_mesh(2)
    with jax.set_mesh(mesh):
        state = jd.init_state(
            lambda: {"w": jnp.asarray(w), "opt": tx.init(jnp.asarray(w))}, mesh, specs={"w": P(None, "model")}
        )
        x, step = jax.device_put(X, jax.NamedSharding(mesh, P("data"))), step_outside(tx)
        new = step(state, x)
        ops = analysis.collectives(step.lower(state, x).compile()).ops
    np.testing.assert_allclose(new["w"], w - 2 * X.T @ (X @ w) / 32, atol=2e-3)
    # The halves of 4 x 4 numbers in 16 bits between workers; what is sent along the other axis is no gradient.
    between = [op for op in ops if any(len({device // 2 for device in group}) > 1 for group in op.replica_groups)]
    assert sum(op.wire_bytes for op in between) == 16


@pytest.mark.parametrize("name", ["all_reduce", "accumulate", "zero_redundancy"])
def test_terms_of_a_sum_are_gradients_inside_of_a_map(name):
    """Parameters that `pcast` types as reduced."""
    tx, mesh = WRAPPERS[name](jd.exact()), jd.make_mesh({"data": 2}, devices=jax.devices()[:2])

    def local_loss(w, x):
        # The terms of the loss of all workers.
        return jnp.sum(jnp.square(jnp.matmul(x, w))) / (8 * 3)

    def step(state, x):
        grads = jax.grad(local_loss)(jax.lax.pcast(state["w"], "data", to="reduced"), x)
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {}

    state = jd.init_state(lambda: {"w": jnp.asarray(W), "opt": tx.init(jnp.asarray(W))}, mesh)
    state, _ = jd.distribute(step, mesh)(state, X)
    np.testing.assert_allclose(state["w"], wanted(), rtol=1e-5)


def test_compression_sends_its_bytes_and_nothing_else():
    _, program = run(WRAPPERS["all_reduce"](jd.compressed(F16)), make_mesh())
    assert sum(op.wire_bytes for op in analysis.collectives(program).ops) == 12 * 2


def test_a_gradient_that_is_summed_beside_one_that_is_not_is_named():
    tx, mesh = jd.all_reduce(jd.exact()), make_mesh()

    def step(state, x):
        grads = {"w": reduced_grad(state["w"], x), "b": jnp.zeros(3)}
        return tx.update(grads, tx.init(grads))

    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"the gradient \['b'\] is not typed unreduced.*optax.partition"),
    ):
        jax.jit(step)({"w": jnp.asarray(W)}, jax.device_put(X, jax.NamedSharding(mesh, P("data"))))


def test_other_methods_say_what_an_unreduced_gradient_is():
    tx, mesh = jd.optimizers.demo(0.1), jd.make_mesh({"data": 2}, devices=jax.devices()[:2])

    def step(state, x):
        grads = jax.grad(loss_fn)(jax.lax.pcast(state["w"], "data", to="reduced"), x)
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {}

    state = jd.init_state(lambda: {"w": jnp.asarray(W), "opt": tx.init(jnp.asarray(W))}, mesh)
    with pytest.raises(ValueError, match="typed unreduced over axis 'data': each worker has a term of its sum"):
        jd.distribute(step, mesh)(state, X)
