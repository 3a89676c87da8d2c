"""SparseLoCo and MuLoCo: what feedback keeps, what travels, which leaves Muon has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_run import run, targets
from register import position_bytes

import jaxdist as jd


@pytest.mark.slow
def test_feedback_keeps_what_was_not_sent():
    """`β e + Δ = s + e'` on each worker, and the agreed model moves by the mean of the `s` alone."""
    drawn = targets(12, 4, 64)
    tx = jd.local_sgd.sparse_loco(optax.sgd(0.1), sync_period=4, density=0.125, block=32, learning_rate=0.5)

    def worker(drawn):
        def step(state, target):
            params, opt = state
            updates, opt = tx.update(params - target, opt, params)
            return (params + updates, opt), (params, opt.anchor, opt.reducer[0].residual.value)

        params = jnp.zeros(64)
        return jax.lax.scan(step, (params, tx.init(params)), drawn)[1]

    mapped = jax.jit(jax.vmap(worker, in_axes=1, axis_name="data"))(drawn)
    local, anchors, residuals = (np.asarray(x, np.float64) for x in mapped)
    for last in (7, 11):  # `local` is the model before a step
        before = anchors[0, last - 1]
        owed = before - (local[:, last] - 0.1 * (local[:, last] - drawn[last])) + 0.95 * residuals[:, last - 1]
        sent = owed - residuals[:, last]
        np.testing.assert_allclose(before - anchors[0, last], 0.5 * sent.mean(0), atol=1e-6)
        for x, s in zip(owed.reshape(8, 32), sent.reshape(8, 32), strict=True):
            kept = np.abs(s) > 1e-6
            assert np.array_equal(np.flatnonzero(kept), np.sort(np.argsort(-np.abs(x))[:4]))  # the 4 largest of 32
            np.testing.assert_array_equal(np.sign(s[kept]), np.sign(x[kept]))
        for s in sent:  # of two magnitudes
            assert len(np.unique(np.round(np.abs(s[np.abs(s) > 1e-6]), 5))) == 2


@pytest.mark.slow
def test_all_entries_one_value_a_mean_is_plain_averaging():
    drawn = targets(12)
    tx = jd.local_sgd.sparse_loco(optax.sgd(0.1), sync_period=4, density=1.0, values_block=1, learning_rate=0.65)
    _, found, state = run(tx, drawn)
    _, expected, _ = run(jd.local_steps(optax.sgd(0.1), optax.sgd(0.65), sync_period=4), drawn)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(state.reducer[0].residual.value, 0, atol=1e-7)


@pytest.mark.slow
def test_sends_a_two_hundredth_of_float32_and_nothing_between():
    """Ten bits and a quarter for one entry of 64. With indices of 12 bits it would be 14, 146 times less."""
    tx, size = jd.local_sgd.sparse_loco(optax.sgd(0.1), sync_period=30), 8 * 4096
    mesh = jd.make_mesh({"data": 2})

    def step(state, target):
        updates, opt = tx.update(state["x"] - target[0], state["opt"], state["x"])
        return {"x": state["x"] + updates, "opt": opt}, {}

    first = jd.init_state(lambda: {"x": jd.PerWorker(jnp.zeros(size)), "opt": tx.init(jnp.zeros(size))}, mesh)
    compiled = jd.distribute(step, mesh).lower(first, jnp.zeros((2, size))).compile()
    entries = 64 * 8
    expected = position_bytes(entries, size) + entries // 4 + 8 * entries // 256
    worst = jd.analysis.collectives(compiled).ops
    assert [(op.kind, op.dtype, op.bytes) for op in worst] == [("all-gather", "uint8", expected)]
    assert jd.analysis.collectives(compiled, branch="min").ops == ()
    assert 4 * size / expected == pytest.approx(200, abs=1)


def test_a_matrix_without_entries_is_not_orthogonalised():
    drawn = {"e": np.zeros((2, 2, 0, 4), np.float32), "w": np.ones((2, 2, 4, 4), np.float32)}
    local, _, _ = run(jd.local_sgd.muloco(0.04, adam_learning_rate=0.001, sync_period=2), drawn)
    assert local["e"].shape == (2, 2, 0, 4)
    assert np.isfinite(local["w"]).all()


def test_muon_has_the_hidden_matrices_and_adam_the_rest():
    """Workers that agree, a round a step: Nesterov from rest takes `(1 + μ) η` of the first step of each."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (6, 4), "layer": {"b": (4,), "w": (4, 6)}, "lm_head": (4, 6)}
    one = jax.tree.map(lambda shape: rng.standard_normal(shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    gradients = jax.tree.map(lambda x: np.broadcast_to(x, (1, 2, *x.shape)).astype(np.float32), one)
    tx = jd.local_sgd.muloco(0.04, adam_learning_rate=0.001, sync_period=1, outer_learning_rate=0.9, momentum=0.8)
    _, anchors, _ = run(tx, gradients, gradient=lambda params, drawn: drawn)
    found = jax.tree.map(lambda x: x[0] / (1.8 * 0.9), anchors)
    # Adam's first step is its rate in each entry. Muon's has singular values near its rate times sqrt(6 / 4).
    for part in (found["embed"], found["layer"]["b"], found["lm_head"]):
        np.testing.assert_allclose(np.abs(part), 0.001, rtol=1e-3)
    singular = np.linalg.svd(found["layer"]["w"], compute_uv=False) / (0.04 * np.sqrt(1.5))
    assert (singular > 0.5).all()
    assert (singular < 1.3).all()
