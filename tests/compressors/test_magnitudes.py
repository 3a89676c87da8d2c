"""Finite entries as large and as small as float32 has them; `test_laws.py` has the law for every code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, decoded, draws, relative_error

from jaxdist import compressors as jc
from jaxdist.compressors.rounding import from_unit, powers_below, to_unit

HUGE, LARGEST, TINY = np.float32(3e38), np.finfo(np.float32).max, 2.0**-126
MIXED = np.array([3e38, -3e38, 1, 0], np.float32)


def as_constant(code, x):
    """What a program that knows x decodes."""
    return np.asarray(jax.jit(lambda key: code.decompress(code.compress(jnp.asarray(x), key), x))(KEY), np.float64)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("decode", [decoded, as_constant])
@pytest.mark.parametrize("x", [np.full(8, HUGE), np.full(2**20, 1e33, np.float32), np.full(8, 2e-38, np.float32)])
@pytest.mark.parametrize("make", [jc.scaled_sign, jc.one_bit, jc.terngrad, jc.min_max_uint8, jc.int8])
def test_equal_entries_stay_equal(make, x, decode):
    np.testing.assert_allclose(decode(make(), x), x, rtol=1e-5, atol=TINY)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("size", [1e20, 8.5e37, 3e38, 1e-25])
def test_rounding_at_random_knows_no_magnitudes(norm, size):
    """Also of an array in two buckets, of which XLA knows the magnitude."""
    x = (np.where(np.arange(600) % 2, 1, -1) * np.float32(size)).astype(np.float32)
    for code in (jc.qsgd(4, norm=norm), jc.nuqsgd(4, norm=norm, bucket=512)):
        for found in (decoded(code, x), as_constant(code, x)):
            assert relative_error(found, x) <= 2 * code.variance(x.shape) + 1e-9
            assert (np.sign(found) * np.sign(x) >= 0).all()


def test_a_constant_in_the_bucket_of_the_paper():
    x = (np.where(np.arange(10_000) % 2, 1, -1) * np.float32(1e20)).astype(np.float32)
    code = jc.nuqsgd(4, norm="l2")
    assert relative_error(as_constant(code, x), x) <= 2 * code.variance(x.shape)


@pytest.mark.parametrize(
    "x", [np.full(8, HUGE), np.full(8, LARGEST), np.full(300, -HUGE), np.full(64, 3e-38, np.float32)]
)
def test_drive_scales_last(x):
    found = draws(jc.drive(), x, 200)
    assert np.isfinite(found).all()
    assert ((found - x.astype(np.float64)) ** 2).sum(1).mean() <= 0.5 * (x.astype(np.float64) ** 2).sum()


def test_min_max_has_255_steps_at_any_magnitude():
    spans = [MIXED, *(np.linspace(-1, 1, 99, dtype=np.float32) * size for size in (1e-36, 1.0, HUGE))]
    for x in spans:
        step = float(x.max()) / 255 - float(x.min()) / 255
        for found in (decoded(jc.min_max_uint8(), x), as_constant(jc.min_max_uint8(), x)):
            assert np.abs(found - x).max() <= 0.5001 * step + TINY


def test_dynamic_fp8_has_every_exponent():
    exponents = np.arange(-126, 128, dtype=np.int32)
    x = np.ldexp(np.float32(1.9375), exponents).astype(np.float32)[:, None] * np.array([1, 0.5], np.float32)
    for signed in (x, x * np.array([1, -1], np.float32)):
        np.testing.assert_array_equal(decoded(jc.dynamic_fp8(block=2), signed)[1:], signed[1:])
    full = decoded(jc.dynamic_fp8(), np.array([1e38, -1e38, LARGEST, 1], np.float32))
    np.testing.assert_allclose(full[:3], [1e38, -1e38, LARGEST], rtol=1 / 16)
    assert np.isnan(decoded(jc.dynamic_fp8(block=2), np.array([-np.inf, 1, 2, 3]))).tolist() == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: jc.random_k(0.25, unbiased=True), lambda: jc.gspar(0.25)])
def test_what_is_divided_by_its_chance_is_at_most_the_largest_number(make):
    for dtype, size in ((jnp.float32, 1e38), (jnp.float32, 3e37), (jnp.float16, 40_000.0)):
        x = np.full(64, size, dtype)
        most = min(4.01 * size, float(jnp.finfo(dtype).max))
        found = draws(make(), x, 20)
        assert found.min() == 0
        assert found.max() == pytest.approx(most, rel=0.01)


def test_infinity_is_not_a_large_number():
    x = np.array([np.inf, 1, -np.inf, 1], np.float32)
    for code in (jc.random_k(1.0, unbiased=True), jc.scaled(jc.random_k(1.0, unbiased=True)), jc.cast(jnp.float16)):
        np.testing.assert_array_equal(decoded(code, x), x)


@pytest.mark.parametrize("make", [jc.mxfp8, jc.mxfp4])
def test_shared_powers_reach_the_largest_entries(make):
    """The scale that cuts nothing off may be above what the largest number needs."""
    x = np.full(64, HUGE)
    found = draws(make(rounding="stochastic"), x, 2000)
    errors = found - x.astype(np.float64)
    assert (errors.mean(0) ** 2).sum() <= 16 * (errors**2).sum(1).mean() / 2000


@pytest.mark.parametrize("largest", [0.0, 1e-40, TINY, 1.5, 3e38, LARGEST, np.inf, np.nan])
def test_rows_brought_close_to_one(largest):
    rows = np.array([[largest, -largest / 4, 0.0]], np.float32)
    scaled = jax.jit(to_unit)(rows)
    units = np.asarray(powers_below(jnp.float32(largest)))
    np.testing.assert_array_equal(units, [units[0], 1 / units[0]])
    if TINY <= largest <= LARGEST:
        assert 1 <= scaled.largest[0, 0] < 4
        np.testing.assert_array_equal(jax.jit(from_unit)(scaled.rows, scaled.unit)[0, 0], rows[0, 0])
    assert np.isnan(np.asarray(scaled.rows)[0, 0]) == np.isnan(largest)
    assert np.isinf(np.asarray(scaled.rows)[0, 0]) == np.isinf(largest)
