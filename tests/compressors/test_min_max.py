import jax
import numpy as np
import pytest
from codes import KEY, decoded, relative_error
from reference import blocks as reference

from jaxdist.compressors import min_max_uint8


def test_oracle():
    x = np.array([-1.0, 0.0, 0.25, 1.0], np.float32)
    payload = jax.jit(min_max_uint8().compress)(x, KEY)
    assert payload.codes.tolist() == [1, 128, 160, 255]
    assert payload.ends.tolist() == [-1, 1]
    np.testing.assert_allclose(decoded(min_max_uint8(), x), [-0.996078, 0, 0.25098, 0.996078], atol=2e-6)
    codes, values = reference.min_max(x.astype(np.float64))
    assert codes.tolist() == [1, 128, 160, 255]
    np.testing.assert_allclose(values, [-0.996078, 0, 0.25098, 0.996078], atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 5.0, -40.0])
def test_values_are_the_reference(offset):
    x = (np.random.default_rng(0).standard_normal(1000) + offset).astype(np.float32)
    out = decoded(min_max_uint8(), x)
    _, expected = reference.min_max(x.astype(np.float64))
    step = (x.max() - x.min()) / 255
    # The width of the steps differs by a millionth: an entry halfway between two may go either way.
    assert (np.abs(out - expected) > 0.01 * step).mean() < 0.01
    assert np.abs(out - x).max() <= step / 2 * (1 + 1e-3)


@pytest.mark.parametrize("factor", [1e-30, 1e-9, 1e30])
def test_digits_are_kept_at_any_magnitude(factor):
    x = (factor * np.random.default_rng(0).standard_normal(300)).astype(np.float32)
    assert relative_error(decoded(min_max_uint8(), x) / factor, x / factor) < 2e-4


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-20, 1e20, 0.1])
def test_equal_entries_stay(value):
    x = np.full(9, value, np.float32)
    np.testing.assert_allclose(decoded(min_max_uint8(), x), x, rtol=1e-6)


def test_contraction_is_attained():
    for size in (3, 1000):
        x = np.full(size, 0.499999, np.float32)
        x[:2] = 127.5, -127.5
        allowed = 1 - min_max_uint8().contraction((size,))
        assert allowed * (1 - 1e-3) <= relative_error(decoded(min_max_uint8(), x), x) <= allowed


def test_nonfinite_arrays_stay_visible():
    for wrong in (np.nan, np.inf, -np.inf):
        assert not np.isfinite(decoded(min_max_uint8(), np.array([1.0, wrong, 2.0], np.float32))).all()
