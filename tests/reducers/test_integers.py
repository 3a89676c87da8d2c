"""Sums of integers in a shared scale; laws and the bytes of the first step are in `test_laws.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import integers as reference
from register import TOTAL
from register_run import State
from workers import trajectory

import jaxdist as jd
from jaxdist.compressors import uniform_hash
from jaxdist.reducers import integer_sum


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def uniforms(steps, workers, size):
    """What the reducer draws for its first leaf."""

    def one(step, worker):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), worker), 0)
        return uniform_hash(key, (size,))

    return np.asarray([[one(step, worker) for worker in range(workers)] for step in range(steps)])


@pytest.mark.sampled(13)
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_follows_the_reference(scale):
    """At 20 times the scale some of the entries clip."""
    updates = rows(20, 4, 30)
    means, owns, _ = trajectory(jd.reducers.intsgd(scale=scale), updates)
    expected, codes = reference.intsgd(updates.astype(np.float64), uniforms(20, 4, 30), 31, 0.9, scale)
    np.testing.assert_allclose(means, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(owns.mean(1), means, atol=1e-5)
    assert ((np.abs(codes) == 31).mean() > 0.02) == (scale == 20)


def test_unbiased_and_its_variance_is_that_of_the_paper():
    """Half of |mean|² over scale² at the most, and nearly that for entries between two levels."""
    update = np.broadcast_to(rows(1, 1, 40), (400, 4, 40))
    for scale in (1.0, 4.0):
        errors = trajectory(jd.reducers.intsgd(beta=0.0, scale=scale), update)[0][1:] - update[0, 0]
        size = (update[0, 0] ** 2).sum()
        variance = (errors**2).sum(1).mean()
        assert 0.5 < variance / (size / (2 * scale**2)) < 1.05
        assert np.abs(errors.mean(0)).max() < 5 * errors.std() / 399**0.5


def test_after_the_first_step_int8_travels_and_nothing_else(mesh):
    like = {"b": jnp.zeros(5), "w": jnp.zeros((12, 8)), "s": jnp.zeros(())}
    tx = jd.all_reduce(jd.reducers.intsgd())

    def step(state, batch):
        means, opt = tx.update(jax.tree.map(lambda x: x[0], batch), state.opt)
        return State(means, opt), {}

    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), like)
    state = jd.init_state(lambda: State(like, tx.init(like)), mesh)
    compiled = jd.distribute(step, mesh).lower(state, batch).compile()
    later = jd.analysis.collectives(compiled, branch="min")
    assert [(op.kind, op.dtype, op.bytes, op.messages) for op in later.ops] == [("all-reduce", "int8", TOTAL, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 127])
def test_no_sum_overflows(workers):
    """All workers at the largest entry: 127 = 127 · 1 fits an int8, and one more worker would not."""
    for sign in (1, -1):
        updates = np.full((2, workers, 8), sign, np.float32)
        np.testing.assert_allclose(trajectory(integer_sum(), updates)[0], sign, rtol=1e-6)
        clipped = trajectory(jd.reducers.intsgd(scale=1e6), updates)[0][1]
        assert (sign * clipped > 0).all()


def test_too_many_workers_are_told_so():
    for make in (jd.reducers.intsgd, integer_sum):
        with pytest.raises(ValueError, match="8 bits leave no level for a sum over 128 workers: use bits=32"):
            trajectory(make(), np.ones((1, 128, 3), np.float32))
        means = trajectory(make(32), np.ones((1, 128, 3), np.float32))[0]
        np.testing.assert_allclose(means, 1.0, rtol=1e-6)


def test_feedback_delivers_what_was_clipped():
    """A burst a thousand times larger than what the scale was made for, then nothing."""
    updates = np.zeros((60, 2, 8), np.float32)
    updates[0] = 0.01 * rows(1, 8)
    updates[1] = 10 * rows(2, 8, seed=1)
    plain = trajectory(jd.reducers.intsgd(), updates)[0].sum(0)
    means, _, states = trajectory(jd.error_feedback(jd.reducers.intsgd()), updates)
    wanted = updates.sum(0).mean(0)
    residual = np.asarray(states.residual.value)
    np.testing.assert_allclose(means.sum(0) + residual[-1].mean(0), wanted, atol=1e-4)
    assert np.abs(plain - wanted).max() > 1
    assert np.abs(residual[1]).max() > 1
    assert np.abs(residual[-1]).max() < 0.2 * np.abs(residual[1]).max()


def test_a_leaf_that_starts_late_finds_its_scale():
    updates = np.concatenate([np.zeros((3, 4, 16)), np.ones((40, 4, 16))]).astype(np.float32)
    means = trajectory(jd.reducers.intsgd(), updates)[0]
    assert not means[:3].any()
    np.testing.assert_allclose(means[-20:].mean(), 1.0, atol=0.15)


def test_a_shared_maximum_never_clips_and_errors_stay_below_a_level():
    updates = {"a": rows(3, 8, 40), "b": 1e-6 * rows(3, 8, 4), "z": np.zeros((3, 8, 2), np.float32)}
    means, owns, _ = trajectory(integer_sum(), updates)
    for name, x in updates.items():
        top = np.abs(x).max((1, 2), keepdims=True)
        assert (np.abs(owns[name] - x) <= top / 15 * 1.001).all()
        np.testing.assert_allclose(owns[name].mean(1), means[name], atol=1e-6 * np.abs(x).max())


def test_nan_is_sent_as_zero_by_one_and_seen_by_all_with_the_other():
    updates = np.ones((2, 2, 4), np.float32)
    updates[1, 0, 0] = np.nan
    assert np.isfinite(trajectory(jd.reducers.intsgd(), updates)[0]).all()
    assert np.isnan(trajectory(integer_sum(), updates)[0][1]).any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("bits", "largest"), [(8, 1e-37), (32, 1e-37), (32, 1e-32)])
def test_tiny_leaves_are_not_lost(bits, largest):
    """The scale of the largest entry, levels / 1e-37, is no float."""
    x = np.array([[[1.0, -0.5], [0.25, 0.5]]], np.float32) * np.float32(largest)
    means, owns, _ = trajectory(integer_sum(bits), x)
    # Two workers: levels are 2 W times the smallest normal number or more.
    level = max(0.05 * largest, 4 * float(np.finfo(np.float32).tiny))
    np.testing.assert_allclose(means, x.mean(1), atol=level)
    np.testing.assert_allclose(owns, x, atol=level)
    assert owns[0, 0, 0] > 0


def test_a_first_mean_beyond_the_root_of_the_largest_float():
    """Its square is no float, and an infinite average would make each later mean NaN."""
    updates = np.array([[1e20, -2e20]] + [[1.0, 2.0]] * 2, np.float32)[:, None]
    means, _, _ = trajectory(jd.reducers.intsgd(), updates)
    assert np.isfinite(means).all()


def test_an_empty_leaf_on_a_mesh(mesh):
    like, tx = {"w": jnp.zeros(3), "e": jnp.zeros((0, 4))}, jd.all_reduce(jd.reducers.intsgd())

    def step(state, batch):
        updates, opt = tx.update(jax.tree.map(lambda x: x + batch.sum(), like), state.opt)
        return State(updates, opt), {}

    state = jd.place(State(like, tx.init(like)), mesh)
    jax.eval_shape(jd.distribute(step, mesh), state, jnp.ones(8))


def test_arguments_are_checked():
    for make in (jd.reducers.intsgd, integer_sum):
        with pytest.raises(ValueError, match="bits must be 8 or 32, got 16"):
            make(16)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1.0"):
        jd.reducers.intsgd(beta=1.0)
    with pytest.raises(ValueError, match="scale must be positive and finite, got nan"):
        jd.reducers.intsgd(scale=float("nan"))
    with pytest.raises(ValueError, match="scale must be positive"):
        jd.reducers.intsgd(scale=0.0)
