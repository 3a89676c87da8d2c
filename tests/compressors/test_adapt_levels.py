"""Fitting levels to a distribution, against the papers' equations in float64."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import levels as reference
from scipy.stats import truncnorm

from jaxdist import compressors as jc
from jaxdist.compressors import adapt_levels
from jaxdist.compressors.adapt_levels import (
    POINTS,
    SCALES,
    Distribution,
    Mixture,
    best_multiplier,
    bucket_sums,
    coordinate_descent,
    distribution_of,
    fit_levels,
    fold,
    grid,
    loss_gradient,
    mixture_of,
    multiplier_slope,
    optimal_levels,
    quantiles,
    ratio_histogram,
    rounding_loss,
)
from jaxdist.compressors.nuqsgd import powers
from jaxdist.compressors.rounding import normalize_buckets, to_buckets


def from_primitives(*primitives):
    return Distribution(*(lambda a, c, f=f: f(c) - f(a) for f in primitives))


UNIFORM = from_primitives(lambda r: r, lambda r: r**2 / 2, lambda r: r**3 / 3)
# f(r) = 2 (1 - r)
TRIANGLE = from_primitives(lambda r: 2 * r - r**2, lambda r: r**2 - 2 * r**3 / 3, lambda r: 2 * r**3 / 3 - r**4 / 2)


def normal(mean=0.0, sigma=0.011):
    return distribution_of(Mixture(jnp.ones(1), jnp.full(1, mean), jnp.full(1, sigma)))


def scipy_normal(mean, sigma):
    return truncnorm((-1 - mean) / sigma, (1 - mean) / sigma, loc=mean, scale=sigma)


@jax.jit
def integrals_of(mean, sigma, a, c):
    """Mass, first and second moment of a normal distribution between two magnitudes."""
    return [integral(a, c) for integral in normal(mean, sigma)]


@partial(jax.jit, static_argnums=1)
def fitted(mixture, count):
    distribution = distribution_of(mixture)
    levels = fit_levels(distribution, count)
    return levels, rounding_loss(levels, distribution), loss_gradient(levels, distribution)


# Distributions


@pytest.mark.parametrize(("mean", "sigma"), [(0.002, 0.05), (-0.3, 0.4), (0.0, 0.011)])
def test_integrals_keep_their_digits_in_the_tails(mean, sigma):
    wanted = scipy_normal(mean, sigma)
    ends = mean + sigma * np.array([-9, -5, -1, -0.1, 0.5, 3, 6, 9])
    ends = np.clip(ends, -1, 1)
    for a, c in itertools.pairwise(ends):
        if c > a:
            mass = wanted.sf(a) - wanted.sf(c) if a > mean else wanted.cdf(c) - wanted.cdf(a)
            found = [float(x) for x in integrals_of(np.float32(mean), np.float32(sigma), np.float32(a), np.float32(c))]
            assert found[0] == pytest.approx(mass, rel=3e-4)
            points = a + (c - a) * (np.arange(4000) + 0.5) / 4000
            density = wanted.pdf(points) * (c - a) / 4000
            for power in (1, 2):
                scale = (np.abs(points) ** power * density).sum()
                assert abs(found[power] - (points**power * density).sum()) <= 2e-3 * scale


def test_the_mean_over_an_interval():
    assert float(normal(0.002, 0.05).first(jnp.float32(0.01), jnp.float32(0.08))) == pytest.approx(0.0145396745)


def test_magnitudes():
    distribution, ends = normal(0.1, 0.3), (jnp.float32(0.2), jnp.float32(0.7))
    sample = np.clip(scipy_normal(0.1, 0.3).rvs(200_000, random_state=0), -1, 1)
    inside = np.abs(sample)[(np.abs(sample) > 0.2) & (np.abs(sample) < 0.7)]
    for power, integral in enumerate(fold(distribution)):
        assert float(integral(*ends)) == pytest.approx((inside**power).sum() / 200_000, rel=0.01)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("power", [0, 2])
def test_sums_are_those_of_the_blocks(norm, power):
    x = np.random.default_rng(0).standard_normal(230).astype(np.float32)
    x[20:40] *= 1e-3
    x[50:100] = 0
    wanted = np.zeros((SCALES, 3))
    for row in (x[start : start + 50].astype(np.float64) for start in range(0, 230, 50)):
        scale = np.abs(row).max() if norm == "max" else np.linalg.norm(row)
        for block in (row[start : start + 20] / (scale or 1) for start in range(0, len(row), 20)):
            root = (block**2).mean() ** 0.5
            component = min(int(-np.log2(root)), SCALES - 1) if root else SCALES - 1
            wanted[component] += (scale > 0) * scale**power * np.array([len(block), block.sum(), (block**2).sum()])
    found = jax.jit(lambda x: bucket_sums(x, bucket=50, norm=norm, norm_power=power, block=20))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    mixture = jax.jit(mixture_of)(found)
    assert float(mixture.weight.sum()) == pytest.approx(1)
    used = wanted[:, 0] > 0
    np.testing.assert_allclose(mixture.mean[used], wanted[used, 1] / wanted[used, 0], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_whole_buckets_tell_nothing_with_the_euclidean_norm():
    """The squares of its ratios add up to 1, whatever their distribution; blocks have scales of their own."""
    rng = np.random.default_rng(0)
    scales = np.repeat([1.0, 0.1, 0.01, 0.03], 250)
    for x in (rng.standard_normal((4, 1000)), rng.standard_cauchy((4, 1000)), rng.random((4, 1000)) * scales):
        sums = [
            bucket_sums(jnp.asarray(x, jnp.float32), bucket=1000, norm="l2", norm_power=2, block=block)
            for block in (1000, 50)
        ]
        whole = mixture_of(sums[0])
        only = np.argmax(whole.weight)
        assert float(whole.weight[only]) == pytest.approx(1)
        assert float(whole.sigma[only] ** 2 + whole.mean[only] ** 2) == pytest.approx(1 / 1000, rel=1e-4)
    assert (np.asarray(sums[1])[:, 0] > 0).sum() >= 3


# Descents


def test_the_papers_small_cases():
    start = jnp.array([0, 0.1, 0.2, 1.0])
    for sweeps, wanted in ((1, [0.1, 0.55]), (2, [0.275, 0.6375]), (30, [1 / 3, 2 / 3])):
        found = jax.jit(partial(coordinate_descent, distribution=UNIFORM, sweeps=sweeps))(start)
        np.testing.assert_allclose(found[1:-1], wanted, atol=1e-6)
    slopes_at = jax.jit(lambda levels: loss_gradient(levels, UNIFORM))
    by_gradients = reference.gradient_descent(start, lambda levels: slopes_at(jnp.asarray(levels)))
    np.testing.assert_allclose(by_gradients[1:-1], [1 / 3, 2 / 3], atol=1e-5)
    best = jax.jit(partial(coordinate_descent, distribution=TRIANGLE, sweeps=1))(jnp.array([0, 0.5, 1.0]))
    assert float(best[1]) == pytest.approx(1 - (1 / 3) ** 0.5, abs=1e-6)
    assert float(rounding_loss(best, TRIANGLE)) == pytest.approx(0.0383666, abs=1e-6)
    assert float(rounding_loss(jnp.array([0, 0.5, 1.0]), TRIANGLE)) == pytest.approx(0.0416667, abs=1e-6)
    assert float(loss_gradient(jnp.array([0, 0.5, 1.0]), TRIANGLE)[0]) == pytest.approx(0.0833333, abs=1e-6)


@jax.jit
def descended(start, mean, sigma):
    return coordinate_descent(start, normal(mean, sigma), sweeps=20)


@pytest.mark.parametrize(("mean", "sigma"), [(0.02, 0.3), (0.0, 0.05)])
def test_coordinate_descent_is_the_closed_form_of_the_paper(mean, sigma):
    start = np.linspace(-1, 1, 8)
    found = descended(jnp.asarray(start, jnp.float32), np.float32(mean), np.float32(sigma))
    np.testing.assert_allclose(found, reference.coordinate_descent(start, mean, sigma, 20), atol=2e-5)


def test_the_loss_never_rises_and_levels_stay_in_order():
    distribution = normal(0.001, 0.02)

    @jax.jit
    def sweep(levels):
        new = coordinate_descent(levels, distribution, sweeps=1)
        return new, rounding_loss(new, distribution)

    levels = jnp.asarray(powers(8, 0.5), jnp.float32)
    losses = [float(rounding_loss(levels, distribution))]
    for _ in range(12):
        levels, loss = sweep(levels)
        losses.append(float(loss))
        assert (np.diff(levels) > 0).all()
    assert (np.diff(losses) <= 1e-6 * losses[0]).all()
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "sigma"), [(4, 0.011), (8, 0.011), (8, 0.3), (8, 1e-3)])
def test_no_gradient_is_left(count, sigma):
    """Four levels and σ = 0.011: a curvature of 40, where gradient descent with a fixed rate goes back and forth."""
    mixture = Mixture(jnp.array([0.75, 0.25]), jnp.array([0.0, sigma / 4]), jnp.full(2, sigma))
    levels, loss, slopes = fitted(mixture, count)
    assert np.abs(slopes).max() < 3e-6
    distribution = distribution_of(mixture)
    slopes_at = jax.jit(lambda levels: loss_gradient(levels, distribution))
    other = jnp.asarray(reference.gradient_descent(levels + 1e-3 * np.sin(np.pi * levels), slopes_at), jnp.float32)
    np.testing.assert_allclose(levels, other, atol=1e-4)
    assert float(rounding_loss(other, distribution)) == pytest.approx(float(loss), rel=1e-3)


@pytest.mark.parametrize(("mean", "sigma"), [(0.0, 1e-6), (0.9, 1e-6), (0.5, 1e-3), (0.0, 30.0)])
def test_far_and_narrow_distributions_do_not_break_the_solver(mean, sigma):
    levels, loss, _ = fitted(Mixture(jnp.ones(1), jnp.full(1, mean), jnp.full(1, sigma)), 8)
    assert np.isfinite(np.asarray(levels)).all()
    assert (np.diff(levels) > 0).all()
    assert np.isfinite(float(loss))


@pytest.mark.slow
@pytest.mark.parametrize("lowest", [-1.0, 0.0])
def test_adapted_levels_beat_their_starts_on_a_sample(lowest):
    distribution = normal(0.0, 0.02)
    distribution = fold(distribution) if lowest == 0 else distribution
    count = 8
    levels = jax.jit(lambda: fit_levels(distribution, count, lowest=lowest))()
    uniform = jnp.linspace(lowest, 1, count)
    x = np.append(0.02 * np.random.default_rng(3).standard_normal(4095), 1).astype(np.float32)

    def variance(table):
        return float(jc.expected_variance(jnp.asarray(x), table, norm="max", zero_level=lowest == 0))

    starts = [uniform, quantiles(distribution, uniform), jnp.asarray(powers(count, 0.5, lowest=lowest), jnp.float32)]
    assert all(variance(levels) < variance(start) for start in starts)
    assert variance(levels) == pytest.approx(4095 * float(rounding_loss(levels, distribution)), rel=0.1)


# One multiplier


def test_the_slope_of_the_multiplier():
    """The positive half of a normal distribution with mean 0.002 and σ = 0.05."""
    half = Distribution(*(lambda a, c, f=f: f(jnp.maximum(a, 0), jnp.maximum(c, 0)) for f in normal(0.002, 0.05)))
    for p, wanted in ((0.3, 5.343e-4), (0.5, 0.0949857), (0.7, 0.5202978)):
        assert float(multiplier_slope(jnp.float32(p), half, 8)) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_multiplier_is_the_best_of_all(count):
    distribution = normal(0.001, 0.011)
    trials = jnp.geomspace(0.001, 0.99, 3000)
    losses = jax.jit(jax.vmap(lambda p: rounding_loss(powers(count, p), distribution)))(trials)
    found = jax.jit(lambda: best_multiplier(distribution, count))()
    assert float(found) == pytest.approx(float(trials[jnp.argmin(losses)]), rel=0.01)


# The exact solver


def test_choosing_from_four_points():
    levels, loss = optimal_levels(jnp.array([0.0, 1.0, 2.0, 10.0]), jnp.ones(4), 3)
    assert (levels.tolist(), float(loss)) == ([0, 2, 10], 1)
    wanted, least = reference.optimal_levels([0, 1, 2, 10], np.ones(4), 3)
    assert (wanted.tolist(), least) == ([0, 2, 10], 1)


@pytest.mark.parametrize("count", [2, 3, 8, 20])
def test_the_dynamic_programme_is_exact(count):
    rng = np.random.default_rng(count)
    points, weights = np.sort(rng.standard_cauchy(20)), rng.random(20)
    wanted, least = reference.optimal_levels(points, weights, count)
    levels, loss = optimal_levels(jnp.asarray(points, jnp.float32), jnp.asarray(weights, jnp.float32), count)
    np.testing.assert_allclose(levels, wanted, rtol=1e-6)
    assert float(loss) == pytest.approx(least, rel=1e-4, abs=1e-5)


def test_the_number_of_levels_is_checked():
    for count in (1, 5):
        with pytest.raises(ValueError, match=f"the number of points, 4, got {count}"):
            optimal_levels(jnp.arange(4.0), jnp.ones(4), count)


@pytest.mark.slow
@pytest.mark.parametrize("magnitudes", [False, True])
def test_the_histogram_ranks_tables_as_the_entries_do(magnitudes):
    x = np.random.default_rng(0).standard_t(3, 1500).astype(np.float32)
    x[600:900] = 0
    weights = ratio_histogram(jnp.asarray(x), bucket=300, norm="l2", norm_power=2, magnitudes=magnitudes)
    points = np.asarray(grid(300, magnitudes=magnitudes), np.float64)
    assert (points[0], points[-1]) == (0 if magnitudes else -1, 1)
    assert (np.diff(points) > 0).all()
    assert float(weights.sum()) == pytest.approx(300 * (x.astype(np.float64) ** 2).sum(), rel=1e-5)

    def losses(table):
        entries = float(jc.expected_variance(jnp.asarray(x), table, bucket=300, zero_level=magnitudes))
        below = np.clip(np.searchsorted(table, points, side="right") - 1, 0, len(table) - 2)
        return entries, float(weights @ ((table[below + 1] - points) * (points - table[below])))

    rng = np.random.default_rng(1)
    tables = [
        points[np.sort(np.append(rng.choice(np.arange(1, POINTS - 1), 6, False), [0, POINTS - 1]))] for _ in range(4)
    ]
    entries, histogram = np.array([losses(table) for table in tables]).T
    np.testing.assert_allclose(np.diff(entries), np.diff(histogram), rtol=1e-3)
    best = np.asarray(optimal_levels(jnp.asarray(points, jnp.float32), weights, 8)[0])
    assert losses(best)[0] < entries.min()


@pytest.mark.slow
def test_what_adapting_is_for():
    """At 3 bits: layers of different scales in one bucket."""
    scales = np.repeat([1.0, 0.1, 0.01, 0.03], 2048)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(8192) * scales, jnp.float32)

    def error(levels, norm="l2"):
        return float(jc.expected_variance(x, levels, norm=norm, zero_level=False) / jnp.sum(x * x))

    def exact(norm):
        return error(optimal_levels(grid(8192), ratio_histogram(x, bucket=8192, norm=norm, norm_power=2), 8)[0], norm)

    def mixture(block):
        return mixture_of(bucket_sums(x, bucket=8192, norm="l2", norm_power=2, block=block))

    paper, blocks = (error(fitted(mixture(block), 8)[0]) for block in (8192, 64))
    p = jax.jit(lambda mixture: best_multiplier(distribution_of(mixture), 8))(mixture(64))
    powers_of_half, uniform = error(jnp.asarray(powers(8, 0.5))), error(jnp.linspace(-1, 1, 8), "max")
    assert exact("l2") < 1.005 * blocks < 0.7 * error(powers(8, p)) < 0.1 * powers_of_half
    assert blocks < 0.5 * paper
    assert exact("max") < 0.7 * min(exact("l2"), uniform)


@pytest.mark.parametrize("magnitudes", [False, True])
def test_the_histogram_of_tpus_is_that_of_the_others(magnitudes):
    """By comparison with all points, where a scatter looks for the two of an entry."""
    x = np.random.default_rng(0).standard_t(3, 700).astype(np.float32)
    lowest = 0.0 if magnitudes else -1.0

    @jax.jit
    def both(x):
        ratios, _ = normalize_buckets(x, 512, "max")
        ratios, points = jnp.abs(ratios) if magnitudes else ratios, grid(512, magnitudes=magnitudes)
        real = to_buckets(jnp.ones(x.shape), 512)
        counts = adapt_levels._count_by_scatter(ratios, real, points, stretch=adapt_levels._stretch(512), lowest=lowest)
        return counts, adapt_levels._count_by_comparison(ratios, real, points)

    scattered, compared = both(x)
    assert compared.shape == (2, POINTS)
    np.testing.assert_allclose(compared, scattered, atol=1e-5)
    np.testing.assert_allclose(compared.sum(1), [512, 188], rtol=1e-6)
