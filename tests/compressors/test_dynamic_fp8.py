"""8-bit floats for the moments of optimizers, and averages that are kept in few bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, decoded, draws, relative_error

from jaxdist.compressors import cast, dynamic_fp8
from jaxdist.compressors.dynamic_fp8 import _scale_by_block, _scale_by_one_number

RNG = np.random.default_rng(0)
SPREAD = np.exp(2 * RNG.normal(size=4096)).astype(np.float32)


def grid(x, signed):
    """In float64: the numbers around x that a block of these entries can say, and the scale."""
    largest = np.abs(x).max()
    exponent = next(e for e in range(-125, 127, 2) if largest <= 31 / 16 * 2.0**e)
    smallest = 2.0 ** (exponent - (10 if signed else 18))
    gap = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 1e-300))) - 4), smallest)
    return np.floor(np.abs(x) / gap) * gap, np.ceil(np.abs(x) / gap) * gap


@pytest.mark.parametrize("signed", [False, True])
def test_to_nearest_and_at_random_are_numbers_of_the_grid(signed):
    """Against a transcription of the docstring, block by block."""
    x = SPREAD * (RNG.choice([-1, 1], SPREAD.size) if signed else 1)
    blocks = x.astype(np.float64).reshape(-1, 32)
    low, high = (np.stack(part).reshape(-1) for part in zip(*(grid(block, signed) for block in blocks), strict=True))
    magnitude, sign = np.abs(x.astype(np.float64)), np.sign(x)
    nearest = decoded(dynamic_fp8(rounding="nearest"), x)
    either = decoded(dynamic_fp8(), x)
    assert (np.sign(nearest) * sign >= 0).all()
    off = np.abs(np.abs(nearest) - magnitude)
    known = low > 0  # what would be zero is the next test
    np.testing.assert_allclose(off[known], np.minimum(magnitude - low, high - magnitude)[known], rtol=1e-5, atol=1e-12)
    assert ((either == sign * low) | (either == sign * high))[known].all()
    contraction = dynamic_fp8().contraction
    assert contraction is not None
    assert relative_error(either, x) < 1 - contraction(x.shape)


def test_what_stands_still_is_not_touched():
    once = decoded(dynamic_fp8(), SPREAD).astype(np.float32)
    np.testing.assert_array_equal(draws(dynamic_fp8(), once, 20), np.broadcast_to(once, (20, once.size)))


def test_above_zero_is_never_zero_where_nothing_is_negative():
    """Or the moment would be divided by nothing; integers of the same width do that."""
    v = jnp.geomspace(1e-24, 1e-3, 64, dtype=jnp.float32).at[:5].set(0.0)
    assert ((decoded(dynamic_fp8(), v) > 0) == (np.asarray(v) > 0)).all()
    assert (decoded(dynamic_fp8(), -v) <= 0).all()


def test_scales_are_the_same_as_one_number_of_a_block():
    """The form of TPUs, also for entries that become zero, and for zeros of both signs, in blocks with a sign."""
    blocks = jnp.array(
        [[1.0, -0.5, 1e-38, -1e-38, 0.0, -0.0], [1.0, 0.5, 1e-38, 2e-20, 0.0, -0.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]]
    )
    signed, doubled = jnp.array([[True], [False], [True]]), jnp.array([[2.0], [2.0**-60], [2.0**126]])
    found = jax.jit(_scale_by_one_number)(blocks, doubled, signed)
    for one, other in zip(found, jax.jit(_scale_by_block)(blocks, doubled, signed)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("value", [1e-36, 1e-20, 1.0, 7e37])
def test_any_magnitude(value):
    for x in ([value, value / 2, 0.0], [-value, value / 2, 0.0]):
        np.testing.assert_allclose(decoded(dynamic_fp8(), np.array(x, np.float32)), x, rtol=0.06)


def test_what_is_not_finite_stays_so():
    for bad in (np.nan, np.inf, -np.inf):
        x = np.array([1.0] * 31 + [bad] + [1.0] * 32, np.float32)
        found = decoded(dynamic_fp8(), x)
        assert not np.isfinite(found[31])
        np.testing.assert_array_equal(found[32:], 1)
    assert (decoded(dynamic_fp8(), np.full(3, 1e-40, np.float32)) == 0).all()


def running_average(code, steps=3000, decay=0.999):
    """`v' = decay v + (1 - decay) target` kept in a code, from half of its target on, over what it should be."""
    target = jnp.asarray(SPREAD)

    def step(payload, key):
        v = code.decompress(payload, target)
        return code.compress(decay * v + (1 - decay) * target, key), None

    def run():
        start = code.compress(target / 2, KEY)
        payload, _ = jax.lax.scan(step, start, jax.random.split(KEY, steps))
        return code.decompress(payload, target) / (target * (1 - 0.5 * decay**steps))

    return np.asarray(jax.jit(run)(), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("code", [dynamic_fp8(), cast(jnp.bfloat16, rounding="stochastic")], ids=["fp8", "bfloat16"])
def test_an_average_that_moves_little_arrives(code):
    found = running_average(code)
    assert abs(found.mean() - 1) < 0.02
    assert found.std() < 0.2


@pytest.mark.parametrize("code", [dynamic_fp8(rounding="nearest"), cast(jnp.bfloat16)], ids=["fp8", "bfloat16"])
def test_to_nearest_it_stands_still(code):
    assert running_average(code, 300).mean() < 0.85 * (1 - 0.5 * 0.999**300) / (1 - 0.5 * 0.999**300)
    assert running_average(code).mean() < 0.9


def test_bfloat16_at_random_keeps_what_cannot_be_rounded():
    x = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 0.0, 1e-40], np.float32)
    found = decoded(cast(jnp.bfloat16, rounding="stochastic"), x)
    np.testing.assert_array_equal(found[:3], x[:3])
    largest = float(jnp.finfo(jnp.bfloat16).max)
    np.testing.assert_array_equal(found[3:6], [largest, -largest, 0])


def test_refusals():
    with pytest.raises(ValueError, match="got float16"):
        cast(jnp.float16, rounding="stochastic")
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        dynamic_fp8(block=0)
