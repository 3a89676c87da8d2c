import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.compressors.rows import largest_magnitude, total


@pytest.mark.parametrize("shape", [(0, 1), (3, 1), (2, 8), (2, 9), (3, 64), (2, 320), (1, 1024)])
def test_rows_are_those_of_numpy(shape):
    rows = np.random.default_rng(0).standard_cauchy(shape).astype(np.float32)
    rows[:, :1] *= -1
    largest, sums = jax.jit(lambda x: (largest_magnitude(x), total(x)))(rows)
    np.testing.assert_array_equal(largest, np.abs(rows).max(1, keepdims=True))
    np.testing.assert_allclose(sums, rows.astype(np.float64).sum(1, keepdims=True), rtol=1e-5, atol=1e-4)


def test_rows_keep_what_is_not_finite_to_themselves():
    rows = np.ones((4, 64), np.float32)
    rows[0, 5], rows[1, 6], rows[2, 7] = np.nan, -np.inf, -0.0
    rows[0, 6] = np.inf
    largest = np.asarray(jax.jit(largest_magnitude)(rows))[:, 0]
    np.testing.assert_array_equal(largest, [np.nan, np.inf, 1.0, 1.0])
    np.testing.assert_array_equal(np.asarray(jax.jit(total)(rows))[:, 0], [np.nan, -np.inf, 63.0, 64.0])
    assert not np.signbit(jax.jit(largest_magnitude)(jnp.full((1, 16), -0.0))).any()


def test_rows_inside_vmap():
    rows = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    largest, sums = jax.jit(jax.vmap(lambda x: (largest_magnitude(x), total(x))))(rows)
    np.testing.assert_array_equal(largest, np.abs(rows).max(2, keepdims=True))
    np.testing.assert_allclose(sums, rows.sum(2, keepdims=True), atol=1e-5)
