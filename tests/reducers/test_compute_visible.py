"""The compute-visible sparsifier sends what bfloat16 sees, and keeps the rest until it does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import compute_visible as reference
from workers import trajectory

import jaxdist as jd
from jaxdist.reducers import Extras, compute_visible

STEPS, WORKERS, SIZE = 20, 4, 30


@pytest.mark.parametrize("kept", [None, 6])
def test_follows_the_reference(kept):
    rng = np.random.default_rng(0)
    params, updates = rng.normal(size=SIZE), 1e-3 * rng.normal(size=(STEPS, WORKERS, SIZE))
    inner = jd.exact() if kept is None else jd.compressed(jd.top_k(kept / SIZE, method="exact"))
    with jax.enable_x64(True):
        means, _, states = trajectory(jd.error_feedback(compute_visible(inner)), updates, params=jnp.asarray(params))
        expected, residuals = reference.with_feedback(updates, params, kept)
    assert 0.05 < (expected != 0).mean() < 0.9
    np.testing.assert_allclose(means, expected, atol=1e-12)
    np.testing.assert_allclose(states.residual.value, residuals, atol=1e-12)


def train(targets, start, reducer, rate, **options):
    """DiLoCo on quadratics: the global parameters after each round, and the last state."""
    tx = jd.local_sgd.diloco(optax.sgd(rate), reducer=reducer, **options)

    def step(state, target):
        updates, opt = tx.update(state["x"] - target[0], state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    state, run = jd.place({"x": jd.PerWorker(start), "opt": tx.init(start)}, WORKERS), jd.simulate(step, WORKERS)
    out = []
    for number, target in enumerate(targets, start=1):
        state, _ = run(state, target)
        if number % options["sync_period"] == 0:
            out.append(np.asarray(jd.local_sgd.global_params(state["opt"])))
    return np.array(out), state


def test_diloco_of_it_is_pulse_loco():
    rng = np.random.default_rng(1)
    start, targets = rng.normal(size=SIZE), rng.normal(size=(40, WORKERS, SIZE))
    options = {"learning_rate": 0.7, "momentum": 0.9}
    with jax.enable_x64(True):
        found, state = train(
            jnp.asarray(targets),
            jnp.asarray(start),
            jd.error_feedback(compute_visible(jd.exact())),
            1e-3,
            sync_period=4,
            **options,
        )
    outer = {"outer_rate": options["learning_rate"], "momentum": options["momentum"]}
    expected, residual = reference.pulse_loco(targets, start, rate=1e-3, period=4, **outer)
    assert 0.1 < (residual != 0).mean() < 1
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(state["opt"].reducer[0].residual.value, residual, atol=1e-6)


def test_what_waits_is_at_most_the_distance_of_two_neighbors():
    rng = np.random.default_rng(2)
    params, updates = rng.normal(size=SIZE), 1e-4 * rng.normal(size=(200, WORKERS, SIZE))
    _, _, states = trajectory(
        jd.error_feedback(compute_visible(jd.exact())),
        updates.astype(np.float32),
        params=jnp.asarray(params, jnp.float32),
    )
    # Neighbors are at most 2^-7 of a number apart.
    assert (np.abs(states.residual.value) <= 2.0**-7 * np.abs(params) + 1e-12).all()


def test_the_scale_is_the_rate_of_plain_sgd():
    params, updates = jnp.ones(2), jnp.array([0.1, 1.0])
    reducer = compute_visible(jd.exact(), scale=0.01)
    reduced, _ = reducer.reduce(updates, reducer.init(updates), jd.comm.alone(), Extras(params=params))
    assert reduced.mean.tolist() == [0.0, 1.0]
    with pytest.warns(UserWarning, match="error_feedback"):
        tx = jd.all_reduce(reducer, axis=None)
    assert tx.update(updates, tx.init(params), params)[0].tolist() == [0.0, 1.0]


def test_leaves_of_a_label_get_their_parameters():
    by_name = jd.reducers.per_leaf(lambda path, leaf: path, {"a": jd.exact(), "b": compute_visible(jd.exact())})
    updates, params = {"a": jnp.full(2, 1e-3), "b": jnp.array([1e-3, 1.0])}, {"a": jnp.ones(2), "b": jnp.ones(2)}
    reduced, _ = by_name.reduce(updates, by_name.init(updates), jd.comm.alone(), Extras(params=params))
    assert reduced.mean["b"].tolist() == [0.0, 1.0]
    assert (reduced.mean["a"] == updates["a"]).all()


def test_what_is_refused():
    with pytest.raises(ValueError, match="dtype must be the floating-point type of the forward pass, got int8"):
        compute_visible(jd.exact(), dtype="int8")
    with pytest.raises(ValueError, match="scale must be positive, got 0"):
        compute_visible(jd.exact(), scale=0)
    reducer = compute_visible(jd.exact())
    with pytest.raises(ValueError, match="got none: ZeRO, specs= and sharded"):
        reducer.reduce(jnp.ones(2), (), jd.comm.alone())
    with pytest.raises(ValueError, match="use whole leaves"):
        jd.reducers.bucketed(reducer)
