"""One worker's gradient: local, and in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from problems import assert_close, batch, fresh, loss, make_step, params

import jaxdist as jd


def with_aux(params, data):
    prediction = jnp.tanh(data["x"] @ params["w"] + params["b"][None])
    value = jnp.mean((prediction - data["y"]) ** 2)
    return value, {"mean": prediction.mean(0), "right": jnp.sum((prediction > 0) == (data["y"] > 0))}


def noisy(params, data, key, scale):
    return jnp.mean((data["x"] @ params["w"] + scale * jax.random.normal(key, data["y"].shape) - data["y"]) ** 2)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_give_what_the_whole_batch_gives(parts):
    whole = jax.jit(jd.local_value_and_grad(with_aux, has_aux=True))(params(), batch())
    found = jax.jit(jd.local_value_and_grad(with_aux, has_aux=True, micro_batches=parts))(params(), batch())
    assert_close(found, whole, 1e-6)
    assert found[0][1]["right"].dtype == whole[0][1]["right"].dtype
    assert_close(whole, jax.jit(jax.value_and_grad(with_aux, has_aux=True))(params(), batch()), 1e-6)


def test_the_gradient_stays_with_the_worker(mesh):
    """Nothing is sent; each worker's gradient is that of its own part of the batch."""

    def one(params, data):
        value, gradient = jd.local_value_and_grad(loss)(params, data)
        return jax.tree.map(lambda x: x[None], (value, gradient))

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))
    assert jd.analysis.collectives(step.lower(params(), batch()).compile()).ops == ()
    rows = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch())
    assert_close(step(params(), batch()), jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params(), rows), 1e-6)


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_is_a_mean_over_workers_has_the_gradient_of_their_losses(has_aux):
    """On a mesh, where types say that it is one number, too: each worker has it."""

    def mean_loss(params, data):
        value = jd.comm.over("data").mean(loss(params, data))
        return (value, value) if has_aux else value

    def step(params, data):
        value, gradient = jd.local_value_and_grad(mean_loss, has_aux=has_aux)(params, data)
        return jd.comm.over("data").mean(gradient), value

    wanted = jax.grad(loss)(params(), batch())
    for run in (
        *(jd.distribute(step, jd.make_mesh(), check=check) for check in ("types", "values")),
        jd.simulate(step, 8),
    ):
        assert_close(run(jax.tree.map(jnp.copy, params()), batch())[0], wanted, 1e-5)
    with pytest.raises(TypeError, match=r"must return \(value, aux\), got"):
        jd.local_value_and_grad(loss, has_aux=True, axis=None)(params(), batch())


def test_keys_are_folded_and_the_rest_is_passed_on():
    key, data = jax.random.key(7), batch()
    value, gradient = jax.jit(jd.local_value_and_grad(noisy, micro_batches=4))(params(), data, key, jnp.float32(0.5))
    parts = jax.tree.map(lambda x: x.reshape(4, 4, *x.shape[1:]), data)
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(4))
    each = jax.jit(jax.vmap(jax.value_and_grad(noisy), (None, 0, 0, None)))(params(), parts, keys, jnp.float32(0.5))
    assert_close((value, gradient), jax.tree.map(lambda x: x.mean(0), each), 1e-6)
    assert len(np.unique(np.asarray(each[0]))) == 4


def test_several_arguments():
    def f(left, data, right):
        return jnp.mean((data["x"] @ left) * right)

    right = jnp.ones((1, 4))
    found = jax.jit(jd.local_value_and_grad(f, argnums=(0, 2), micro_batches=2))(params()["w"], batch(), right)
    wanted = jax.jit(jax.value_and_grad(f, argnums=(0, 2)))(params()["w"], batch(), right)
    assert_close(found, wanted, 1e-6)
    # From the end.
    found = jax.jit(jd.local_value_and_grad(f, argnums=(-3, -1), micro_batches=2))(params()["w"], batch(), right)
    assert_close(found, wanted, 1e-6)
    with pytest.raises(ValueError, match="argnums=3 has 3, but the call has 3 positional arguments"):
        jd.local_value_and_grad(f, argnums=3)(params()["w"], batch(), right)


def test_the_last_argument_has_local_gradients(mesh):
    def step(state, batch):
        _, gradient = jd.local_value_and_grad(lambda x, w: jnp.mean(x) * w, argnums=-1)(batch, state["w"])
        return {"w": state["w"], "gradient": gradient}, {}

    state = jd.place({"w": jnp.ones(()), "gradient": jd.PerWorker(jnp.zeros(()))}, mesh)
    state, _ = jd.distribute(lambda s, b: step(s, b), mesh)(state, jnp.arange(8.0))
    assert state["gradient"].value.tolist() == list(range(8))


def test_one_float32_buffer_under_bfloat16_parameters():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    data = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), batch(64))
    f = jd.local_value_and_grad(loss, micro_batches=32)
    (loop,) = (e for e in jax.make_jaxpr(f)(narrow, data).eqns if e.primitive.name == "scan")
    carried = loop.params["jaxpr"].out_avals
    assert sorted((x.shape, str(x.dtype)) for x in carried) == [((), "float32"), ((4,), "float32"), ((6, 4), "float32")]
    _, gradient = jax.jit(f)(narrow, data)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    rows = jax.tree.map(lambda x: x.reshape(32, 2, *x.shape[1:]), data)
    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(narrow, rows)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64).mean(0), each)
    for found, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact)):
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-6)  # one rounding


def test_nothing_is_sent_inside_the_loop(mesh):
    tx = optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1))

    def found(**options):
        step = jd.distribute(make_step(tx, **options), mesh, donate=False)
        state = fresh(tx, mesh)
        ops = jd.analysis.collectives(step.lower(state, batch(64)).compile()).ops
        return [(op.kind, op.dtype, op.bytes, op.count) for op in ops], step(state, batch(64))

    (whole, once), (parts, after) = found(), found(micro_batches=4)
    assert parts == whole
    assert all(count == 1 for *_, count in parts)
    assert_close(after, once, 1e-6)
    simulated = jd.simulate(make_step(tx, micro_batches=4), 8)(fresh(tx, mesh), batch(64))
    assert_close(simulated, once, 1e-6)


def test_errors():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        jd.local_value_and_grad(loss, micro_batches=0)
    with pytest.raises(ValueError, match=r"micro_batches=3 must divide .* got shape \(16, "):
        jd.local_value_and_grad(loss, micro_batches=3)(params(), batch())
    with pytest.raises(ValueError, match="needs a batch argument"):
        jd.local_value_and_grad(lambda p: p.sum(), micro_batches=2)(jnp.ones(2))


def test_the_mean_of_local_gradients_is_the_gradient_of_the_batch(mesh):
    def one(params, data):
        return lax.pmean(jd.local_value_and_grad(loss)(params, data), "data")

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    assert_close(step(params(), batch()), jax.jit(jax.value_and_grad(loss))(params(), batch()), 1e-6)


# ---- parts that count differently


def masked(params, data):
    """The mean over the valid rows, with a number for each kind of auxiliary leaf."""
    errors = jnp.square(jnp.tanh(data["x"] @ params["w"]) - data["y"]).mean(1)
    value = jnp.sum(errors * data["mask"]) / data["mask"].sum()
    return value, {"value": value, "rows": data["mask"].astype(jnp.int32).sum(), "any": data["mask"].any()}


def masked_batch(counts):
    rows = 16 // len(counts)
    return {**batch(), "mask": (np.arange(16) % rows < np.repeat(counts, rows)).astype(np.float32)}


def rows_of(data):
    return data["mask"].sum()


@pytest.mark.parametrize("counts", [[4, 1, 2, 3], [0, 4, 0, 1]])
def test_weighted_parts_give_what_the_whole_batch_gives(counts):
    data = masked_batch(counts)
    whole = jax.jit(jax.value_and_grad(masked, has_aux=True))(params(), data)
    for parts in (1, 4):
        f = jd.local_value_and_grad(masked, has_aux=True, micro_batches=parts, weights=rows_of)
        found = jax.jit(f)(params(), data)
        assert_close(found, whole, 1e-6)
        assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, whole)
        # Without any valid row the loss is 0/0.
        nothing = jax.jit(f)(params(), {**data, "mask": 0 * data["mask"]})
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(nothing))


def test_numbers_of_a_batch_are_passed_on_and_its_keys_folded():
    def f(params, data):
        noise = jax.random.normal(data["key"], data["y"].shape)
        return jnp.mean((data["x"] @ params["w"] + data["scale"] * noise - data["y"]) ** 2)

    key, rest = jax.random.key(7), {"scale": jnp.float32(0.5), "step": 3}
    found = jax.jit(jd.local_value_and_grad(f, micro_batches=4))(params(), {**batch(), "key": key, **rest})
    wanted = jax.jit(jd.local_value_and_grad(noisy, micro_batches=4))(params(), batch(), key, jnp.float32(0.5))
    assert_close(found, wanted, 1e-6)


FREE_OF_WEIGHTS = {
    "by its size": lambda params, data: jnp.sum(data["x"] @ params["w"]) / data["mask"].size,
    "of each row": lambda params, data: jnp.mean((data["x"] @ params["w"]).sum(1) / (1 + data["mask"])),
    "normalized": lambda params, data: jnp.mean(data["x"] / data["x"].std() @ params["w"]),
    "by the parameters": lambda params, data: jnp.mean(data["x"] @ params["w"]) / jnp.sum(params["w"] ** 2),
    "by a number": lambda params, data: jnp.mean(data["x"] @ params["w"]) / data["scale"],
    "centered": lambda params, data: jnp.mean(
        jnp.tanh((data["x"] - data["x"].sum() / data["mask"].sum()) @ params["w"])
    ),
}


@pytest.mark.parametrize("f", FREE_OF_WEIGHTS.values(), ids=FREE_OF_WEIGHTS)
def test_other_quotients_need_none(f):
    data = {**masked_batch([4, 1, 2, 3]), "scale": jnp.float32(2)}
    jax.eval_shape(jd.local_value_and_grad(f, micro_batches=4), params(), data)


def test_weights_are_checked():
    for weights, error in (
        (lambda data: data["mask"], "result of weights must be one number"),
        (lambda data: -1, "-1"),
    ):
        with pytest.raises(ValueError, match=error):
            jd.local_value_and_grad(loss, micro_batches=4, weights=weights)(params(), masked_batch([4, 1, 2, 3]))


@pytest.mark.parametrize("engine", ["simulate", pytest.param("types", marks=pytest.mark.slow)])
def test_weights_of_sharded_parameters_weigh_workers_too(engine):
    """Stage 3: whole and sharded parameters have the weighted mean, of workers whose parts differ in valid rows."""
    layer = jd.zero.gathered(lambda p, data: jnp.square(jnp.tanh(data["x"] @ p["w"]) - data["y"]).mean(1))

    def f(params, data):
        errors = layer(params, data) + jnp.square(params["b"][None] - data["y"]).sum(1)
        return jnp.sum(errors * data["mask"]) / jnp.maximum(data["mask"].sum(), 1)

    tx = jd.zero_redundancy(optax.sgd(1.0))

    def step(state, data):
        value, gradient = jd.local_value_and_grad(f, micro_batches=2, weights=rows_of)(state["params"], data)
        updates, opt = tx.update(gradient, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, jax.lax.pmean(value, "data")

    def make_state():
        start = {**jd.zero.shard({"w": params()["w"]}, smallest=0), "b": params()["b"]}
        return {"params": start, "opt": tx.init(start)}

    data = masked_batch([4, 1, 0, 3])
    if engine == "simulate":
        state, _ = jd.simulate(step, 2)(jd.init_state(make_state, 2), data)
    else:
        mesh = jd.make_mesh({"data": 2})
        state, _ = jd.distribute(step, mesh)(jd.init_state(make_state, mesh), data)
    gradient = jax.grad(lambda p: f_whole(p, data))(params())
    assert_close(jd.consensus(state["params"]), jax.tree.map(jnp.subtract, params(), gradient), 1e-5)


def f_whole(params, data):
    errors = jnp.square(jnp.tanh(data["x"] @ params["w"]) - data["y"]).mean(1)
    errors += jnp.square(params["b"][None] - data["y"]).sum(1)
    return jnp.sum(errors * data["mask"]) / data["mask"].sum()
