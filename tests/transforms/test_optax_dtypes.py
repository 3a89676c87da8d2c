"""Every optimizer of optax on parameters in bfloat16, and of two dtypes: as by itself, or refused with the way out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_register import APART, EXTRAS, NO_LOSS, NOISY, REGISTER, make

import jaxdist as jd

# optax deprecates some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
WORKERS, STEPS, RATE = 2, 3, 0.1
# Some units in the last place of parameters up to 4, over three steps.
TOLERANCE = 0.04
DTYPES = {"bfloat16": (jnp.bfloat16, jnp.bfloat16), "mixed": (jnp.bfloat16, jnp.float32)}


@pytest.fixture(autouse=True)
def promotion():
    """optax's own code promotes ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def start(name, dtypes):
    matrix, vector = DTYPES[dtypes]
    params = {"w": jax.random.normal(jax.random.key(0), (5, 3)).astype(matrix)}
    return params if name == "scale_by_muon" else params | {"b": jnp.array([1.0, 0.5, -0.3, 2.0], vector)}


def optimizer(name):
    return optax.with_extra_args_support(make(name, learning_rate=RATE))


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def loss(params):
    return sum(jnp.sum((x - 2) ** 2) / 2 for x in jax.tree.leaves(wide(params)))


def gradient(params, number, factor=1.0):
    found = jax.tree.map(lambda x: x - 2 + jnp.sin(3 * x + number), wide(params))
    # A factor of 2 or 0 rounds nothing: the mean over workers is the plain gradient.
    return jax.tree.map(lambda g, x: g.astype(x.dtype) * jnp.asarray(factor, x.dtype), found, params)


def extras(name, params, mean):
    given = {"value": loss(params), "grad": mean, "value_fn": loss, "obj_fn": loss}
    return {key: given[key] for key in EXTRAS.get(name, ())}


def plain(name, dtypes, *, masters=False):
    """The optimizer on the mean gradient; with `masters` on float32 parameters, of which the model is the rounding."""
    tx, params = optimizer(name), start(name, dtypes)
    kept = wide(params) if masters else params

    @jax.jit
    def step(kept, state, number):
        rounded = jax.tree.map(lambda x, p: x.astype(p.dtype), kept, params)
        mean = gradient(rounded, number)
        mean = wide(mean) if masters else mean
        updates, state = tx.update(mean, state, kept, **extras(name, rounded, mean))
        return optax.apply_updates(kept, updates), state

    state = tx.init(kept)
    for number in range(STEPS):
        kept, state = step(kept, state, jnp.float32(number))
    return kept


def train(name, dtypes, tx, place, *, own=False, told=True) -> Any:
    """The parameters of one worker; with `own` each has a model of its own, and the same gradient."""
    tx, params = optax.with_extra_args_support(tx), start(name, dtypes)

    def step(state, batch):
        number, factor = batch[0]
        params = state["params"]
        local = params if own else jax.tree.map(lambda x: x + 0 * factor.astype(x.dtype), params)
        mine = gradient(local, number, 1 if own else factor)
        mean = mine if own else jax.lax.pmean(mine, "data")
        updates, opt = tx.update(mine, state["opt"], params, **(extras(name, params, mean) if told else {}))
        return {"params": optax.apply_updates(params, updates), "opt": opt}, {}

    state = jd.place({"params": jd.PerWorker(params) if own else params, "opt": tx.init(params)}, place)
    run = jd.simulate(step, place) if isinstance(place, int) else jd.distribute(step, place)
    for number in range(STEPS):
        state, _ = run(state, np.array([[number, 2], [number, 0]], np.float32))
    return jax.tree.map(lambda x: x[0], state["params"].value) if own else state["params"]


PLACES = {
    "all_reduce": lambda tx: optax.chain(jd.all_reduce(jd.exact()), tx),
    "zero": jd.zero_redundancy,
    "masters": lambda tx: jd.zero_redundancy(tx, master_dtype=jnp.float32),
    "host": lambda tx: jd.offload.host(jd.zero_redundancy(tx)),
    "inner": lambda tx: jd.local_steps(tx, optax.sgd(1.0), sync_period=2),
}
OPTIMIZERS = sorted(set(REGISTER) - APART - {"sam"})
QUICK = {("adafactor", "mixed"), ("lion", "bfloat16"), ("prodigy", "mixed")}


def assert_right_or_refused(name, dtypes, where, place):
    """Within the rounding of the parameters, or an error that says what to do instead."""
    try:
        expected = plain(name, dtypes, masters=where == "masters")
    except TypeError:
        # Sophia's random signs have the lowest of the dtypes, and its derivative refuses them.
        pytest.skip("optax itself refuses parameters of these dtypes")
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(wide(expected))):
        pytest.skip("optax itself does not train it in this dtype")
    try:
        found = train(name, dtypes, PLACES[where](optimizer(name)), place, own=where == "inner")
    except ValueError as error:
        # Masters are the way out, so they must work.
        if where == "masters" or not any(
            text in str(error) for text in ("master_dtype=jnp.float32", "put host around")
        ):
            raise
        return
    for x, y in zip(jax.tree.leaves(wide(found)), jax.tree.leaves(wide(expected)), strict=True):
        np.testing.assert_allclose(x, y, atol=TOLERANCE)


CASES = [
    pytest.param(name, dtypes, marks=() if (name, dtypes) in QUICK else pytest.mark.slow)
    for name in OPTIMIZERS
    for dtypes in DTYPES
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("name", "dtypes"), CASES)
def test_simulated(name, dtypes, where):
    if where == "inner" and name in NOISY:
        pytest.skip("each worker draws its own noise")
    assert_right_or_refused(name, dtypes, where, WORKERS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtypes"), CASES)
def test_on_a_mesh(name, dtypes):
    mesh = jd.make_mesh({"data": WORKERS}, devices=jax.devices()[:WORKERS])
    for where in PLACES:
        # Noise is each worker's own, and loops of line searches have no types.
        if where != "inner" or name not in {*NOISY, *NO_LOSS}:
            assert_right_or_refused(name, dtypes, where, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtypes"), CASES)
def test_outside_local_steps(name, dtypes):
    """The outer optimizer moves an anchor in float32; drifts are rounded as the models are, so signs may differ."""
    if name in NO_LOSS or name in {"momo", "momo_adam"}:
        pytest.skip("an outer optimizer sees no loss")
    tx = jd.local_steps(optax.sgd(1.0), optimizer(name), sync_period=1)
    found = train(name, dtypes, tx, WORKERS, own=True, told=False)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(wide(found)))
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, start(name, dtypes))
