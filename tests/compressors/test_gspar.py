"""Unbiased sparsification: probabilities, and a draw of exactly so many entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference.sparse import greedy_rounds
from reference.sparse import water_filling as filled

from jaxdist import compressors as jc
from jaxdist.compressors.gspar import (
    SPARE,
    _draw,
    _keep_probabilities,
    _to_units,
    newton_rate,
    probabilities,
    relative_magnitudes,
)

G = jnp.array([4.0, -3.0, 2.0, 1.0, 0.0])
closed = jax.jit(jc.closed_form_probabilities, static_argnums=1)
keep = jax.jit(lambda x, count: _keep_probabilities(relative_magnitudes(x), count), static_argnums=1)


def second_moment(x, p):
    x, p = np.asarray(x, np.float64), np.asarray(p, np.float64)
    return (x[x != 0] ** 2 / p[x != 0]).sum()


def student(size, seed=0):
    return np.random.default_rng(seed).standard_t(1.5, size).astype(np.float32)


def decoded(code, x):
    return jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)


# Probabilities


@pytest.mark.parametrize(
    ("variance", "expected", "moment"),
    [
        (0.1, [1, 1, 0.75, 0.375, 0], 33.0),
        (0.25, [1, 0.837209, 0.558140, 0.279070, 0], 37.5),
        (0.5, [8 / 9, 2 / 3, 4 / 9, 2 / 9, 0], 45.0),
        (1, [2 / 3, 1 / 2, 1 / 3, 1 / 6, 0], 60.0),
    ],
)
def test_closed_form_oracles(variance, expected, moment):
    p = closed(G, variance)
    np.testing.assert_allclose(p, expected, atol=1e-6)
    assert second_moment(G, p) == pytest.approx(moment, rel=1e-6)


@pytest.mark.parametrize(
    ("rounds", "expected", "moment"),
    [(0, [1, 0.9, 0.6, 0.3, 0], 36.0), (1, [1, 1, 2 / 3, 1 / 3, 0], 34.0), (2, [1, 1, 2 / 3, 1 / 3, 0], 34.0)],
)
def test_greedy_oracles(rounds, expected, moment):
    p = greedy_rounds(G, 0.6, rounds)
    np.testing.assert_allclose(p, expected, atol=1e-12)
    assert second_moment(G, p) == pytest.approx(moment)
    np.testing.assert_allclose(filled(G, 3), [1, 1, 2 / 3, 1 / 3, 0], atol=1e-6)


def test_a_step_of_newton_is_a_round_of_the_greedy_algorithm():
    x = student(10_000)
    magnitudes, rate = relative_magnitudes(jnp.asarray(x)), jnp.zeros(())
    step = jax.jit(lambda rate: newton_rate(magnitudes, rate, 1000.0))
    for rounds in range(8):
        rate = step(rate)
        np.testing.assert_allclose(probabilities(magnitudes, rate), greedy_rounds(x, 0.1, rounds), rtol=1e-4)


def test_enough_rounds_are_the_minimal_variance():
    x = student(10_000)
    np.testing.assert_allclose(keep(x, 1000), filled(x, 1000), rtol=3 * SPARE, atol=1e-7)
    np.testing.assert_allclose(greedy_rounds(x, 0.1, 20), filled(x, 1000), rtol=1e-6)


def test_the_budget_of_the_variance_is_spent():
    for x in (student(1000), np.random.default_rng(1).standard_normal(1000).astype(np.float32)):
        for variance in (0.01, 0.3, 2.0):
            p = closed(x, variance)
            assert second_moment(x, p) == pytest.approx((1 + variance) * (x.astype(np.float64) ** 2).sum(), rel=1e-5)
            # No other probabilities that meet it are fewer in sum.
            assert p.sum() <= 1000 / (1 + variance) + 1e-3
            for count in (10.0, 100.0, 500.0):
                other = filled(x, count)
                if second_moment(x, other) <= second_moment(x, p):
                    assert p.sum() <= other.sum() + 1e-3


def test_probabilities_depend_on_relative_magnitudes_only():
    x, order = student(500), np.random.default_rng(0).permutation(500)
    for f in (lambda x: closed(x, 0.5), lambda x: filled(x, 50), lambda x: keep(x, 50)):
        p = np.asarray(f(x))
        assert (np.diff(p[np.argsort(np.abs(x))]) >= 0).all()
        np.testing.assert_allclose(f(x * np.float32(2.0**40)), p, rtol=1e-6)
        np.testing.assert_allclose(f(-x), p, rtol=1e-6)
        np.testing.assert_allclose(f(x[order]), p[order], rtol=1e-4)


def test_approximately_sparse_arrays_need_few():
    x = np.concatenate([np.full(10, 5.0), np.full(990, 0.0101)]).astype(np.float32)
    assert float(closed(x, 0.2).sum()) == pytest.approx(11.995, abs=1e-2)


def test_zeros_and_enough_room():
    zeros = np.zeros(5, np.float32)
    for p in (closed(zeros, 0.5), filled(zeros, 2), keep(zeros, 2)):
        assert p.tolist() == [0.0] * 5
    for p in (filled(G, 4), filled(G, 5), keep(G, 4)):
        np.testing.assert_allclose(p, [1, 1, 1, 1, 0], atol=1e-6)


def test_expected_bits():
    p = jnp.array([1.0, 1.0, 0.5, 0.25, 0, 0, 0, 0])
    assert float(jc.expected_bits(p)) == 2 * 35 + 4 * 0.75 + 32
    many = jnp.full(1024, 0.5)
    assert float(jc.expected_bits(many, value_bits=16)) == 2 * 1024 + 16


# The draw


def draws(x, count, number):
    """Chances and, for so many offsets, what was chosen."""
    units, certain = _to_units(_keep_probabilities(relative_magnitudes(jnp.asarray(x)), count))
    offsets = np.random.default_rng(0).integers(0, 2**32, number, dtype=np.uint32)
    where, chosen = jax.jit(jax.vmap(lambda offset: _draw(units, certain, offset, count)))(offsets)
    chances = np.where(certain, 1.0, np.asarray(units, np.float64) * 2.0**-31)
    return chances, np.asarray(where), np.asarray(chosen)


@pytest.mark.slow
def test_every_entry_is_kept_as_often_as_its_probability_says():
    x = student(300)
    chances, where, chosen = draws(x, 30, 40_000)
    np.testing.assert_allclose(chances, filled(x, 30), rtol=3 * SPARE, atol=1e-7)
    assert (np.diff(where) > 0).all()
    assert ((chosen.sum(1) == 30) | (chosen.sum(1) == 29)).all()
    frequency = np.bincount(where[chosen], minlength=300) / 40_000
    assert (np.abs(frequency - chances) <= 5 * np.sqrt(chances * (1 - chances) / 40_000) + 1e-9).all()


@pytest.mark.slow
def test_the_variance_is_what_the_probabilities_say():
    x, code = student(200), jc.gspar(0.1)
    keys = jax.random.split(jax.random.key(0), 20_000)
    out = np.asarray(jax.jit(jax.vmap(lambda key: code.decompress(code.compress(jnp.asarray(x), key), x)))(keys))
    chances, _, _ = draws(x, 20, 1)
    wide = x.astype(np.float64)
    deviation = np.abs(wide) * np.sqrt(1 / chances - 1)
    assert (np.abs(out.mean(0, dtype=np.float64) - wide) <= 5 * deviation / np.sqrt(20_000) + 1e-5 * np.abs(wide)).all()
    errors = ((out - wide) ** 2).sum(1)
    expected = (wide**2 * (1 / chances - 1)).sum()
    assert abs(errors.mean() - expected) <= 5 * errors.std() / np.sqrt(20_000) + 1e-6
    uniform = (wide**2).sum() * (200 / 20 - 1)
    assert errors.mean() < uniform / 5


@pytest.mark.slow
def test_omega_is_attained_by_equal_magnitudes():
    for code, count in ((jc.gspar(0.1), 20), (jc.gspar(variance=3.0), 50)):
        omega = code.variance((200,))
        assert omega == pytest.approx(200 / count - 1, rel=3e-4)
        chances, _, _ = draws(np.ones(200, np.float32), count, 1)
        assert (1 / chances - 1).mean() == pytest.approx(omega, rel=3e-4)
        assert (1 / chances - 1).mean() <= omega
    assert jc.gspar(1.0).variance((10,)) == 0.0


def test_what_fits_is_sent_as_it_is():
    x = np.zeros(100, np.float32)
    x[[3, 50, 98]] = [1.0, -2e-15, 5e20]
    np.testing.assert_array_equal(decoded(jc.gspar(0.03), x), x)


def test_one_entry_that_is_not_finite_is_seen():
    x = student(100)
    for bad in (np.nan, np.inf):
        x[77] = bad
        assert not np.isfinite(decoded(jc.gspar(0.1), x)).all()


@pytest.mark.parametrize("arguments", [{}, {"density": 0.1, "variance": 1.0}, {"density": 0.0}, {"variance": 0.0}])
def test_arguments_are_checked(arguments):
    with pytest.raises(ValueError, match="got"):
        jc.gspar(**arguments)


def test_the_budget_is_checked():
    with pytest.raises(ValueError, match="must be positive, got"):
        jc.closed_form_probabilities(G, 0.0)
