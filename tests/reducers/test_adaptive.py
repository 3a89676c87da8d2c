"""Levels that follow the gradients: schedule, agreement, bytes, and what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from register_run import ran
from workers import trajectory

import jaxdist as jd
from jaxdist import compressors as jc
from jaxdist.compressors.levels import worst_variance

REDUCERS = {
    "coordinate": lambda **options: jd.reducers.alq(3, solver="coordinate", **({"norm": "l2", "block": 10} | options)),
    "exact": lambda **options: jd.reducers.alq(3, **({"norm": "l2"} | options)),
    "amq": lambda **options: jd.reducers.amq(3, **({"norm": "l2", "block": 10} | options)),
}
each_reducer = pytest.mark.parametrize("make", REDUCERS.values(), ids=REDUCERS)


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def heavy(*shape):
    """Layers of different scales in one bucket."""
    scales = np.repeat([1.0, 0.1, 0.01, 0.03], shape[-1] // 4)
    return (rows(*shape) * scales).astype(np.float32)


@each_reducer
def test_states_share_no_array(make):
    """One of them may be donated."""
    reducer, like = make(), jax.ShapeDtypeStruct((8,), jnp.float32)
    first, second = (jax.tree.leaves(reducer.init(like)) for _ in range(2))
    assert not {id(x) for x in first} & {id(x) for x in second}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alq", "alq exact", "amq"])
def test_every_device_holds_the_same_levels(name):
    states = ran(name).mesh
    for state in states[1:]:
        first, *others = [np.asarray(shard.data) for shard in state.opt[0].reducer.levels.addressable_shards]
        assert len(others) == 7
        for other in others:
            np.testing.assert_array_equal(first, other)
    assert (np.asarray(states[0].opt[0].reducer.levels) != np.asarray(states[1].opt[0].reducer.levels)).any()


@pytest.mark.slow
@each_reducer
def test_copies_of_one_worker_fit_its_levels(make):
    one = rows(1, 1, 200)
    alone, together = (
        np.asarray(trajectory(make(bucket=50), np.repeat(one, workers, axis=1))[2].levels[0]) for workers in (1, 4)
    )
    # Two programs: rounding may differ between them, and the minimum is flat; but not between workers.
    np.testing.assert_allclose(together, np.repeat(alone, 4, axis=0), atol=5e-5)
    np.testing.assert_array_equal(together, np.repeat(together[:1], 4, axis=0))


@pytest.mark.slow
def test_levels_move_at_scheduled_steps_only():
    updates = heavy(9, 1, 64) * rows(9, 1, 1, seed=1)
    reducer = jd.reducers.amq(3, bucket=64, update_steps=(2,), every=5)
    levels = np.asarray(trajectory(reducer, updates)[2].levels)[:, 0]
    moved = [number for number in range(1, 9) if (levels[number] != levels[number - 1]).any()]
    assert moved == [2, 5]
    assert (levels[0] != np.asarray(reducer.init(jnp.zeros(64)).levels)).any()


@pytest.mark.sampled(13)
@each_reducer
def test_gradients_that_say_nothing_leave_the_levels(make):
    updates = rows(5, 2, 40)
    updates[1:4] = np.array([0, np.nan, np.inf])[:, None, None]
    levels = np.asarray(trajectory(make(bucket=20, every=1), updates)[2].levels)
    np.testing.assert_array_equal(levels[1:4], np.repeat(levels[:1], 3, axis=0))
    assert (levels[4] != levels[0]).any()
    assert (np.diff(levels) > 0).all()


@pytest.mark.slow
@each_reducer
@pytest.mark.parametrize("exponent", [-100, 124])
def test_levels_are_fitted_to_gradients_of_any_magnitude(make, exponent):
    """Squares of their norms vanish, or overflow."""
    updates = heavy(1, 2, 200)
    updates /= np.abs(updates).max()
    found, wanted = (
        np.asarray(trajectory(make(bucket=50), np.ldexp(updates, power).astype(np.float32))[2].levels)
        for power in (exponent, 0)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [REDUCERS["exact"], REDUCERS["amq"]], ids=["exact", "amq"])
def test_the_mean_is_right_on_average(make):
    updates = heavy(1, 2, 128)
    repeated = np.repeat(updates, 800, axis=0)
    means, _, states = trajectory(make(bucket=64, every=10_000), repeated)
    errors = means - updates.mean(1)
    # All entries together: the error of one near a level is a rare event, of which its sample knows too little.
    assert (errors.mean(0) ** 2).sum() <= 3 * (errors**2).sum(1).mean() / 800
    levels = jnp.asarray(np.asarray(states.levels)[0, 0])
    wanted = sum(float(jc.expected_variance(jnp.asarray(x), levels, bucket=64, zero_level=False)) for x in updates[0])
    assert (errors**2).sum(1).mean() == pytest.approx(wanted / 4, rel=0.1)  # of two workers: a quarter of the sum


@pytest.mark.slow
def test_weights_decide_which_buckets_count():
    """Small buckets with heavy tails beside large Gaussian ones: with 2 the sum is least, with 0 the sum of ratios."""
    x = np.concatenate([rows(4, 256) * 10, np.random.default_rng(1).standard_t(2, (12, 256))]).astype(np.float32)

    def losses(norm_power):
        reducer = jd.reducers.alq(3, bucket=256, norm_power=norm_power)
        _, state = jax.jit(lambda x: reducer.reduce(x, reducer.init(x), jd.comm.alone()))(x)
        scales = np.abs(x).max(1, keepdims=True)
        table = np.asarray(state.levels, np.float64)
        index = np.clip(np.searchsorted(table, x / scales, side="right") - 1, 0, 6)
        each = ((table[index + 1] - x / scales) * (x / scales - table[index])).sum(1)
        return (each * scales[:, 0] ** 2).sum(), each.sum()

    found = [losses(power) for power in (0, 1, 2)]
    assert found[2][0] < found[1][0] < found[0][0]
    assert found[0][1] < found[1][1] < found[2][1]


def test_feedback_scales_by_the_levels_of_now():
    """Equal entries are bad for levels that were fitted to others: the factor is that of these levels."""
    first, second = jnp.asarray(heavy(128)), jnp.ones(128)
    reducer = jd.reducers.alq(2, bucket=64, norm="l2")

    @jax.jit
    def run(x, y):
        states = [form.reduce(x, form.init(x), jd.comm.alone())[1] for form in (reducer.forms.contraction, reducer)]
        forms = zip((reducer.forms.contraction, reducer), states, strict=True)
        return [form.reduce(y, state, jd.comm.alone())[0].own for form, state in forms], states[0].levels

    (shrunk, plain), levels = run(first, second)
    levels = np.asarray(levels, np.float64)
    below = np.searchsorted(levels, 1 / 8) - 1
    own = (levels[below + 1] - 1 / 8) * (1 / 8 - levels[below]) * 64
    omega = worst_variance(levels, 64, "l2")
    factor = (1 + np.sqrt(1 - (1 + own) / (1 + omega))) / (1 + own)
    assert factor < 0.9
    np.testing.assert_allclose(shrunk, plain * factor, rtol=1e-3)
    reducer = jd.reducers.alq(3, bucket=64, norm="l2")
    with pytest.raises(ValueError, match="has error feedback already"):
        jd.error_feedback(jd.error_feedback(reducer))


def test_statistics_are_sent_at_scheduled_steps_only():
    reducer = jd.reducers.with_stats(jd.reducers.alq(3, bucket=32, every=2))
    _, _, states = trajectory(reducer, rows(3, 4, 64))
    words = np.asarray(states.bytes)[:, 0].astype(np.float64) @ [2.0**32, 1]
    code, statistics = 3 * (64 * 3 // 8 + 4 * 2), 1.5 * (1028 + 4)
    assert np.diff(words, prepend=0).tolist() == [code + statistics, code, code + statistics]


def test_leaves_share_buckets_and_keep_their_dtypes():
    updates = {"a": rows(1, 2, 3, 5), "b": rows(1, 2, 2).astype(np.float16), "s": rows(1, 2)}
    means, owns, _ = trajectory(jd.reducers.alq(4, norm="l2", symmetric=True), updates)
    for name, x in updates.items():
        assert (means[name].shape, means[name].dtype) == ((1, *x.shape[2:]), x.dtype)
    flat = np.concatenate([owns[name][0, 0].ravel().astype(np.float32) for name in "abs"])
    scale = np.sqrt(sum((x[0, 0].astype(np.float32) ** 2).sum() for x in updates.values()))
    assert len(np.unique(np.abs(flat / scale).round(3))) <= 8


def test_bad_arguments_are_named():
    for options, message in (
        ({"bits": 8}, "bits must be 2, 3 or 4, got 8"),
        ({"bits": 3, "bucket": 0}, "bucket must be at least 1, got 0"),
        ({"bits": 3, "block": 0}, "block must be at least 1, got 0"),
        ({"bits": 3, "update_steps": (-1,)}, r"each of update_steps must be at least 0, got -1"),
        ({"bits": 3, "every": 0}, "every must be at least 1, got 0"),
    ):
        for factory in (jd.reducers.alq, jd.reducers.amq):
            with pytest.raises(ValueError, match=message):
                factory(**options)
    with pytest.raises(ValueError, match="none is left to fit"):
        jd.reducers.alq(2, symmetric=True)
