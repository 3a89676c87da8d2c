import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, X, assert_mean, assert_variance, decoded, draws
from reference import blocks as reference

from jaxdist.compressors import natural
from jaxdist.compressors.random import hash_words

LARGEST = np.finfo(np.float32).max


def test_oracles():
    found = draws(natural(), X, 4000)
    assert [sorted(set(column)) for column in found.T] == [[2, 4], [-4], [0], [8, 16]]
    np.testing.assert_allclose((found[:, [0, 3]] == [4, 16]).mean(0), 0.5, atol=0.04)
    assert reference.natural_variance(X) == 17.0
    assert_variance(found, X, 17.0)


def test_variance_is_attained_by_any_array_of_mantissa_a_third():
    x = (4 / 3 * 2.0 ** np.arange(-60, 60, 10) * np.resize([1, -1], 12)).astype(np.float32)
    assert natural().variance(x.shape) == 0.125
    for row in x.reshape(-1, 1):
        assert_variance(draws(natural(), row, 4000), row, 0.125 * float(row[0].astype(np.float64) ** 2))


@pytest.mark.parametrize("mantissa", [1, 2**22, 2**23 - 1])
def test_the_mantissa_is_the_probability(mantissa):
    """A comparison with a random number of up to 2^23 - 1, inclusive, would be off by one part in 2^23."""
    x = np.full(1000, mantissa | 0x3F800000, np.uint32).view(np.float32)
    random = np.asarray(hash_words(KEY, (1000,))) >> 9
    assert random.max() < 2**23
    np.testing.assert_array_equal(decoded(natural(), x), np.where(random + mantissa >= 2**23, 2.0, 1.0))


def test_right_on_average():
    x = np.random.default_rng(0).standard_cauchy(20).astype(np.float32)
    found = draws(natural(), x, 4000)
    assert_mean(found, x)
    assert_variance(found, x, reference.natural_variance(x.astype(np.float64)))


def test_every_exponent_survives():
    x = np.concatenate([2.0 ** np.arange(-126, 128), -(2.0 ** np.arange(-126, 128)), [0.0, -0.0]]).astype(np.float32)
    np.testing.assert_array_equal(decoded(natural(), x), x)


def test_the_power_of_two_that_no_float_has_is_the_largest_float():
    x = np.full(3, 3e38, np.float32)
    found = draws(natural(), x, 4000)
    assert set(found.ravel()) == {2.0**127, float(LARGEST)}
    assert_mean(found, x)
    assert_variance(found, x, reference.natural_variance(x.astype(np.float64)))


def test_special_values():
    x = np.array([LARGEST, -LARGEST, 1e-39, -1e-45, np.nan, np.inf, -np.inf], np.float32)
    found = draws(natural(), x, 200)
    np.testing.assert_array_equal(found[:, :2], np.broadcast_to([LARGEST, -LARGEST], (200, 2)))
    assert (found[:, 2:4] == 0).all()
    assert np.isnan(found[:, 4:]).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_stays_finite(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.asarray([largest, -largest, 3.0, -4.0, 0.0, float(jnp.finfo(dtype).tiny), 0.3], dtype)
    out = decoded(natural(), x)
    mantissas, _ = np.frexp(np.abs(out[out != 0]))
    assert (mantissas[2:] == 0.5).all()
    assert out[:2].tolist() == [largest, -largest]


def test_bytes():
    for size, sent in ((1, 9), (8, 9), (9, 18), (1000, 1125)):
        payload = jax.eval_shape(natural().compress, jax.ShapeDtypeStruct((size,), jnp.float32), KEY)
        assert sum(leaf.size for leaf in payload) == sent
        assert {leaf.dtype for leaf in payload} == {jnp.dtype(jnp.uint8)}
