"""Local steps in two levels: chips synchronize every H1 steps, pods every H2."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import slowmo as reference

import jaxdist as jd
from jaxdist import analysis

PODS, CHIPS, N, RATE = 2, 4, 6, 0.1
AXES = ("pod", "chip")


def transformation(periods, momenta=(0.5, 0.9), **options):
    inside = jd.local_steps(optax.sgd(RATE), optax.sgd(1.0, momentum=momenta[0]), sync_period=periods[0], axis="chip")
    outside = optax.sgd(0.7, momentum=momenta[1])
    return jd.local_steps(inside, outside, sync_period=periods[1], axis="pod", **options)


def make_step(tx):
    def step(state, batch):
        updates, opt = tx.update(state["x"] - batch[0], state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    return step


def place(tx, where):
    x = jnp.zeros(N)
    return jd.place({"x": jd.PerWorker(x, axis=AXES), "opt": tx.init(x)}, where, axis=AXES)


@pytest.mark.slow
@pytest.mark.parametrize("periods", [(2, 4), (2, 5)], ids=["a multiple", "between rounds of chips"])
def test_equals_the_reference_on_a_mesh_and_simulated(periods, pods):
    steps = 11
    targets = np.random.default_rng(0).normal(size=(steps, PODS, CHIPS, N)).astype(np.float32)
    expected, anchors = reference.two_levels(
        targets.astype(float), rate=RATE, periods=periods, outer_rates=(1.0, 0.7), outer_momenta=(0.5, 0.9)
    )
    tx = transformation(periods)
    on_mesh, simulated = place(tx, pods), place(tx, {"pod": PODS, "chip": CHIPS})
    distributed = jd.distribute(make_step(tx), pods, axis=AXES)
    simulate = jd.simulate(make_step(tx), {"pod": PODS, "chip": CHIPS})
    for t in range(steps):
        batch = targets[t].reshape(PODS * CHIPS, N)
        on_mesh, simulated = distributed(on_mesh, batch)[0], simulate(simulated, batch)[0]
        for state in (on_mesh, simulated):
            np.testing.assert_allclose(state["x"].value, expected[t].reshape(-1, N), atol=2e-6)
            np.testing.assert_allclose(jd.local_sgd.global_params(state["opt"]), anchors[t], atol=2e-6)


def test_each_axis_sends_a_model_in_its_rounds(pods):
    tx = transformation((2, 4))
    state = place(tx, pods)
    batch = np.zeros((PODS * CHIPS, N), np.float32)
    program = jd.distribute(make_step(tx), pods, axis=AXES, donate=False).lower(state, batch).compile()
    assert analysis.collectives(program, branch="min").wire_bytes == 0
    ops = analysis.collectives(program, branch="max").ops
    sent = {op.group_size: op.wire_bytes for op in ops}
    assert len(ops) == 2
    assert sent == {CHIPS: 2 * (CHIPS - 1) / CHIPS * 4 * N, PODS: 2 * (PODS - 1) / PODS * 4 * N}


def test_averaging_everywhere_in_each_step_is_synchronous():
    """Oracle: with periods of 1 and plain averages the two levels are one mean."""
    tx = jd.local_steps(
        jd.local_steps(optax.sgd(RATE), optax.sgd(1.0), sync_period=1, axis="chip"),
        optax.sgd(1.0),
        sync_period=1,
        axis="pod",
    )
    targets = np.random.default_rng(1).normal(size=(PODS * CHIPS, N)).astype(np.float32)
    state, simulate = place(tx, {"pod": PODS, "chip": CHIPS}), jd.simulate(make_step(tx), {"pod": PODS, "chip": CHIPS})
    x = np.zeros(N)
    for _ in range(4):
        state, x = simulate(state, targets)[0], x - RATE * (x - targets.mean(0))
        np.testing.assert_allclose(state["x"].value, np.tile(x, (PODS * CHIPS, 1)), atol=1e-6)


def test_what_cannot_be():
    kept = jd.local_steps(optax.sgd(RATE), optax.sgd(1.0), sync_period=2, delay=1, overlap_correction=True, axis="chip")
    with pytest.raises(ValueError, match=r"overlap_correction=True\) cannot be inside"):
        jd.local_steps(kept, optax.sgd(1.0), sync_period=4, axis="pod").init(jnp.zeros(N))
    with pytest.raises(ValueError, match="delay=1 cannot be used with it"):
        transformation((2, 4), delay=1).init(jnp.zeros(N))
    same = jd.local_steps(optax.sgd(RATE), optax.sgd(1.0), sync_period=2)
    with pytest.raises(ValueError, match="over the same axis"):
        jd.local_steps(same, optax.sgd(1.0), sync_period=4).init(jnp.zeros(N))
    tx = transformation((2, 4))
    weighted = jax.vmap(jax.vmap(lambda x: tx.update(x, tx.init(x), x, examples=3), axis_name="chip"), axis_name="pod")
    with pytest.raises(ValueError, match="groups have equal weights"):
        weighted(jnp.zeros((PODS, CHIPS, N)))
