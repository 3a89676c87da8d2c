"""Unbiased codes as contractions: how much of a bucket is left, and that it is as much as the bound allows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, decoded

from jaxdist import compressors as jc
from jaxdist.compressors.nuqsgd import powers
from jaxdist.compressors.scaled import contraction_form

SIZE = 64
UNLIKE = [-1, -0.1304, -0.0185, -0.0051, 0.0046, 0.0178, 0.1257, 1]
# The code, its levels of magnitudes or of signed ratios, and its norm.
CODES = {
    "2 bits": (jc.qsgd(2, bucket=SIZE), [0, 1], "max"),
    "3 bits": (jc.qsgd(3, bucket=SIZE), np.arange(4) / 3, "max"),
    "4 bits, l2": (jc.qsgd(4, bucket=SIZE, norm="l2"), np.arange(8) / 7, "l2"),
    "powers": (jc.nuqsgd(3, bucket=SIZE), powers(4, 0.5, lowest=0.0), "l2"),
    "no zero": (jc.with_levels(np.array(UNLIKE), bits=3, bucket=SIZE, norm="max", zero_level=False), UNLIKE, "max"),
    "terngrad": (jc.terngrad(clip=None, bucket=SIZE), [0, 1], "max"),
}
each_code = pytest.mark.parametrize(("code", "levels", "norm"), CODES.values(), ids=CODES)


def buckets(levels, norm):
    """Rows: typical ones, and the worst ones for a code with these levels."""
    rng = np.random.default_rng(0)
    worst = []
    for low, high in itertools.pairwise(levels):
        for ratio in np.linspace(low, high, 9)[1:-1]:
            row = np.full(SIZE, ratio) if norm == "max" else np.ones(SIZE)
            worst.append(np.where(np.arange(SIZE) == 0, 1.0, row))
    rows = [
        rng.standard_normal(SIZE),
        rng.standard_cauchy(SIZE),
        np.eye(SIZE)[0],
        np.ones(SIZE),
        np.zeros(SIZE),
        *worst,
    ]
    return np.array(rows, np.float32)


def own_error(rows, levels, norm):
    """`E|C(x) - x|² / |x|²` of each row, in float64."""
    rows, levels = rows.astype(np.float64), np.asarray(levels, np.float64)
    norms = np.abs(rows).max(1) if norm == "max" else np.sqrt((rows**2).sum(1))
    ratios = rows / np.where(norms == 0, 1, norms)[:, None]
    ratios = np.abs(ratios) if levels[0] == 0 else ratios
    below = np.clip(np.searchsorted(levels, ratios, side="right") - 1, 0, len(levels) - 2)
    lost = ((levels[below + 1] - ratios) * (ratios - levels[below])).sum(1)
    return lost / np.where(rows.any(1), (ratios**2).sum(1), 1)


@pytest.mark.sampled(3)
@each_code
def test_a_bucket_is_shrunk_as_little_as_a_contraction_allows(code, levels, norm):
    rows = buckets(levels, norm)
    small, omega = jc.scaled(code), code.variance((SIZE,))
    assert (small.variance, small.contraction((SIZE,))) == (None, 1 / (1 + omega))
    plain, shrunk = (decoded(c, rows.reshape(-1)).reshape(rows.shape) for c in (code, small))
    own = own_error(rows, levels, norm)
    assert own.max() <= omega * (1 + 1e-6)
    # One factor for each bucket, and none for a bucket that decodes to zeros.
    kept = np.array([(b @ a) / (a @ a) if a.any() else np.nan for a, b in zip(plain, shrunk, strict=True)])
    np.testing.assert_allclose(shrunk, np.nan_to_num(kept)[:, None] * plain, rtol=1e-5, atol=1e-6)
    kept, own = kept[~np.isnan(kept)], own[~np.isnan(kept)]
    error = kept**2 * (1 + own) - 2 * kept + 1
    assert (error <= omega / (1 + omega) + 1e-5).all()
    # A larger factor would break the bound, or enlarge what is right on average.
    larger = (kept + 1e-3) ** 2 * (1 + own) - 2 * (kept + 1e-3) + 1
    assert ((larger > omega / (1 + omega)) | (kept > 1 - 1e-6)).all()
    nearest = decoded(jc.scaled(code, closest=True), rows.reshape(-1)).reshape(rows.shape)
    factors = 1 / (1 + own_error(rows, levels, norm))
    np.testing.assert_allclose(nearest, factors[:, None] * plain, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_typical_buckets_arrive_whole():
    x = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    for code in (
        jc.qsgd(3),
        jc.qsgd(4),
        jc.qsgd(8),
        jc.nuqsgd(4, bucket=512),
        jc.natural(),
        jc.int4(rounding="stochastic"),
    ):
        np.testing.assert_array_equal(decoded(jc.scaled(code), x), decoded(code, x))
    ratio = decoded(jc.scaled(jc.qsgd(2)), x) @ decoded(jc.qsgd(2), x) / (decoded(jc.qsgd(2), x) ** 2).sum()
    assert 0.7 < ratio < 0.75


@pytest.mark.slow
def test_a_code_that_does_not_know_its_error_has_one_factor():
    x = np.random.default_rng(1).standard_normal(200).astype(np.float32)
    kept = jc.scaled(jc.random_k(0.25, unbiased=True))
    assert (kept.summable, kept.shared_key, kept.contraction((200,))) == (True, True, 0.25)
    np.testing.assert_allclose(decoded(kept, x), decoded(jc.random_k(0.25), x), rtol=1e-6)
    for omega, factor, delta in ((0.5, 1.0, 0.5), (0.51, 1 / 1.51, 1 / 1.51), (3.0, 0.25, 0.25)):
        own = jc.qsgd(2)._replace(variance=lambda shape, omega=omega: omega, shrink=None)
        assert jc.scaled(own).contraction((200,)) == delta
        np.testing.assert_allclose(decoded(jc.scaled(own), x), factor * decoded(own, x), rtol=1e-6)


def test_what_is_shrunk_keeps_its_extremes():
    """Zeros stay zeros, the largest floats stay finite, and what is not finite is not hidden."""
    big = np.float32(3e38) * np.sign(np.sin(np.arange(SIZE, dtype=np.float32)) + 0.01)
    bad = np.where(np.arange(SIZE) == 3, np.nan, 1).astype(np.float32)
    for code, _, _ in CODES.values():
        small = contraction_form(code)
        out = decoded(small, np.concatenate([np.zeros(SIZE, np.float32), big, bad, np.ones(SIZE, np.float32)]))
        zeros, large, broken, last = out.reshape(4, SIZE)
        assert not zeros.any()
        assert np.isfinite(large).all()
        assert np.isfinite(last).all()
        assert np.isnan(broken).all()


@pytest.mark.slow
def test_levels_may_be_traced():
    @jax.jit
    def run(x, levels):
        code = jc.scaled(jc.with_levels(levels, bits=3, bucket=SIZE, zero_level=False))
        return code.decompress(code.compress(x, KEY), x), code.contraction(x.shape)

    x = jnp.asarray(np.random.default_rng(0).standard_normal(150), jnp.float32)
    for base in (0.5, 0.3):
        table = powers(8, base)
        code = jc.scaled(jc.with_levels(table, bits=3, bucket=SIZE, zero_level=False))
        out, delta = run(x, jnp.asarray(table))
        np.testing.assert_allclose(out, decoded(code, x), rtol=1e-5)
        assert float(delta) == pytest.approx(code.contraction((150,)), rel=1e-4)


def test_scaled_needs_a_variance():
    with pytest.raises(ValueError, match="variance"):
        jc.scaled(jc.top_k(0.1))
