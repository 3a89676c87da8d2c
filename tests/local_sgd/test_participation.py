"""Rounds in which only some workers take part, against FedAvg in float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_run import targets
from reference.local_steps import fed_avg

import jaxdist as jd
from jaxdist.local_sgd import participation

WORKERS, COUNT, PERIOD, ROUNDS, RATE = 8, 3, 2, 12, 0.2
EXAMPLES = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)
KEY = jax.random.key(3)
REDUCERS = {
    "exact": (jd.exact(), None),
    "feedback": (jd.error_feedback(jd.compressed(jd.top_k(0.34, method="exact"))), 2),
}


class State(NamedTuple):
    params: Any
    opt: Any
    key: Any


def drawn(number):
    """`[rounds, W]`, as every worker draws it."""
    draw = jax.vmap(lambda r, _: participation(KEY, r, count=COUNT), in_axes=(None, 0), axis_name="data")
    return np.asarray(jax.vmap(draw, in_axes=(0, None))(jnp.arange(number), jnp.zeros(WORKERS)))


def train(reducer, run, workers):
    """The global parameters after each round, the models and the optimizer state."""
    tx = jd.local_steps(optax.sgd(RATE), optax.sgd(1.0), sync_period=PERIOD, reducer=reducer)

    def step(state, batch):
        target, examples = batch[0][0], batch[1][0]
        weight = participation(state.key, state.opt.rounds[0], count=COUNT)
        # A client that is not drawn may send anything: its data is NaN, which must not matter.
        gradient = jnp.where(weight > 0, state.params - target, jnp.nan)
        updates, opt = tx.update(gradient, state.opt, state.params, examples=weight * examples, active=weight > 0)
        return State(optax.apply_updates(state.params, updates), opt, state.key), {}

    def make_state():
        params = jnp.zeros(6)
        return State(jd.PerWorker(params), tx.init(params), KEY)

    state, step = jd.init_state(make_state, workers), run(step)
    anchors = []
    for target in targets(ROUNDS * PERIOD, WORKERS):
        state, _ = step(state, (target, EXAMPLES))
        anchors.append(np.asarray(jd.local_sgd.global_params(state.opt)))
    return np.stack(anchors)[PERIOD - 1 :: PERIOD], np.asarray(state.params.value), state.opt


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCERS)
def test_rounds_are_those_of_fed_avg(name, mesh):
    """On the mesh and in simulation; workers that are not drawn keep their residuals and take the new parameters."""
    reducer, kept = REDUCERS[name]
    taking_part = drawn(ROUNDS)
    expected, residuals = fed_avg(
        targets(ROUNDS * PERIOD, WORKERS), np.zeros(6), taking_part, EXAMPLES, rate=RATE, period=PERIOD, kept=kept
    )
    for run, workers in ((lambda f: jd.distribute(f, mesh), mesh), (lambda f: jd.simulate(f, WORKERS), WORKERS)):
        anchors, local, opt = train(reducer, run, workers)
        np.testing.assert_allclose(anchors, expected, atol=2e-6)
        np.testing.assert_allclose(local, np.broadcast_to(expected[-1], local.shape), atol=2e-6)
        if kept is not None:
            np.testing.assert_allclose(opt.reducer[0].residual.value, residuals, atol=2e-5)
            assert np.abs(residuals).max() > 0.1


def test_a_hostile_worker_among_those_that_are_drawn():
    """The median is that of the workers that were drawn, not of the zeros of the others."""
    anchors, _, _ = train(jd.reducers.median(), lambda f: jd.simulate(f, WORKERS), WORKERS)
    data, ends = targets(PERIOD, WORKERS), np.zeros((WORKERS, 6))
    for step in range(PERIOD):
        ends = ends - RATE * (ends - data[step])
    taking_part = drawn(1)[0] > 0
    # Weights w_i = examples: the middle of three by weight.
    order = np.argsort(ends[taking_part], axis=0)
    weights = EXAMPLES[taking_part][order]
    middle = np.argmax(np.cumsum(weights, axis=0) > weights.sum(0) / 2, axis=0)
    expected = np.take_along_axis(np.take_along_axis(ends[taking_part], order, 0), middle[None], 0)[0]
    np.testing.assert_allclose(anchors[0], expected, atol=1e-6)


def test_draws():
    rounds = drawn(400)
    assert (rounds.sum(1) == COUNT).all()
    assert len({tuple(row) for row in rounds}) > 40
    # A binomial count of mean 150 and standard deviation below 10.
    assert np.abs(rounds.sum(0) - 400 * COUNT / WORKERS).max() < 50


@pytest.mark.parametrize("count", [0, 9])
def test_counts_that_cannot_be(count):
    with pytest.raises(ValueError, match=f"count must be between 1 and the 8 workers of axis 'data', got {count}"):
        jax.vmap(lambda _: participation(KEY, 0, count=count), axis_name="data")(jnp.zeros(WORKERS))


def test_keys_that_differ_are_refused(mesh):
    def step(key, batch):
        return key, participation(jd.runtime.worker_key(key), 0, count=COUNT) + 0 * batch[0]

    with pytest.raises(ValueError, match="key and round_number must be equal on all workers"):
        jd.distribute(step, mesh)(jax.random.key(0), jnp.zeros(WORKERS))


def test_loco_keeps_its_error():
    reducer = jd.reducers.loco(jd.compressed(jd.compressors.scaled_sign()), block=8)

    def two_steps(x, examples):
        """The second without the workers that have no examples."""
        _, before = reducer.reduce(x, reducer.init(x), jd.comm.over("data"))
        reduced, after = reducer.reduce(x, before, jd.comm.over("data"), jd.reducers.Extras(examples=examples))
        before, after = (codes * scales for codes, scales in (before.error.value, after.error.value))
        return before, after, reduced.own

    rows = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    run = jax.jit(jax.vmap(two_steps, axis_name="data"))
    before, after, own = map(np.asarray, run(rows, jnp.array([0.0, 2.0])))
    np.testing.assert_allclose(before[0], after[0], rtol=1e-6)
    assert np.abs(before[1] - after[1]).max() > 0.01
    assert not own[0].any()
    assert own[1].any()
