"""0/1 Adam against its paper, its intervals, its anchor, and what it sends when."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adam_rows import rows
from optimizers_run import descend, ran
from reference import optimizers as reference

import jaxdist as jd

INTERVALS = {"refreshes": 3, "doubling_steps": 4, "longest_interval": 4}


def test_follows_the_paper():
    """Floats in steps 1-3, 4, 6, 8 and 12, signs between them; local steps from step 13, in intervals of 1, 2 and 4."""
    with jax.enable_x64(True):
        gradients, x = rows(36), np.random.default_rng(1).standard_normal(64)
        tx = jd.optimizers.zero_one_adam(0.1, freeze_step=12, b1=0.8, b2=0.9, eps=1e-2, **INTERVALS)
        params, states = descend(tx, jnp.asarray(x), jnp.asarray(gradients), drifts=True)
    expected, sent = reference.zero_one_adam(gradients, x, 0.1, 12, 3, 4, 4, 0.8, 0.9, 1e-2)
    found = np.array([param.value for param in params])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    apart = found.std(1).max(1) > 1e-9
    assert apart.tolist() == [what == "nothing" for what in sent]
    assert "".join(what[0] for what in sent) == "fff" + "fsfsf" + "sssf" + "ssss" + "nsns" + 4 * "nnns"
    assert [int(state.sync.length) for state in states[12:]] == [1] * 3 + [2] * 4 + [4] * 17


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_workers_meet_in_the_anchor(dtype):
    """After a sync all parameters are the anchor to one rounding, however long it goes on."""
    tx = jd.optimizers.zero_one_adam(0.01, freeze_step=8, b2=0.9, refreshes=4, doubling_steps=8, longest_interval=4)
    params, states = descend(tx, jnp.ones(64), jnp.asarray(rows(80), dtype), drifts=True)
    for param, state in zip(params, states, strict=True):
        anchor = np.asarray(state.anchor.value)
        np.testing.assert_array_equal(anchor, np.broadcast_to(anchor[:1], anchor.shape))
        if float(state.rates) == 0:
            np.testing.assert_allclose(param.value, anchor, atol=5e-7)
    assert len({float(state.rates) > 0 for state in states}) == 2


def test_a_worker_alone_without_loss_is_adam_without_correction():
    """With an exact reducer and one worker, meeting changes nothing: the momentum is read off the displacement."""
    gradients = jnp.asarray(rows(12, 1, 16), jnp.float32)
    tx = jd.optimizers.zero_one_adam(0.1, freeze_step=6, reducer=jd.exact())
    params, _ = descend(tx, jnp.zeros(16), gradients, drifts=True)
    x, m, v = np.zeros(16), np.zeros(16), np.zeros(16)
    for number, (gradient,) in enumerate(np.asarray(gradients, np.float64)):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2 if number < 6 else v
        x = x - 0.1 * m / (np.sqrt(v) + 1e-8)
        np.testing.assert_allclose(params[number].value[0], x, atol=2e-5)


def test_weight_decay_acts_on_the_anchor_by_all_rates_since():
    """No gradient: only decay, at syncs, and none of it enters the momentum."""
    gradients = jnp.zeros((8, 2, 16)).at[0].set(1e-6)
    tx = jd.optimizers.zero_one_adam(
        0.1, freeze_step=2, doubling_steps=1, longest_interval=2, weight_decay=0.5, reducer=jd.exact()
    )
    params, states = descend(tx, jnp.full(16, 1000.0), gradients, drifts=True)
    ratios = [float(b.value[0, 0] / a.value[0, 0]) for a, b in itertools.pairwise(params[3:])]
    np.testing.assert_allclose(ratios, [1, 0.9, 1, 0.9], atol=1e-3)
    assert float(jnp.abs(states[-1].momentum.value).max()) < 1e-5


def test_residuals_are_cleared_when_their_unit_changes():
    """Of gradients before, of displacements after: a learning rate apart."""
    gradients = jnp.asarray(1e4 * rows(5), jnp.float32)
    tx = jd.optimizers.zero_one_adam(1e-3, freeze_step=4, refreshes=1)
    _, states = descend(tx, jnp.zeros(64), gradients, drifts=True)
    before, after = (jd.transforms.stats(state)["residual_norm"] for state in states[3:])
    assert 100 < float(before) < 1e4  # counted in d, whatever the gradients are
    assert float(after) < 1e-2 * float(before)


def test_estimates_start_anew_when_their_unit_changes():
    """EF21 without loss sends what an exact mean sends, if all that it knows of gradients goes, not the half of it."""
    gradients = jnp.asarray(rows(12), jnp.float32)
    lossless = jd.reducers.ef21(jd.compressed(jd.compressors.identity()))
    found, expected = (
        descend(jd.optimizers.zero_one_adam(1e-2, freeze_step=4, reducer=one), jnp.zeros(64), gradients, drifts=True)[
            0
        ][-1].value
        for one in (lossless, jd.exact())
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_entries_without_variance_stay():
    gradients = rows(16).astype(np.float32)
    gradients[:6, :, :10] = 0
    tx = jd.optimizers.zero_one_adam(0.01, freeze_step=6, refreshes=2, doubling_steps=3)
    params, _ = descend(tx, jnp.ones(64), jnp.asarray(gradients), drifts=True)
    np.testing.assert_array_equal(params[-1].value[:, :10], 1)
    assert np.abs(params[-1].value[:, 10:] - 1).max() < 10


def test_a_rate_of_zero():
    tx = jd.optimizers.zero_one_adam(lambda count: jnp.where(count < 4, 0.1, 0.0), freeze_step=2)
    params, states = descend(tx, jnp.ones(16), jnp.asarray(rows(6, 2, 16), jnp.float32), drifts=True)
    np.testing.assert_array_equal(params[-1].value, params[3].value)
    assert np.isfinite(states[-1].momentum.value).all()


@pytest.mark.slow
def test_half_precision_parameters_follow_the_anchor():
    """What a bfloat16 parameter cannot hold stays in the anchor."""
    tx = jd.optimizers.zero_one_adam(1e-4, freeze_step=20, doubling_steps=5, longest_interval=2)
    half, single = (
        descend(tx, jnp.ones(16, dtype), jnp.ones((30, 2, 16), dtype), drifts=True)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    for (param, state), (_, other) in zip(zip(*half, strict=True), zip(*single, strict=True), strict=True):
        np.testing.assert_allclose(state.anchor.value, other.anchor.value, rtol=2e-3)
        np.testing.assert_allclose(param.value.astype(jnp.float32), state.anchor.value, rtol=2**-7)
    np.testing.assert_allclose(half[1][19].anchor.value, single[1][19].anchor.value, rtol=1e-6)


@pytest.mark.slow
def test_what_each_step_sends():
    found = jd.analysis.collectives(ran("zero_one_adam").compiled, branch="all")
    kinds = sorted((op.kind, op.dtype) for op in found.ops)
    assert kinds == [("all-gather", "uint8"), ("all-reduce", "float32"), ("all-to-all", "uint8")]


def test_it_counts_what_it_sends():
    """Floats, signs, floats; then, from step 4, signs, nothing, nothing, nothing, signs."""
    tx = jd.optimizers.zero_one_adam(0.1, freeze_step=3, refreshes=1, doubling_steps=1, longest_interval=4)
    _, states = descend(tx, jnp.ones(64), jnp.asarray(rows(8), jnp.float32), drifts=True)
    found = np.diff([0, *(float(jd.transforms.stats(state)["bytes"]) for state in states)])
    floats, signs = 2 * 3 / 4 * 4 * 64, 3 * 2 * (16 // 8 + 4)
    assert found.tolist() == [floats, floats, signs, signs, 0, 0, 0, signs]


def test_it_needs_the_parameters():
    tx = jd.optimizers.zero_one_adam(0.1, freeze_step=1, axis=None)
    with pytest.raises(ValueError, match=r"needs the parameters: tx.update\(gradients, state, params\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_unmarked_parameters_are_refused(mesh):
    """They would differ between workers in secret."""
    tx = jd.optimizers.zero_one_adam(0.1, freeze_step=1)

    def step(state, batch):
        updates, opt = tx.update(batch[0], state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    state = jd.init_state(lambda: {"params": jnp.ones(4), "opt": tx.init(jnp.ones(4))}, mesh)
    with pytest.raises(ValueError, match="`params` differs between workers"):
        jd.distribute(step, mesh)(state, jnp.ones((8, 4)))


@pytest.mark.parametrize("name", ["freeze_step", "refreshes", "doubling_steps", "longest_interval"])
def test_arguments_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be .* got 0"):
        jd.optimizers.zero_one_adam(0.1, **{"freeze_step": 1, name: 0})
