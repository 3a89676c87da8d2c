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
    "skip_nonfinite": lambda reducer: jd.skip_nonfinite(optax.chain(jd.all_reduce(reducer), optax.sgd(1.0))),
    "dynamic_loss_scale": lambda reducer: jd.transforms.dynamic_loss_scale(
        optax.chain(jd.all_reduce(reducer), optax.sgd(1.0)), initial=1.0
    ),
    "per_worker": lambda reducer: optax.chain(
        jd.transforms.per_worker(optax.clip_by_global_norm(1e3)), jd.all_reduce(reducer), optax.sgd(1.0)
    ),
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


def test_terms_of_several_calls_are_added():
    tx, mesh = jd.accumulate(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(1.0)), 2), make_mesh()
    once, _ = run(tx, mesh)
    np.testing.assert_array_equal(once["w"], W)
    twice, _ = run(tx, mesh, calls=2)
    np.testing.assert_allclose(twice["w"], wanted(), rtol=1e-5)


@pytest.mark.parametrize("stage", [None, 1, 3], ids=["all_reduce", "zero_1", "zero_3"])
def test_terms_are_scattered_into_shards(stage):
    """Of parameters that are gathered before the gradient, or of the optimizer's state alone."""
    reducer, specs = jd.two_shot(jd.compressors.int8()), {"w": P("data", "model")}
    if stage is None:
        tx = optax.chain(jd.all_reduce(reducer, specs=specs), optax.sgd(1.0))
    else:
        tx = jd.zero_redundancy(optax.sgd(1.0), stage=stage, reducer=reducer, specs=specs)
    w, mesh = np.concatenate([W, W[:, :1]], axis=1), make_mesh(2)
    whole = P(None, "model")

    @jax.jit
    def step(state, x):
        reduced = jax.reshard(jax.reshard(state["w"], whole), P(None, "model", reduced={"data"}))
        updates, opt = tx.update({"w": jax.grad(loss_fn)(reduced, x)}, state["opt"], {"w": state["w"]})
        return {"w": optax.apply_updates(state["w"], updates["w"]), "opt": opt}

    with jax.set_mesh(mesh):
        state = jd.init_state(lambda: {"w": jnp.asarray(w), "opt": tx.init({"w": jnp.asarray(w)})}, mesh, specs=specs)
        if stage == 1:
            state["w"] = jax.device_put(state["w"], whole)
        x = jax.device_put(X, P("data"))
        ops = analysis.collectives(step.lower(state, x)).across(mesh, "data").ops
        new = step(state, x)
    np.testing.assert_allclose(new["w"], w - 2 * X.T @ (X @ w) / 32, atol=2e-2)
    assert new["w"].sharding.spec == (whole if stage == 1 else specs["w"])
    # A worker's codes of the other's shard, 4 numbers padded to 8, and a scale.
    assert sum(op.wire_bytes for op in ops if op.kind == "all-to-all") <= 8 + 4


def test_accumulate_around_shards_is_refused():
    specs = {"w": P("data", "model")}
    tx = jd.accumulate(optax.chain(jd.all_reduce(jd.exact(), specs=specs), optax.sgd(1.0)), 2)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            params = {"w": jax.device_put(jnp.ones((4, 4)), P("data", "model"))}
            state = jd.init_state(lambda: tx.init({"w": jnp.ones((4, 4))}), mesh, specs=specs)
            grads = {"w": jd.PerWorker(jnp.ones((2, 4, 4)), axis=("data",))}
            with pytest.raises(ValueError, match=r"\['w'\].*micro_batches= .*in place of accumulate"):
                jax.jit(tx.update)(grads, state, params)


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


@pytest.mark.parametrize("name", ["all_reduce", "accumulate", "zero_redundancy", "skip_nonfinite", "per_worker"])
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
