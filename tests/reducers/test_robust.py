"""Robust means against their definition, with hostile workers, weights and combinators."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference.robust import robust_mean

import jaxdist as jd
from jaxdist.reducers import Extras, Law, Use, median, trimmed_mean

ROBUST = {"median": (median(), None), "trimmed_mean": (trimmed_mean(2), 2)}
each_robust = pytest.mark.parametrize("name", ROBUST)


def reduce_rows(reducer, rows, counts=None):
    """The mean of the rows `[W, ...]`, one for each worker."""

    def one_worker(x, count):
        extras = Extras() if counts is None else Extras(examples=count)
        return reducer.reduce(x, reducer.init(x), jd.comm.over("data"), extras)[0].mean

    weights = jnp.ones(len(rows)) if counts is None else jnp.asarray(counts, jnp.float32)
    return jax.jit(jax.vmap(one_worker, axis_name="data"))(jnp.asarray(rows), weights)[0]


def drawn(workers, n=40, seed=0):
    return np.random.default_rng(seed).standard_normal((workers, n)).astype(np.float32)


@each_robust
@pytest.mark.parametrize("workers", [5, 6, 9])
def test_the_definition(name, workers):
    reducer, trim = ROBUST[name]
    np.testing.assert_allclose(reduce_rows(reducer, drawn(workers)), robust_mean(drawn(workers), trim=trim), atol=1e-6)


@each_robust
def test_weights_by_examples(name):
    """Ties at exactly half of the weight included, and workers that do not take part."""
    reducer, trim = ROBUST[name]
    counts = np.random.default_rng(1).integers(0, 4, (30, 8)).astype(np.float32)
    counts[:8] = np.tril(np.ones((8, 8)))
    counts[8] = 0
    found = jax.jit(jax.vmap(lambda n: reduce_rows(reducer, drawn(8), n)))(counts)
    expected = [robust_mean(drawn(8), row, trim) for row in counts]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@each_robust
def test_equal_weights_change_nothing(name):
    reducer, _ = ROBUST[name]
    for workers in (7, 10):
        rows = drawn(workers)
        weighted = reduce_rows(reducer, rows, np.full(workers, 3))
        np.testing.assert_allclose(reduce_rows(reducer, rows), weighted, atol=1e-6)


@pytest.mark.sampled(3)
@each_robust
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3e38, -1e20])
@pytest.mark.parametrize("weighted", [False, True])
def test_hostile_workers_stay_within_the_values_of_the_others(name, bad, weighted):
    reducer, _ = ROBUST[name]
    rows = drawn(7)
    rows[[1, 4]] = bad
    honest = rows[[0, 2, 3, 5, 6]]
    found = reduce_rows(reducer, rows, np.ones(7) if weighted else None)
    assert (found >= honest.min(0)).all()
    assert (found <= honest.max(0)).all()


@each_robust
def test_a_majority_of_nan_is_seen(name):
    reducer, _ = ROBUST[name]
    rows = drawn(7)
    rows[:4] = np.nan
    assert np.isnan(reduce_rows(reducer, rows)).all()
    assert np.isnan(reduce_rows(reducer, rows, np.ones(7))).all()


@each_robust
@pytest.mark.parametrize("count", [np.nan, np.inf, -5.0, 0.0])
def test_numbers_of_examples_that_cannot_be_count_as_none(name, count):
    reducer, trim = ROBUST[name]
    rows, counts = drawn(8), np.array([1, count, 2, 3, 4, 5, 6, 7], np.float32)
    rows[1] = np.nan
    expected = robust_mean(rows, np.array([1, 0, 2, 3, 4, 5, 6, 7]), trim)
    np.testing.assert_allclose(reduce_rows(reducer, rows, counts), expected, atol=1e-6)


@each_robust
def test_in_a_chain_with_examples(name):
    """Workers without examples do not count, whatever they send; without any on all workers nothing changes."""
    reducer, trim = ROBUST[name]
    tx = optax.chain(jd.all_reduce(reducer), optax.scale(1.0))
    rows, counts = drawn(8), np.array([0, 1, 2, 3, 4, 0, 6, 7], np.float32)
    rows[[0, 5]] = np.nan

    def update(x, count):
        return tx.update(x, tx.init(x), examples=count)[0]

    run = jax.jit(jax.vmap(update, axis_name="data"))
    found = run(rows, counts)
    np.testing.assert_allclose(found[0], robust_mean(rows, counts, trim), atol=1e-6)
    assert not np.asarray(run(rows, np.zeros(8, np.float32))).any()
    # A number that cannot be of one worker does not end the step of all.
    counts[0] = np.nan
    np.testing.assert_allclose(run(rows, counts)[0], found[0], atol=1e-6)


@pytest.mark.slow
def test_combinators_pass_the_weights_on():
    """Of the same reducer in all places they do; a mixture with other reducers is refused, and so are pods."""
    rows, counts = drawn(6), np.array([0, 1, 0, 2, 4, 4], np.float32)
    expected = robust_mean(rows, counts)
    alike = jd.reducers.per_leaf(lambda path, leaf: 0, {0: median()})
    for reducer in (alike, jd.reducers.bucketed(median(), bucket_bytes=64), jd.reducers.with_stats(median())):
        tx = jd.all_reduce(reducer)
        found = jax.vmap(lambda x, n, tx=tx: tx.update(x, tx.init(x), examples=n)[0], axis_name="data")(rows, counts)
        np.testing.assert_allclose(found[0], expected, atol=1e-6)
    mixed = jd.all_reduce(jd.reducers.per_leaf(lambda path, leaf: 0, {0: median(), 1: jd.exact()}))
    with pytest.raises(ValueError, match="cannot weight a median"):
        jax.vmap(lambda x, n: mixed.update(x, mixed.init(x), examples=n)[0], axis_name="data")(rows, counts)
    assert Use.EXAMPLES in jd.hierarchical(inner=jd.exact(), outer=median()).limits
    assert not jd.exact().limits


def test_frozen_leaves_have_no_weights():
    policy = jd.reducers.per_leaf(lambda path, leaf: path, {"a": median(), "b": None})
    tx = jd.all_reduce(policy)
    rows, counts = drawn(6), np.array([0, 1, 0, 2, 4, 4], np.float32)

    def update(x, n):
        updates = {"a": x, "b": x}
        return tx.update(updates, tx.init(updates), examples=n)[0]

    found = jax.jit(jax.vmap(update, axis_name="data"))(rows, counts)
    np.testing.assert_allclose(found["a"][0], robust_mean(rows, counts), atol=1e-6)
    assert not np.asarray(found["b"]).any()


def test_too_few_workers_to_trim():
    tx = jd.all_reduce(trimmed_mean(2))
    with pytest.raises(ValueError, match=r"trimmed_mean\(2\) leaves out 4 values of each entry, and there are only 4"):
        jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")(drawn(4))
    with pytest.raises(ValueError, match="trim must be at least 1, got 0"):
        trimmed_mean(0)
    # A single worker keeps its updates, weighted or not.
    for counts in (None, [3]):
        np.testing.assert_allclose(reduce_rows(trimmed_mean(2), drawn(1), counts), drawn(1)[0], atol=1e-6)


@each_robust
def test_refused_where_the_mean_is_needed(name):
    reducer, _ = ROBUST[name]
    assert reducer.law == Law.NONE
    for wrap in (jd.error_feedback, jd.reducers.loco, jd.reducers.ef21):
        with pytest.raises(ValueError, match=f"error feedback around {name} would keep what the other workers"):
            wrap(reducer)
    with pytest.raises(ValueError, match="no reduce-scatter form"):
        jd.zero_redundancy(optax.sgd(0.1), reducer=reducer)


@each_robust
def test_half_precision(name):
    """Compared in float32, and so also two values in the middle whose sum float16 does not have."""
    reducer, trim = ROBUST[name]
    rows = np.float16(60000) + 32 * np.arange(6, dtype=np.float16)[:, None]
    found = reduce_rows(reducer, rows)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, robust_mean(rows, trim=trim), rtol=1e-3)


@pytest.mark.sampled(4)
@each_robust
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("workers", [7, 8])
def test_values_near_the_largest_number_do_not_overflow(name, dtype, weighted, workers):
    """The true mean is finite."""
    reducer, trim = ROBUST[name]
    large = 0.9 * float(jnp.finfo(dtype).max)
    rows = np.linspace(0.9, 1, workers)[:, None] * np.array([large, -large])
    rows = np.concatenate([rows, np.resize([large, -large], workers)[:, None]], axis=1)
    given = jnp.asarray(rows, dtype)
    found = jax.jit(lambda x: reduce_rows(reducer, x, np.ones(workers) if weighted else None))(given)
    expected = robust_mean(np.asarray(given.astype(jnp.float32), float), trim=trim)
    np.testing.assert_allclose(
        np.asarray(found, float), expected, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-6 * large
    )


@each_robust
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_a_majority_of_infinity_is_seen(name, value, weighted):
    reducer, _ = ROBUST[name]
    assert (reduce_rows(reducer, np.full((8, 3), value, np.float32), np.ones(8) if weighted else None) == value).all()
