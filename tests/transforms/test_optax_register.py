"""Every optimizer of optax behind `all_reduce`, inside `zero_redundancy`, and on both sides of `local_steps`.

They are found by what they return. Each takes the steps that it takes by itself on the mean gradient, or is refused
with the reason.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_register import APART, ARGUMENTS, EXTRAS, KEY, NO_LOSS, NOISY, REGISTER, make

import jaxdist as jd

# optax deprecates some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
WORKERS, STEPS = 2, 4
PARAMS = {"w": jax.random.normal(jax.random.key(0), (5, 3)), "b": jnp.array([1.0, 0.5, -0.3, 2.0])}

QUICK = ["sm3", "partition", "flatten", "prodigy", "adafactor"]


@pytest.fixture(autouse=True)
def promotion():
    """optax's own code promotes ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def loss(params):
    return sum(jnp.sum((x - 2) ** 2) / 2 for x in jax.tree.leaves(params))


def extras(name, params, mean):
    given = {"value": loss(params), "grad": mean, "value_fn": loss, "obj_fn": loss}
    return {key: given[key] for key in EXTRAS.get(name, ())}


def gradient(params, number, factor=1.0):
    return jax.tree.map(lambda x: (x - 2 + jnp.sin(3 * x + number)) * factor, params)


def start(name):
    return {"w": PARAMS["w"]} if name == "scale_by_muon" else PARAMS  # matrices alone


def plain(name):
    tx, params = optax.with_extra_args_support(make(name)), start(name)

    @jax.jit
    def step(params, state, number):
        mean = gradient(params, number)
        updates, state = tx.update(mean, state, params, **extras(name, params, mean))
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for number in range(STEPS):
        params, state = step(params, state, jnp.float32(number))
    return params


def shared(name, tx, place: Any = WORKERS):
    """One model for all: gradients differ between workers, and what else an optimizer is told does not."""
    tx = optax.with_extra_args_support(tx)

    def step(state, batch):
        local = jax.tree.map(lambda x: x + 0 * batch[0, 1], state["params"])
        mine = gradient(local, batch[0, 0], batch[0, 1])
        mean = jax.lax.pmean(mine, "data")
        updates, opt = tx.update(mine, state["opt"], state["params"], **extras(name, state["params"], mean))
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jd.place({"params": start(name), "opt": tx.init(start(name))}, place)
    return steps(step, state, place)["params"]


def apart(name, tx, *, alike):
    """Models that differ; gradients that are alike give what one worker does."""

    def step(state, batch):
        mine = gradient(state["params"], batch[0, 0], 1.0 if alike else batch[0, 1])
        told = extras(name, state["params"], mine) if alike else {}
        updates, opt = tx.update(mine, state["opt"], state["params"], **told)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jd.place({"params": jd.PerWorker(start(name)), "opt": tx.init(start(name))}, WORKERS)
    return jd.local_sgd.global_params(steps(step, state, WORKERS)["opt"])


def steps(step, state, place):
    run = jd.simulate(step, place) if isinstance(place, int) else jd.distribute(step, place)
    for number in range(STEPS):
        batch = np.stack([np.full(WORKERS, number), np.linspace(0.5, 1.5, WORKERS)], 1)
        state, _ = run(state, batch.astype(np.float32))
    return state


def assert_same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def parametrized(names):
    marks = {True: [], False: [pytest.mark.slow]}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name in QUICK]) for name in sorted(names)])


def test_all_are_found():
    assert len(REGISTER) > 100
    assert {"sm3", "lamb", "muon", "prodigy", "schedule_free", "lbfgs", "partition"} < set(REGISTER)


@pytest.mark.sampled(3)
@parametrized(set(REGISTER) - APART)
def test_one_model(name):
    expected = plain(name)
    assert_same(shared(name, optax.chain(jd.all_reduce(jd.exact()), make(name))), expected)
    assert_same(shared(name, jd.zero_redundancy(make(name))), expected)


@pytest.mark.parametrize(
    "name", ["sm3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lbfgs", "prodigy", "muon"))]
)
def test_one_model_on_a_mesh(name):
    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    assert_same(shared(name, jd.zero_redundancy(make(name)), mesh), plain(name))


@pytest.mark.sampled(3)
@parametrized(set(REGISTER) - APART - NOISY - {"sam"})
def test_inside_local_steps(name):
    assert_same(apart(name, jd.local_steps(make(name), optax.sgd(1.0), sync_period=2), alike=True), plain(name))


@pytest.mark.sampled(3)
@parametrized(set(REGISTER) - APART - NO_LOSS - {"sam", "momo", "momo_adam"})
def test_outside_local_steps(name):
    """The drift of one step of gradient descent is the mean gradient."""
    assert_same(apart(name, jd.local_steps(optax.sgd(1.0), make(name), sync_period=1), alike=False), plain(name))


def inner_state(tx, params) -> Any:
    state: Any = jd.zero_redundancy(tx).init(params)
    return state.inner


def test_states_without_a_stand_in():
    """Each leaf of a state beside its parameter, whatever else the state has; a single array has no path."""
    sm3 = make("sm3")
    state = inner_state(sm3, PARAMS)[0]
    assert {type(x).__name__ for x in state.nu.values()} == {"Sharded"}
    assert [x.shape for x in jax.tree.leaves(state.mu["b"])] == [(4,)]  # of each dimension, whole
    adam = inner_state(optax.adam(0.1), jnp.zeros(()))[0]
    assert isinstance(adam.mu, jd.Sharded)
    assert adam.count.shape == ()
    moments = inner_state(make("partition"), PARAMS).inner_states["a"].inner_state[0].mu["w"]
    assert isinstance(moments, jd.Sharded)


@pytest.mark.parametrize("name", ["sm3", "partition"])
@pytest.mark.parametrize("buffers", ["reset", "average"])
def test_buffers_of_local_steps(name, buffers):
    tx = jd.local_steps(make(name), optax.sgd(1.0), sync_period=2, buffers=buffers)
    for leaf in jax.tree.leaves(apart(name, tx, alike=False)):
        assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_gradients_of_single_examples():
    """Clipped by each worker before the mean: eight examples in two workers as in one, without noise."""
    clip = contrib.differentially_private_aggregate(1.0, 0.0, key=KEY)
    tx = optax.chain(jd.transforms.per_worker(clip), jd.all_reduce(jd.exact()), optax.sgd(0.1))
    examples = jax.tree.map(lambda x: jax.random.normal(KEY, (8, *x.shape)), PARAMS)
    found, _ = jax.vmap(lambda x: tx.update(x, tx.init(PARAMS), PARAMS), axis_name="data")(
        jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), examples)
    )
    wanted, _ = clip.update(examples, clip.init(PARAMS), PARAMS)
    assert_same(jax.tree.map(lambda x: x[1], found), jax.tree.map(lambda x: -0.1 * x, wanted))
    tx = optax.chain(jd.all_reduce(jd.exact()), make("dpsgd"))
    with pytest.raises(ValueError, match=r"the gradient \['b'\] has shape \(8, 4\) and its parameter \(4,\)"):
        jax.vmap(lambda x: tx.update(examples, tx.init(PARAMS), PARAMS)[0], axis_name="data")(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"single examples.*chain\(per_worker\(optax.contrib.differentially_private"):
        jd.zero_redundancy(make("dpsgd")).init(PARAMS)


def test_two_sets_of_parameters():
    both = optax.LookaheadParams.init_synced(PARAMS)
    for tx in (jd.zero_redundancy(make("lookahead")), jd.local_steps(make("lookahead"), optax.sgd(1.0), sync_period=2)):
        with pytest.raises(ValueError, match=r"two sets of parameters.*all_reduce\(reducer\), optax.lookahead"):
            tx.init(both)
    tx = optax.chain(jd.all_reduce(jd.error_feedback(jd.compressed(jd.compressors.identity()))), make("lookahead"))
    mine = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), PARAMS)
    found = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(both), both)[0], axis_name="data"))(mine)
    wanted, _ = jax.jit(make("lookahead").update)(
        jax.tree.map(lambda x: 2 * x, PARAMS), make("lookahead").init(both), both
    )
    assert_same(jax.tree.map(lambda x: x[0], found), wanted)


@pytest.mark.slow
def test_sam_inside_local_steps():
    with pytest.raises(ValueError, match=r"adversarial point .* opaque_mode=True\) and pass grad_fn="):
        apart("sam", jd.local_steps(make("sam"), optax.sgd(1.0), sync_period=2), alike=True)
    opaque = contrib.sam(optax.sgd(0.1), ARGUMENTS["adv_optimizer"], opaque_mode=True)
    tx = optax.with_extra_args_support(jd.local_steps(opaque, optax.sgd(1.0), sync_period=1))

    def grad_fn(params, _):
        return gradient(params, 0.0)

    def one_worker(params):
        return tx.update(grad_fn(params, 0), tx.init(params), params, grad_fn=grad_fn)[0]

    found = jax.vmap(one_worker, axis_name="data")(jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS))
    wanted, _ = opaque.update(grad_fn(PARAMS, 0), opaque.init(PARAMS), PARAMS, grad_fn=grad_fn)
    assert_same(jax.tree.map(lambda x: x[1], found), wanted)


@pytest.mark.parametrize("name", sorted(NO_LOSS))
def test_an_outer_optimizer_sees_no_loss(name):
    with pytest.raises(ValueError, match=r"gets the mean drift and learning_rate= alone"):
        jd.local_steps(optax.sgd(1.0), make(name), sync_period=1).init(start(name))
