import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, X, decoded, relative_error

import jaxdist as jd
from jaxdist import compressors as jc

ONE_HOT = np.eye(1, 100, dtype=np.float32)[0]


def test_sign_has_no_magnitude():
    x = np.array([[3.0, -4.0, 0.0], [-0.0, 1e-45, -1e38]], np.float32)
    np.testing.assert_array_equal(decoded(jc.sign(), x), [[1, -1, 1], [1, 1, -1]])
    words = jc.sign().compress(jnp.asarray(x), KEY)
    assert (words.dtype, words.tolist()) == (jnp.uint8, [0b011101])
    with pytest.raises(ValueError, match="states neither"):
        jd.error_feedback(jd.compressed(jc.sign()))


def test_one_bit_oracles():
    out = decoded(jc.one_bit(), X)
    np.testing.assert_allclose(out, [6.5, -6.5, 6.5, 6.5], rtol=1e-6)
    assert ((out - X) ** 2).sum() == pytest.approx(91.0, rel=1e-5)
    assert relative_error(decoded(jc.one_bit(), ONE_HOT), ONE_HOT) == pytest.approx(1.8, rel=1e-5)
    gaussian = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert relative_error(decoded(jc.one_bit(), gaussian), gaussian) == pytest.approx(0.4042, abs=5e-3)
    quarter = np.repeat(np.float32([1, 0, 0, 0]), 16)
    assert relative_error(decoded(jc.one_bit(), quarter), quarter) == pytest.approx(1.0, rel=1e-5)
    for factor in (1e-25, 1e25):
        np.testing.assert_allclose(decoded(jc.one_bit(), factor * X), factor * out, rtol=1e-5)


def test_one_bit_enters_feedback_only_when_vouched_for():
    with pytest.raises(ValueError, match="states neither"):
        jd.error_feedback(jd.compressed(jc.one_bit()))
    code = jc.one_bit(contraction=0.59)
    assert code.contraction((5,)) == 0.59
    assert jd.error_feedback(jd.two_shot(code)).law == jd.reducers.Law.TELESCOPING
    for wrong in (0, -0.5, 1.5):
        with pytest.raises(ValueError, match=f"got {wrong}"):
            jc.one_bit(contraction=wrong)


@pytest.mark.parametrize("size", [1, 30, 48])
def test_buckets_of_scaled_sign(size):
    """Each is an array of its own, the last one without what fills it."""
    x = np.random.default_rng(size).standard_cauchy(size).astype(np.float32)
    parts = [x[i : i + 16] for i in range(0, size, 16)]
    expected = np.concatenate([np.abs(part).mean() * np.where(part >= 0, 1, -1) for part in parts])
    out = decoded(jc.scaled_sign(bucket=16), x)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    energies = [np.abs(part).sum() ** 2 / len(part) for part in parts]
    assert relative_error(out, x) == pytest.approx(1 - sum(energies) / (x**2).sum(), abs=1e-5)


def test_contraction_of_scaled_sign_is_attained():
    for code, size, delta in [(jc.scaled_sign(), 100, 0.01), (jc.scaled_sign(bucket=16), 100, 1 / 16)]:
        assert code.contraction((size,)) == delta
        assert relative_error(decoded(code, ONE_HOT), ONE_HOT) == pytest.approx(1 - delta, rel=1e-5)
    assert jc.scaled_sign(bucket=16).contraction((4,)) == 1 / 4
    with pytest.raises(ValueError, match="got 0"):
        jc.scaled_sign(bucket=0)
