import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from codes import KEY, assert_mean
from reference import blocks as reference

from jaxdist.compressors import block_floats
from jaxdist.compressors.block_floats import E2M1, E3M0, E4M3, E5M2, magnitudes

encode = jax.jit(block_floats.encode, static_argnums=(1, 2))
decode = jax.jit(block_floats.decode, static_argnums=1)

FORMS = {
    "e4m3": (E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (E5M2, ml_dtypes.float8_e5m2),
    "e2m1": (E2M1, ml_dtypes.float4_e2m1fn),
}
each_form = pytest.mark.parametrize("name", FORMS)


def codes_of(form):
    """All codes of finite numbers."""
    codes = np.arange(form.largest_code + 1)
    return np.concatenate([codes, codes + 2 ** (form.bits - 1)]).astype(np.uint8)


@pytest.mark.sampled(3)
@each_form
def test_codes_are_the_bits_of_the_format(name):
    form, dtype = FORMS[name]
    codes = codes_of(form)
    values = np.asarray(decode(jnp.asarray(codes), form))
    np.testing.assert_array_equal(values, codes.view(dtype).astype(np.float32))
    np.testing.assert_array_equal(magnitudes(form), reference.GRIDS[name])
    assert magnitudes(form)[-1] == float(ml_dtypes.finfo(dtype).max) == values.max()
    assert 2.0**form.emax <= values.max() < 2.0 ** (form.emax + 1)
    back = np.asarray(encode(jnp.asarray(values), form, "nearest", KEY))
    np.testing.assert_array_equal(back, np.where(values == 0, 0, codes))


@pytest.mark.sampled(3)
@each_form
def test_nearest_is_the_cast_of_the_format(name):
    form, dtype = FORMS[name]
    grid = magnitudes(form)
    rng = np.random.default_rng(0)
    spread = np.exp(rng.uniform(np.log(grid[1] / 8), np.log(grid[-1]), 2000)) * rng.choice([-1, 1], 2000)
    halfway = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([spread, grid, halfway, -halfway, [0.0]]).astype(np.float32)
    found = decode(encode(jnp.asarray(x), form, "nearest", KEY), form)
    np.testing.assert_array_equal(found, x.astype(dtype).astype(np.float32) + 0.0)
    np.testing.assert_array_equal(found, reference.nearest(x.astype(np.float64), grid))


@each_form
def test_at_random_is_one_of_both_neighbors_and_right_on_average(name):
    form, _ = FORMS[name]
    grid = magnitudes(form)
    part = np.random.default_rng(0).random(len(grid) - 1)
    x = (grid[:-1] + part * (grid[1:] - grid[:-1])).astype(np.float32)
    round_trip = jax.jit(jax.vmap(lambda key: decode(encode(jnp.asarray(x), form, "stochastic", key), form)))
    found = np.asarray(round_trip(jax.random.split(KEY, 2000)), np.float64)
    assert ((found == grid[:-1]) | (found == grid[1:])).all()
    assert_mean(found, x)


@each_form
def test_everything_else_saturates_inside_its_bits(name):
    form, _ = FORMS[name]
    x = jnp.array([1e30, -1e30, jnp.inf, -jnp.inf, jnp.nan, -jnp.nan, 1e-40, -1e-45])
    for rounding in ("nearest", "stochastic"):
        codes = np.asarray(encode(x, form, rounding, KEY))
        assert (codes < 2**form.bits).all()
        assert ((codes & (2 ** (form.bits - 1) - 1)) <= form.largest_code).all()
        found = np.asarray(decode(jnp.asarray(codes[:2]), form))
        np.testing.assert_array_equal(found, [magnitudes(form)[-1], -magnitudes(form)[-1]])


def test_powers_of_two_have_no_last_digit():
    """Without a mantissa: seven powers, ties to the larger, below half of the smallest nothing."""
    np.testing.assert_array_equal(magnitudes(E3M0), [0, 0.25, 0.5, 1, 2, 4, 8, 16])
    codes = jnp.asarray(codes_of(E3M0))
    values = np.asarray(decode(codes, E3M0))
    np.testing.assert_array_equal(np.abs(values), np.tile(magnitudes(E3M0), 2))
    np.testing.assert_array_equal(encode(jnp.asarray(values), E3M0, "nearest", KEY), np.where(values == 0, 0, codes))
    x = jnp.array([0.124, 0.125, 0.13, 0.37, 0.375, -0.74, -0.76, 3.0, 11.9, 12.0, 17.0])
    found = decode(encode(x, E3M0, "nearest", KEY), E3M0)
    np.testing.assert_array_equal(found, [0, 0, 0.25, 0.25, 0.5, -0.5, -1, 4, 8, 16, 16])
    part = np.random.default_rng(0).random(7)
    grid = magnitudes(E3M0)
    x = (grid[:-1] + part * np.diff(grid)).astype(np.float32)
    round_trip = jax.jit(jax.vmap(lambda key: decode(encode(jnp.asarray(x), E3M0, "stochastic", key), E3M0)))
    found = np.asarray(round_trip(jax.random.split(KEY, 2000)), np.float64)
    assert ((found == grid[:-1]) | (found == grid[1:])).all()
    assert_mean(found, x)
