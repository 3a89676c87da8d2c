"""Eager updates: one's own share of a round at once, and those of the others when they arrive."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_run import run, targets
from problems import TrainState, assert_close, batch, loss, params
from reference.local_steps import local_steps as reference
from reference.local_steps import rda

import jaxdist as jd
from jaxdist.local_sgd import Fragments

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
WORKERS = 4


@pytest.mark.parametrize(("alpha", "merge"), [(0.0, "mean"), (0.5, "rda")])
def test_rounds_equal_a_loop(alpha, merge):
    number, drawn = 3, targets(90)
    by_number = Fragments(number, lambda tree: list(range(number)))
    options = {"merge_alpha": alpha, "merge": merge, "fragments": by_number}
    tx = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=6, delay=4, eager=True, **options)
    local, anchors, _ = run(tx, [drawn[..., i::number] for i in range(number)])
    found = reference(
        drawn,
        np.zeros(6),
        rate=0.2,
        period=6,
        outer_rate=0.7,
        outer_momentum=0.9,
        nesterov=True,
        fragments=number,
        delay=4,
        alpha=alpha,
        merge=rda if merge == "rda" else None,
        eager=True,
    )
    for i in range(number):
        np.testing.assert_allclose(local[i], found[0][..., i::number], atol=2e-5)
        # A drift is sent at the start of the next step.
        expected = found[1][..., i::number]
        np.testing.assert_allclose(anchors[i], np.concatenate([expected[:1] * 0, expected[:-1]]), atol=2e-5)


def test_averaging_applies_the_mix_of_the_paper():
    """With plain averaging and a whole round under way: `θ_w -= Δ' + (Δ_w - Δ'_w) / W`, `Δ'` of the round before."""
    period, rounds = 4, 6
    drawn = targets(period * rounds)
    # Drifts that do not depend on the model: the step that sends takes its gradient before the share is applied.
    tx = jd.local_steps(optax.sgd(0.1), optax.sgd(1.0), sync_period=period, delay=period - 1, eager=True)
    local, _, _ = run(tx, drawn, gradient=lambda params, target: target + 0 * params)
    drifts = 0.1 * drawn.astype(float).reshape(rounds, period, *drawn.shape[1:]).sum(1)
    model, before = np.zeros(drawn.shape[1:]), np.zeros_like(drifts[0])
    for number, drift in enumerate(drifts[:-1]):
        model = model - before.mean(0) - (drift - before) / drawn.shape[1]
        # The first step of the next round is on top.
        start = local[(number + 1) * period] + 0.1 * drawn[(number + 1) * period]
        np.testing.assert_allclose(start, model, atol=1e-5)
        before = drift


def test_one_worker_has_its_whole_share_at_once():
    drawn = targets(40, workers=1)
    tx = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=5, delay=4, eager=True)
    plain = jd.local_steps(optax.sgd(0.2), NESTEROV, sync_period=5)
    constant = {"gradient": lambda params, target: target + 0 * params}
    local, _, _ = run(tx, drawn, **constant)
    expected, _, _ = run(plain, drawn, **constant)
    # The outer step comes with the next one.
    np.testing.assert_allclose(local[5::5], expected[5::5], atol=1e-5)


def step_of(tx):
    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


def test_a_mesh_is_the_simulation():
    tx = jd.local_steps(optax.adam(0.05), NESTEROV, sync_period=4, delay=3, eager=True, fragments=2)
    mesh = jd.make_mesh({"data": WORKERS})
    on_mesh, simulated = (jd.place(TrainState(jd.PerWorker(params()), tx.init(params())), x) for x in (mesh, WORKERS))
    step, simulation = jd.distribute(step_of(tx), mesh), jd.simulate(step_of(tx), WORKERS)
    for seed in range(9):
        on_mesh, _ = step(on_mesh, batch(seed=seed))
        simulated, _ = simulation(simulated, batch(seed=seed))
    assert_close(on_mesh, simulated, 2e-5)


def test_parameters_of_half_precision_keep_their_dtype():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    tx = jd.local_steps(optax.sgd(0.05), NESTEROV, sync_period=4, delay=2, eager=True)
    state = jd.place(TrainState(jd.PerWorker(half), tx.init(half)), WORKERS)
    data = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch())
    simulation = jd.simulate(step_of(tx), WORKERS)
    for _ in range(7):
        state, _ = simulation(state, data)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 1}, "got delay=1, with which they arrive in the same step: use delay >= 2"),
        ({"delay": 2, "overlap_correction": True}, "leave overlap_correction out"),
    ],
    ids=["delay", "correction"],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=4, eager=True, **options)


def test_eager_workers_cannot_be_inside():
    inner = jd.local_steps(optax.sgd(0.1), NESTEROV, sync_period=4, delay=2, eager=True, axis="chip")
    with pytest.raises(ValueError, match="eager=True"):
        jd.local_steps(inner, NESTEROV, sync_period=8, axis="pod").init(params())
