"""One-sided PowerSGD: half a power iteration in each step, one all-reduce."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from low_rank import compiled_for, gradients
from reference import power_sgd as reference
from workers import trajectory

import jaxdist as jd


def reducer(rank, **options):
    return jd.power_sgd(rank, one_sided=True, min_compression_rate=0, **options)


@pytest.mark.parametrize("own", ["local", "paper"])
def test_follows_the_reference(float64, own):
    rows = gradients(20, 4)
    q = np.asarray(reducer(2).init(jnp.zeros((12, 9))).right)
    means, _, states = trajectory(jd.error_feedback(reducer(2, own=own)), rows)
    expected, residuals = reference.one_sided(rows, q, own=own)
    np.testing.assert_allclose(means, expected, atol=1e-11)
    np.testing.assert_allclose(states.residual.value, residuals, atol=1e-11)


@pytest.mark.slow
def test_many_workers_are_one_worker_on_the_averaged_gradients(float64):
    rows = {"w": gradients(50, 4), "b": gradients(50, 4)[..., 0]}
    feedback = jd.error_feedback(reducer(2))
    many, _, _ = trajectory(feedback, rows)
    one, _, _ = trajectory(feedback, jax.tree.map(lambda x: x.mean(1, keepdims=True), rows))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), many, one)


def test_sides_take_turns_and_find_the_best_approximation(float64):
    matrix = gradients(1, 1)[0, 0]
    means, _, states = trajectory(reducer(3), np.broadcast_to(matrix, (40, 1, 12, 9)))
    assert np.asarray(states.from_right)[:4, 0].tolist() == [False, True, False, True]
    left_moved = (np.diff(np.asarray(states.left), axis=0) != 0).any((1, 2, 3))
    assert (left_moved == (np.arange(39) % 2 == 1)).all()
    errors = ((matrix - means) ** 2).sum((1, 2))
    assert (np.diff(errors) <= 1e-12).all()
    np.testing.assert_allclose(errors[-1], (np.linalg.svd(matrix)[1][3:] ** 2).sum(), rtol=1e-3)


def test_the_second_step_loses_nothing_up_to_the_rank():
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((12, 3)) @ rng.standard_normal((3, 9))).astype(np.float32)
    means, _, _ = trajectory(reducer(3), np.broadcast_to(matrix, (2, 1, 12, 9)))
    assert abs(means[0] - matrix).max() > 0.1
    np.testing.assert_allclose(means[1], matrix, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("one_sided", [False, True])
def test_equal_shapes_do_not_share_a_scale(one_sided):
    """A common norm of all matrices of one shape would shrink each of them."""
    rows = {name: gradients(4, 2, seed=seed).astype(np.float32) for seed, name in enumerate("abc")}
    feedback = jd.error_feedback(jd.power_sgd(1, one_sided=one_sided, min_compression_rate=0))
    start = {name: feedback.init({name: jnp.zeros((12, 9))}) for name in rows}
    together = feedback.init({name: jnp.zeros((12, 9)) for name in rows})
    field = "right" if one_sided else "q"
    factors = {name: getattr(start[name].reducer, field)[name] for name in rows}
    together = together._replace(reducer=together.reducer._replace(**{field: factors}))
    means, _, _ = trajectory(feedback, rows, state=together)
    for name in rows:
        alone, _, _ = trajectory(feedback, {name: rows[name]}, state=start[name])
        np.testing.assert_allclose(means[name], alone[name], atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zeros", [1, 2, 3])
def test_recovers_from_zero_gradients(zeros):
    rows = gradients(zeros + 6, 2).astype(np.float32)
    rows[:zeros] = 0
    means, _, states = trajectory(jd.error_feedback(reducer(2)), rows)
    assert (means[:zeros] == 0).all()
    assert np.isfinite(means).all()
    delivered = means.sum(0) + np.asarray(states.residual.value)[-1].mean(0)
    np.testing.assert_allclose(delivered, rows.mean(1).sum(0), atol=1e-4)
    target = rows[-6:].mean(1).sum(0)
    assert ((means.sum(0) - target) ** 2).sum() < 0.9 * (target**2).sum()


def test_local_residuals_stay_near_each_other(float64):
    rows = gradients(400, 4, unlike=3.0)
    residuals = np.asarray(trajectory(jd.error_feedback(reducer(2)), rows)[2].residual.value)
    spread = np.linalg.norm((residuals - residuals.mean(1, keepdims=True)).reshape(400, -1), axis=1)
    assert spread[200:].max() < 1.5 * spread[50:200].max()


def test_plain_means_before_the_start():
    rows = gradients(4, 2).astype(np.float32)
    means, _, _ = trajectory(jd.error_feedback(reducer(1, start_step=2)), rows)
    np.testing.assert_allclose(means[:2], rows[:2].mean(1), atol=1e-6)
    assert np.linalg.matrix_rank(means[2]) == np.linalg.matrix_rank(means[3]) == 1


def test_bytes_of_both_steps(mesh):
    """From the compiled program: rows or columns, and what is sent whole."""
    shapes = {"kernel": (3, 3, 8, 16), "dense": (10, 7), "dense_2": (10, 7), "bias": (7,), "scale": ()}
    both = jd.analysis.collectives(compiled_for(mesh, reducer(2), shapes), branch="all")
    assert [(op.kind, op.dtype, op.messages) for op in both.ops] == [("all-reduce", "float32", 1)] * 2
    assert sorted(op.bytes for op in both.ops) == [4 * (2 * (16 + 7 + 7) + 8), 4 * (2 * (72 + 10 + 10) + 8)]


def test_bytes_take_turns():
    _, _, states = trajectory(jd.reducers.with_stats(reducer(2)), gradients(4, 2).astype(np.float32))
    assert np.diff(np.asarray(states.bytes)[:, 0, 1], prepend=0).tolist() == [4 * 2 * side for side in (12, 9, 12, 9)]


def test_a_cold_start_is_refused():
    with pytest.raises(ValueError, match="one_sided=True needs warm_start=True"):
        jd.power_sgd(1, one_sided=True, warm_start=False)
