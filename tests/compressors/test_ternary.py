import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, X, assert_mean, assert_variance, decoded, draws
from reference import blocks as reference

import jaxdist as jd
from jaxdist import compressors as jc


def test_oracles():
    found = draws(jc.terngrad(clip=None), X, 10_000)
    assert [sorted(set(column)) for column in found.T] == [[0, 12], [-12, 0], [0], [12]]
    np.testing.assert_allclose((found != 0).mean(0), [1 / 4, 1 / 3, 0, 1], atol=0.03)
    assert reference.ternary_variance(X) == 59.0
    assert_variance(found, X, 59.0)
    # Nothing is clipped here: 12 is below 2.5 · 6.5.
    np.testing.assert_array_equal(decoded(jc.terngrad(), X), decoded(jc.terngrad(clip=None), X))


@pytest.mark.parametrize(("size", "omega"), [(4, 0.5), (9, 1.0), (100, 4.5)])
def test_variance_is_attained(size, omega):
    code = jc.terngrad(clip=None)
    assert code.variance((size,)) == pytest.approx(omega, abs=1e-12)
    x = np.full(size, 1 / (1 + math.sqrt(size)))
    x[0] = 1.0
    assert reference.ternary_variance(x) / (x**2).sum() == pytest.approx(omega)
    assert_variance(draws(code, x.astype(np.float32), 4000), x, omega * (x**2).sum())


def test_clipping_is_at_multiples_of_sigma():
    x = np.random.default_rng(0).standard_cauchy(400).astype(np.float32)
    sigma = np.sqrt((x.astype(np.float64) ** 2).mean())
    clipped = np.clip(x, -2.5 * sigma, 2.5 * sigma)
    assert (clipped != x).sum() > 0
    found = draws(jc.terngrad(), x, 4000)
    assert np.abs(found).max() == pytest.approx(2.5 * sigma, rel=1e-5)
    assert_mean(found, clipped)
    noise = reference.ternary_variance(clipped.astype(np.float64))
    assert_variance(found, clipped, noise)
    energy = float((clipped.astype(np.float64) ** 2).sum())
    assert noise <= 2.5 * math.sqrt((x.astype(np.float64) ** 2).sum() * energy) - energy


@pytest.mark.parametrize("x", [np.full(50, 3.0), np.array([-2.0]), np.full((2, 3), 1e-25), np.full(9, 1e25)])
def test_equal_entries_stay(x):
    """Sigma around the mean would be zero, and a plain sum of squares vanishes or overflows at these magnitudes."""
    x = x.astype(np.float32)
    np.testing.assert_allclose(decoded(jc.terngrad(), x), x, rtol=1e-6)


def test_clipped_code_is_no_contraction_and_feedback_refuses_it():
    code, size = jc.terngrad(), 2000
    assert code.variance is None
    assert code.contraction is None
    x = np.full(size, 0.625, np.float32)
    x[0] = math.sqrt(size - (size - 1) * 0.625**2)
    errors = ((draws(code, x, 50) - x) ** 2).sum(1)
    assert errors.mean() > 1.2 * (x**2).sum()
    with pytest.raises(ValueError, match="states neither"):
        jd.error_feedback(jd.compressed(code))
    jd.error_feedback(jd.compressed(jc.terngrad(clip=None)))


def test_buckets_have_scales_of_their_own():
    x = np.repeat([1.0, 100.0], 32).astype(np.float32)
    np.testing.assert_allclose(decoded(jc.terngrad(clip=None, bucket=32), x), x, rtol=1e-6)
    payload = jax.eval_shape(jc.terngrad(bucket=32).compress, jax.ShapeDtypeStruct((64,), jnp.float32), KEY)
    assert (payload.codes.shape, payload.norms.shape) == ((16,), (2,))


@pytest.mark.parametrize(
    ("arguments", "message"), [({"clip": 0}, "got 0"), ({"clip": -1.0}, "-1"), ({"bucket": 0}, "0")]
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        jc.terngrad(**arguments)
