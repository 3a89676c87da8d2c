"""Functions that an optimizer calls: on several workers as on the whole batch, or refused by name before a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from problems import assert_close

import jaxdist as jd
from jaxdist.transforms import averaged

WORKERS = 4
MODES = ("types", "values", "simulate")
RANDOM = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RANDOM.normal(size=(6, 4)), jnp.float32), "b": jnp.zeros(4)}
BATCHES = [
    {"x": RANDOM.normal(size=(16, 6)).astype(np.float32), "y": RANDOM.normal(size=(16, 4)).astype(np.float32)}
    for _ in range(2)
]
SAM = contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), opaque_mode=True)
CALLING = {
    "sam": SAM,
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)),
    "zoom": optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(8)),
    "lbfgs": optax.lbfgs(),
    "sophia": contrib.sophia(0.05, b1=0.5, b2=0.5, gamma=2.0, update_interval=1),
    "polyak": optax.polyak_sgd(),
}


@pytest.fixture(autouse=True)
def promotion():
    """optax's own code promotes ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2)


def told(name, loss, gradient, params, mean=lambda x: x):
    """What the optimizer is told: functions as they are given, values and gradients as means."""
    if name == "sam":
        return {"grad_fn": lambda p, number: gradient(p)}
    if name == "sophia":
        return {"obj_fn": loss}
    value = {"value": mean(loss(params))}
    return value if name == "polyak" else {**value, "grad": mean(gradient(params)), "value_fn": loss}


def whole_batch(name):
    tx, params = optax.with_extra_args_support(CALLING[name]), PARAMS
    state = tx.init(params)
    for batch in BATCHES:

        def loss(p, batch=batch):
            return loss_fn(p, batch)

        gradient = jax.grad(loss)
        updates, state = tx.update(gradient(params), state, params, **told(name, loss, gradient, params))
        params = optax.apply_updates(params, updates)
    return params


def means(f):
    return lambda p: jax.lax.pmean(f(p), "data")


FORMS = {"mean": means, "local": lambda f: f, "averaged": averaged}


def run(name, tx, mode, *, form="mean", mark=lambda params: params, steps=2):
    tx, start = optax.with_extra_args_support(tx), mark(PARAMS)

    def step(state, batch):
        def loss(p):
            return loss_fn(p, batch)

        def gradient(p):
            return jd.local_value_and_grad(loss_fn)(p, batch)[1]

        def mean(x):
            return x if isinstance(start, jd.PerWorker) else jax.lax.pmean(x, "data")

        params = state["params"]
        wrap = FORMS[form]
        plain = jd.zero.gathered(lambda p: p)(params)
        extras = told(name, wrap(loss), wrap(gradient), plain, mean)
        mine = jd.local_value_and_grad(jd.zero.gathered(loss_fn))(params, batch)[1]
        updates, opt = tx.update(mine, state["opt"], params, **extras)
        return {"params": optax.apply_updates(params, updates), "opt": opt}, {}

    shards = start.value if isinstance(start, jd.PerWorker) else start
    place = WORKERS if mode == "simulate" else jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    state = jd.init_state(lambda: {"params": start, "opt": tx.init(shards)}, place)
    train = jd.simulate(step, place) if mode == "simulate" else jd.distribute(step, place, check=mode)
    for batch in BATCHES[:steps]:
        state, _ = train(state, batch)
    return jd.consensus(state["params"])


def behind_all_reduce(name):
    return optax.chain(jd.all_reduce(jd.exact()), CALLING[name])


def marks(names):
    return [pytest.param(name, marks=() if name == "sam" else pytest.mark.slow) for name in names]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", marks(CALLING))
def test_inside_zero_redundancy(name, form, mode):
    assert_close(run(name, jd.zero_redundancy(CALLING[name]), mode, form=form), whole_batch(name), 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", marks(CALLING))
@pytest.mark.parametrize("kind", ["stage 3", "masters", "host"])
def test_inside_zero_redundancy_of_other_kinds(kind, name, mode):
    tx, mark = jd.zero_redundancy(CALLING[name], master_dtype=jnp.float32 if kind == "masters" else None), lambda p: p
    if kind == "stage 3":
        mark = lambda p: jd.zero.shard(p, smallest=0)  # noqa: E731
    if kind == "host":
        tx = jd.offload.host(tx)
    if (kind, name) == ("host", "lbfgs"):
        with pytest.raises(ValueError, match="works on its state inside a `scan`"):
            run(name, tx, mode)
    else:
        assert_close(run(name, tx, mode, mark=mark), whole_batch(name), 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", marks(CALLING))
def test_averaged_behind_all_reduce(name, mode):
    assert_close(run(name, behind_all_reduce(name), mode, form="averaged"), whole_batch(name), 1e-5)


REFUSED = {
    ("zoom", "mean", "values"): r"value_fn= averages a loss, whose gradient .* value_fn=jd.transforms.averaged",
    ("sophia", "mean", "values"): r"obj_fn= averages a loss",
    ("zoom", "local", "types"): r"value_fn= returns other values on each worker .*value_fn=jd.transforms.averaged",
    ("sam", "local", "types"): r"grad_fn= returns other values on each worker",
    ("zoom", "mean", "simulate"): r"calls a function of the parameters, value_fn=.* jd.transforms.averaged",
    ("sam", "local", "simulate"): r"calls a function of the parameters",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "form", "mode"), REFUSED)
def test_other_functions_behind_all_reduce_are_refused(name, form, mode):
    with pytest.raises(ValueError, match=REFUSED[name, form, mode]):
        run(name, behind_all_reduce(name), mode, form=form, steps=1)


def test_what_is_partly_averaged_is_refused():
    mesh = jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    tx = jd.zero_redundancy(SAM)

    def step(state, batch):
        gradient = jax.grad(lambda p, number: jax.lax.pmean(jnp.sum(p * batch), "data"))
        mine = jd.local_value_and_grad(lambda p: jnp.sum(p * batch))(state["params"])[1]
        updates, opt = tx.update(mine, state["opt"], state["params"], grad_fn=gradient)
        return {"params": state["params"] + updates, "opt": opt}, {}

    state = jd.place({"params": jnp.ones(4), "opt": tx.init(jnp.ones(4))}, mesh)
    with pytest.raises(ValueError, match=r"grad_fn= returns values that differ between workers .* although it comm"):
        jd.distribute(step, mesh)(state, jnp.ones(2))


AROUND = {
    "local_steps": lambda tx: jd.local_steps(tx, optax.sgd(1.0), sync_period=2),
    "gossip": lambda tx: jd.gossip(tx, jd.topology.ring(WORKERS)),
    "noloco": lambda tx: jd.local_sgd.noloco(tx, sync_period=2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("mode", MODES)
def test_workers_with_models_of_their_own(around, mode):
    """Workers call their functions for other numbers of rounds, so that these must not wait for other workers."""
    tx = AROUND[around]
    with pytest.raises(ValueError, match=r"grad_fn= communicates over axis 'data'.* wait for them for ever"):
        run("sam", tx(SAM), mode, form="mean", mark=jd.PerWorker, steps=1)
    if mode == "types":
        with pytest.raises(ValueError, match=r"line searches of optax .* check=\"values\"\) or simulate"):
            run("zoom", tx(CALLING["zoom"]), mode, form="local", mark=jd.PerWorker, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["sam", "zoom", "sophia"])
def test_workers_with_models_and_functions_of_their_own(around, name):
    found = [run(name, AROUND[around](CALLING[name]), mode, form="local", mark=jd.PerWorker) for mode in MODES[1:]]
    assert_close(found[0], found[1], 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_derivatives(mode):
    """Of `mean(x) · sum(w³)`: value, gradient, a product with the Hessian, and a number that is no float."""

    def step(w, x):
        f = averaged(lambda w, power: x[0] * jnp.sum(w**power))
        product = jax.jvp(jax.grad(lambda w: f(w, 3)), (w,), (jnp.ones_like(w),))[1]
        # As line searches that keep the gradient compute it.
        (again,) = jax.linear_transpose(jax.linearize(lambda w: f(w, 3), w)[1], w)(f(w, 0) * 0 + 1)
        count = averaged(lambda w: (w.astype(jnp.bfloat16).sum() * x[0].astype(jnp.bfloat16), jnp.int32(3)))(w)
        return w, (f(w, 3), jax.grad(f)(w, 3), product, *count, again)

    place = 2 if mode == "simulate" else jd.make_mesh({"data": 2}, devices=jax.devices()[:2])
    train = jd.simulate(step, 2) if mode == "simulate" else jd.distribute(step, place, check=mode, donate=False)
    w = jd.place(jnp.array([1.0, 2.0]), place)
    _, (value, gradient, product, half, count, again) = train(w, jnp.array([1.0, 3.0]))
    assert value == 18.0
    np.testing.assert_allclose(gradient, [6.0, 24.0])
    np.testing.assert_allclose(again, gradient)
    np.testing.assert_allclose(product, [12.0, 24.0])
    assert half.dtype == jnp.bfloat16
    assert half == 6.0
    assert count == 3


COUNTS = np.array([3.0, 0.0, 1.0, 2.0], np.float32)


def weighted_step(tx, wrap, name):
    """One step of workers of which one has no examples, and rows of NaN."""
    tx = optax.with_extra_args_support(tx)
    batch = {key: x.copy() for key, x in BATCHES[0].items()}
    batch["x"][4:8] = np.nan

    def step(state, given):
        batch, count = given[0], given[1][0]

        def loss(p):
            return loss_fn(p, batch)

        def mean(tree):
            counted = jax.tree.map(lambda x: jnp.where(count > 0, count * x, 0), tree)
            return jax.tree.map(lambda x: x / COUNTS.sum(), jax.lax.psum(counted, "data"))

        params = state["params"]
        value, mine = jd.local_value_and_grad(loss_fn)(params, batch)
        extras = told(name, wrap(loss, count), wrap(jax.grad(loss), count), params)
        extras = {**extras, **({"value": mean(value), "grad": mean(mine)} if "value" in extras else {})}
        updates, opt = tx.update(mine, state["opt"], params, examples=count, **extras)
        return {"params": optax.apply_updates(params, updates), "opt": opt}, {}

    def run(mode):
        place = WORKERS if mode == "simulate" else jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
        state = jd.init_state(lambda: {"params": PARAMS, "opt": tx.init(PARAMS)}, place)
        train = jd.simulate(step, place) if mode == "simulate" else jd.distribute(step, place, check=mode)
        return train(state, (batch, COUNTS))[0]["params"]

    return run


def weighted_whole(name):
    tx = optax.with_extra_args_support(CALLING[name])
    parts = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], BATCHES[0]) for i in range(WORKERS)]

    def loss(p):
        return sum(n * loss_fn(p, part) for n, part in zip(COUNTS, parts, strict=True)) / COUNTS.sum()

    extras = told(name, loss, jax.grad(loss), PARAMS)
    updates, _ = tx.update(jax.grad(loss)(PARAMS), tx.init(PARAMS), PARAMS, **extras)
    return optax.apply_updates(PARAMS, updates)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", marks(["sam", "zoom", "sophia"]))
def test_weighted_inside_zero_redundancy(name, mode):
    """A worker without examples counts neither in the gradient nor in what the optimizer calls, even with NaN."""
    found = weighted_step(jd.zero_redundancy(CALLING[name]), lambda f, count: f, name)(mode)
    assert_close(found, weighted_whole(name), 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_weighted_derivatives(mode):
    def step(w, given):
        x, count = given
        f = averaged(lambda w: x[0] * jnp.sum(w**2), examples=count[0], active=x[0] > 0)
        return w, (f(w), jax.grad(f)(w))

    place = 4 if mode == "simulate" else jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    train = jd.simulate(step, 4) if mode == "simulate" else jd.distribute(step, place, check=mode)
    given = np.float32([1, 3, np.nan, -5]), np.float32([3, 1, 0, 7])
    _, (value, gradient) = train(jd.place(jnp.array([1.0, 2.0]), place), given)
    # The mean of x is (3 · 1 + 1 · 3) / 4.
    np.testing.assert_allclose(value, 7.5)
    np.testing.assert_allclose(gradient, [3.0, 6.0])


def test_weights_that_functions_do_not_have_are_refused():
    run = weighted_step(behind_all_reduce("zoom"), lambda f, count: averaged(f), "zoom")
    with pytest.raises(ValueError, match=r"all workers count alike: pass examples= and active= there too"):
        run("simulate")
    tx = jd.zero_redundancy(SAM)
    with pytest.raises(ValueError, match=r"how much this worker's grad_fn= counts: pass one number"):
        jd.simulate(
            lambda state, x: (
                state,
                tx.update({"w": x}, state, {"w": x}, grad_fn=lambda p, i: p, examples={"w": jnp.float32(1)}),
            ),
            2,
        )(jd.place(tx.init({"w": jnp.ones(2)}), 2), jnp.ones(4))


def test_one_worker_without_an_axis():
    value, gradient = jax.value_and_grad(averaged(lambda w: w**2, axis=None))(jnp.array(3.0))
    assert (value, gradient) == (9.0, 6.0)
