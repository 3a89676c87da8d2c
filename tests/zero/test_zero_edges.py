"""Gradients in another dtype, gradients that are no means, and states per worker around and inside ZeRO."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist as jd
from jaxdist.transforms import dynamic_loss_scale, loss_scale, per_worker


def test_gradients_that_are_no_means_are_refused(mesh):
    tx, x = jd.zero_redundancy(optax.sgd(1.0), reducer=None), jnp.zeros(32)

    def step(state, batch):
        _, gradient = jd.local_value_and_grad(lambda x, batch: jnp.sum(x * batch[0]))(state["x"], batch)
        updates, opt = tx.update(gradient, state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    state = jd.place({"x": x, "opt": tx.init(x)}, mesh)
    with pytest.raises(ValueError, match=r"with reducer=None .* put all_reduce in front"):
        jd.distribute(step, mesh)(state, jnp.ones((mesh.size, 32)))


@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.sgd(0.1)], ids=["adam", "sgd"])
def test_scaled_gradients_of_half_precision_do_not_vanish(inner):
    """Unscaled they are float32: 1e-5 has a square below all numbers of float16."""

    def update(tx):
        tx, x = dynamic_loss_scale(tx, initial=2.0**10), jnp.ones(16, jnp.float16)

        def step(state, batch):
            def loss(x):
                return jnp.sum(x.astype(jnp.float32) * batch[0])

            _, gradient = jd.local_value_and_grad(loss, scale=loss_scale(state["opt"]))(state["x"])
            updates, opt = tx.update(gradient, state["opt"], state["x"])
            return {"x": state["x"], "opt": opt}, updates.astype(jnp.float32)

        state = jd.place({"x": x, "opt": tx.init(x)}, 2)
        return jd.simulate(step, 2)(state, jnp.full((2, 16), 1e-5))[1]

    plain = update(optax.chain(jd.all_reduce(jd.exact()), inner))
    np.testing.assert_allclose(update(jd.zero_redundancy(inner)), plain, rtol=1e-3)


def test_buckets_do_not_depend_on_the_dtype():
    """The state is made for copies in float32, two buckets; the updates of float16 are half as many bytes."""
    tx = dynamic_loss_scale(jd.zero_redundancy(optax.sgd(0.1), stage=2, master_dtype=jnp.float32))
    params = {f"layer_{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float16) for i in range(8)}

    def step(state, batch):
        gradients = jax.tree.map(lambda p: p * batch[0], state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    # Shapes only: nothing of this size is computed.
    state = jax.eval_shape(lambda params: jd.place({"params": params, "opt": tx.init(params)}, 2), params)
    new, _ = jax.eval_shape(jd.simulate(step, 2), state, jax.ShapeDtypeStruct((2,), jnp.float16))
    assert [x.shape for x in jax.tree.leaves(new)] == [x.shape for x in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    "inner", [jd.accumulate(optax.adam(0.1), 2, axis=None), optax.chain(per_worker(optax.trace(0.9)), optax.sgd(0.1))]
)
def test_a_state_per_worker_inside_is_refused(inner):
    with pytest.raises(ValueError, match=r"accumulate\(zero_redundancy\(inner\), k\), and per_worker in front"):
        jd.zero_redundancy(inner).init(jnp.zeros(3))


def test_a_state_per_worker_of_the_fast_axis():
    params = jnp.zeros(3)
    inner = optax.chain(per_worker(optax.clip(1.0), axis="chip"), jd.zero_redundancy(optax.sgd(0.1), axis="chip"))
    assert jd.local_steps(inner, optax.sgd(1.0), sync_period=2, axis="pod").init(params)
    adam = jd.recipes.compressed_adam(0.1, jd.exact(), axis="chip")
    assert jd.local_steps(adam, optax.sgd(1.0), sync_period=2, axis="pod").init(params)
    inner = optax.chain(per_worker(optax.trace(0.9)), jd.all_reduce(jd.exact(), axis="chip"), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"or per_worker\(\.\.\., axis='chip'\)"):
        jd.local_steps(inner, optax.sgd(1.0), sync_period=2, axis="pod").init(params)


@pytest.mark.parametrize("axis", ["chip", ("pod", "chip")])
def test_parts_of_a_batch_on_two_levels(axis):
    """Parameters differ between pods, whichever axis the gradients are local to."""
    sizes = {"pod": 2, "chip": 2}
    mesh = jd.make_mesh(sizes, devices=jax.devices()[:4])
    tx = jd.local_steps(jd.zero_redundancy(optax.sgd(0.1), axis="chip"), optax.sgd(1.0), sync_period=2, axis="pod")

    def run(parts):
        def step(state, batch):
            value_and_grad = jd.local_value_and_grad(
                lambda x, batch: jnp.mean((batch @ x - 1) ** 2), axis=axis, micro_batches=parts
            )
            _, gradient = value_and_grad(state["x"], batch)
            updates, opt = tx.update(gradient, state["opt"], state["x"])
            return {"x": state["x"] + updates, "opt": opt}, {}

        x = jnp.zeros(3)
        state = jd.place({"x": jd.PerWorker(x, axis="pod"), "opt": tx.init(x)}, mesh, axis=("pod", "chip"))
        batch = jax.random.normal(jax.random.key(0), (16, 3))
        return jd.distribute(step, mesh, axis=("pod", "chip"))(state, batch)[0]["x"].value

    np.testing.assert_allclose(run(2), run(1), rtol=1e-6)


def test_the_mean_of_arguments_leaves_shards_alone(mesh):
    """As `grad=` of a search: a mean of shards of different workers would be a gradient of nothing."""

    def add_argument(updates, state, params=None, *, grad, **_):
        return jax.tree.map(jnp.add, updates, grad), state

    tx = jd.zero_redundancy(optax.GradientTransformationExtraArgs(lambda params: (), add_argument))
    start = {"w": jnp.ones((16, 4)), "b": jnp.zeros(4)}
    batch = np.random.default_rng(0).standard_normal((2 * mesh.size, 16)).astype(np.float32)

    def loss(p, x):
        return jnp.mean(jnp.square(x @ p["w"] + p["b"][None] - 1))

    def run(average):
        def step(state, batch):
            _, gradient = jd.local_value_and_grad(jd.zero.gathered(loss))(state["params"], batch)
            updates, opt = tx.update(gradient, state["opt"], state["params"], grad=average(gradient))
            return {"params": updates, "opt": opt}, {}

        params = jd.zero.shard(start, smallest=10)
        state = jd.init_state(lambda: {"params": params, "opt": tx.init(params)}, mesh)
        return jd.consensus(jd.distribute(step, mesh)(state, batch)[0]["params"])

    with pytest.raises(ValueError, match=r"grad= differs .*except the Sharded ones.* is_leaf=lambda x: isinstance"):
        run(lambda grad: grad)
    # As the message says it.
    found = run(
        lambda grad: jax.tree.map(
            lambda x: x if isinstance(x, jd.Sharded) else jax.lax.pmean(x, "data"),
            grad,
            is_leaf=lambda x: isinstance(x, jd.Sharded),
        )
    )
    for name, gradient in jax.grad(loss)(start, batch).items():
        np.testing.assert_allclose(found[name], 2 * gradient, rtol=1e-5, atol=1e-6)
