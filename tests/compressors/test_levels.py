"""Rounding to tables of levels: NUQSGD, tables without zero, traced tables, and what they cost."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codes import KEY, decoded
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import levels as reference

from jaxdist import compressors as jc
from jaxdist.compressors.levels import worst_variance
from jaxdist.compressors.nuqsgd import powers

X = np.array([3.0, -4.0, 0.0, 12.0], np.float32)
PAPER = [0, 1 / 8, 1 / 4, 1 / 2, 1]
# What ALQ learned for a ResNet-32 with its authors' code.
LEARNED = [-1, -0.1304, -0.0185, -0.0051, 0.0046, 0.0178, 0.1257, 1]

TABLES = {
    "paper": (PAPER, 4, True),
    "learned": (LEARNED, 3, False),
    "two": ([0.0, 1.0], 2, True),
    "many": (powers(128, 0.9, lowest=0.0), 8, True),
    "many without zero": (powers(256, 0.95), 8, False),
}
expected_variance = jax.jit(jc.expected_variance, static_argnames=("bucket", "norm", "zero_level"))
each_table = pytest.mark.parametrize(("table", "bits", "zero_level"), TABLES.values(), ids=TABLES)
each_norm = pytest.mark.parametrize("norm", ["max", "l2"])


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.sampled(10)
@each_norm
@each_table
def test_is_the_reference(table, bits, zero_level, norm):
    code = jc.with_levels(np.array(table), bits=bits, bucket=96, norm=norm, zero_level=zero_level)
    x = gaussian(3, 96, seed=bits)
    x[1] = 0
    uniforms = np.asarray(jc.uniform_hash(KEY, (3, 96)), np.float64)
    out, expected = decoded(code, x), 0.0
    for row, values, noise in zip(out, x, uniforms):
        wanted, variance = reference.with_levels(values, np.float32(table), noise, norm, zero_level)
        np.testing.assert_allclose(row, wanted, rtol=1e-5)
        expected += variance
    found = expected_variance(x, jnp.array(table), bucket=96, norm=norm, zero_level=zero_level)
    assert float(found) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_paper_s_example():
    """r = (.2308, .3077, 0, .9231): up with (.8462, .2308, 0, .8462)."""
    assert reference.with_levels(X, PAPER, 0.5)[1] == pytest.approx(7.71875)
    assert float(expected_variance(jnp.asarray(X), jnp.array(PAPER))) == pytest.approx(7.71875)
    code = jc.with_levels(np.array(PAPER), bits=4)
    for share, wanted in ((0.84, [0.25, -0.25, 0, 1]), (0.85, [0.125, -0.25, 0, 0.5]), (0.23, [0.25, -0.5, 0, 1])):
        steady = jc.with_levels(np.array(PAPER), bits=4, noise=lambda key, shape, u=share: jnp.full(shape, u))
        np.testing.assert_allclose(decoded(steady, X), 13 * np.array(wanted), rtol=1e-6)
    keys = jax.random.split(KEY, 20_000)
    out = np.asarray(jax.jit(jax.vmap(lambda key: code.decompress(code.compress(jnp.asarray(X), key), X)))(keys))
    errors = ((out - X) ** 2).sum(1)
    assert abs(errors.mean() - 7.71875) < 5 * errors.std() / np.sqrt(20_000)
    assert (np.abs(out.mean(0) - X) <= 5 * out.std(0) / np.sqrt(20_000) + 1e-5).all()


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "zero", "without"), [(3, 17.1, 127.0), (4, 0.337, 0.253)])
def test_gaussian_buckets_without_a_zero_level(bits, zero, without):
    x = gaussian(16, 8192)
    for zero_level, wanted in ((True, zero), (False, without)):
        table = powers(2 ** (bits - 1), 0.5, lowest=0.0) if zero_level else powers(2**bits, 0.5)
        found = float(expected_variance(x, table, zero_level=zero_level)) / (x**2).sum()
        assert found == pytest.approx(wanted, rel=0.01)
        error = ((decoded(jc.nuqsgd(bits, zero_level=zero_level), x) - x) ** 2).sum() / (x**2).sum()
        assert error == pytest.approx(wanted, rel=0.03)


def test_learned_levels_on_a_gaussian_bucket():
    x = gaussian(16, 8192)
    found = expected_variance(x, jnp.array(LEARNED), zero_level=False)
    assert float(found) / (x**2).sum() == pytest.approx(0.567, rel=0.01)


@pytest.mark.parametrize("size", [1, 2, 16, 512, 8192])
@each_table
def test_the_stated_variance_is_never_exceeded(table, bits, zero_level, size):
    rng = np.random.default_rng(size)
    one_hot = np.eye(1, size)[0]
    inputs = [rng.normal(size=size), np.ones(size), one_hot, rng.standard_cauchy(size), rng.random(size), -one_hot]
    for norm in ("max", "l2"):
        code = jc.with_levels(np.array(table), bits=bits, norm=norm, zero_level=zero_level)
        omega = code.variance((size,))
        assert omega == code.variance((3, 8192)) or size < 8192
        for x in inputs:
            _, variance = reference.with_levels(x, np.float32(table), 0.5, norm, zero_level)
            assert variance / (x**2).sum() <= omega * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("size", [2, 16, 512, 8192])
@each_table
def test_the_stated_variance_is_attained_with_the_largest_magnitude_as_norm(table, bits, zero_level, size):
    """One entry of 1, and all others at `(l + h) / 2 (1 + ω)` of some interval."""
    omega = worst_variance(np.float32(table), size, "max")
    middles = (np.float64(table[:-1]) + np.float64(table[1:])) / (2 * (1 + omega))
    ratios = []
    for middle in middles:
        x = np.append(1.0, np.full(size - 1, middle))
        ratios.append(reference.with_levels(x, np.float32(table), 0.5, "max", zero_level)[1] / (x**2).sum())
    assert max(ratios) == pytest.approx(omega, rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [64, 1024, 8192])
@pytest.mark.parametrize(("s", "base"), [(2, 0.5), (6, 0.5), (6, 0.3), (2, 0.8)])
def test_the_stated_variance_of_powers_is_tight(s, base, size):
    table = powers(s + 2, base, lowest=0.0)
    omega = worst_variance(table, size, "l2")
    reach = base**s * math.sqrt(size)
    far = reach >= (1 + base) ** 2 / (2 * base)
    closed = reach - 1 if far else (1 - base) ** 2 / (4 * base) + reach**2 * base / (1 + base) ** 2
    assert omega == pytest.approx(closed, rel=1e-5)
    equal = np.full(size, size**-0.5)
    assert not far or reference.with_levels(equal, table, 0.5)[1] == pytest.approx(omega, rel=1e-5)
    # Some entries where an upper interval costs most, and the others share what is left.
    ratios = []
    for peak in 2 * base ** np.arange(s + 1.0) * base / (1 + base):
        for count in range(min(size, 1 + int(peak**-2))):
            left = 1 - count * peak**2
            bucket = np.append(np.full(count, peak), np.full(size - count, math.sqrt(max(0.0, left) / (size - count))))
            if count < 40 or left < 0.2:
                ratios.append(reference.with_levels(bucket, table, 0.5)[1] / (bucket**2).sum())
    assert 0.97 * omega <= max([*ratios, reference.with_levels(equal, table, 0.5)[1]]) <= omega * (1 + 1e-6)


def largest_variance(table, size):
    """Exact, for few entries: the best of all choices of an interval for each, and the bucket that attains it."""
    low, high = np.float64(table[:-1]), np.float64(table[1:])
    choices = np.array(list(itertools.combinations_with_replacement(range(len(low)), size)))
    middles = (low + high)[choices] / 2
    lengths = np.linalg.norm(middles, axis=1)
    sums = ((high - low)[choices] ** 2).sum(1) / 4 - (1 - lengths) ** 2
    return sums.max(), middles[sums.argmax()] / lengths[sums.argmax()]


@pytest.mark.parametrize(("bits", "size"), [(3, 2), (3, 4), (3, 16), (4, 4), (4, 8)])
def test_the_stated_variance_of_few_entries_is_close(bits, size):
    table = powers(2 ** (bits - 1), 0.5, lowest=0.0)
    largest, bucket = largest_variance(table, size)
    assert reference.with_levels(bucket, table, 0.5)[1] == pytest.approx(largest)
    assert largest <= jc.nuqsgd(bits).variance((size,)) * (1 + 1e-12) <= 1.25 * largest
    others = np.random.default_rng(0).standard_cauchy((2000, size))
    assert max(reference.with_levels(x / np.linalg.norm(x), table, 0.5)[1] for x in others) <= largest


def test_what_the_docstring_says_of_few_entries():
    table = powers(4, 0.5, lowest=0.0)
    assert worst_variance(table, 4, "l2") == pytest.approx(0.1806, abs=1e-4)
    assert largest_variance(table, 4)[0] == pytest.approx(0.1506, abs=1e-4)
    assert worst_variance(table, 64, "l2") <= 1.014 * largest_variance(table, 64)[0]


def test_the_paper_s_constant_is_looser():
    for bits, size in ((3, 8192), (4, 8192), (4, 256)):
        s = 2 ** (bits - 1) - 2
        paper = 1 / 8 + 2 ** (-2 * s - 2) * size if size < 4 ** (s + 1) else 2.0**-s * math.sqrt(size) - 7 / 8
        assert jc.nuqsgd(bits).variance((size,)) < paper
    assert jc.nuqsgd(3).variance((8192,)) == pytest.approx(21.6274, abs=1e-4)
    assert jc.nuqsgd(4).variance((8192,)) == pytest.approx(0.5694, abs=1e-4)


@pytest.mark.parametrize(("norm", "zero_level"), [("l2", True), ("max", False)])
def test_symmetries(norm, zero_level):
    code = jc.nuqsgd(4, bucket=64, norm=norm, zero_level=zero_level)
    x = np.random.default_rng(0).standard_cauchy(200).astype(np.float32)
    out = decoded(code, x)
    for factor in (0.25, 2.0**40, 2.0**-60):
        np.testing.assert_array_equal(decoded(code, factor * x), factor * out)
    np.testing.assert_array_equal(decoded(code, np.append(x, np.zeros(100, np.float32)))[:200], out)
    if zero_level:
        np.testing.assert_array_equal(decoded(code, -x), -out)
        assert not np.signbit(out[out == 0]).any()


@each_table
def test_keeps_what_is_on_a_level(table, bits, zero_level):
    code = jc.with_levels(np.array(table), bits=bits, bucket=len(table), norm="max", zero_level=zero_level)
    rows = np.tile(np.float32(table), (40, 1))
    np.testing.assert_array_equal(decoded(code, rows), rows)


@pytest.mark.parametrize("bits", [2, 3])
def test_one_entry_by_itself_is_exact(bits):
    x = np.zeros(300, np.float32)
    x[[3, 270]] = [-2.5, 1.25]
    np.testing.assert_array_equal(decoded(jc.nuqsgd(bits, bucket=256), x), x)
    assert (decoded(jc.nuqsgd(bits), np.zeros(70, np.float32)) == 0).all()
    assert (decoded(jc.nuqsgd(bits, zero_level=False), np.zeros(70, np.float32)) == 0).all()


def test_extreme_magnitudes_and_nan():
    for factor in (1e-30, 1e30):
        x = (factor * gaussian(100)).astype(np.float32)
        error = decoded(jc.nuqsgd(4, bucket=100), x) / factor - x / factor
        assert (error**2).sum() < 0.6 * ((x / factor) ** 2).sum()
    x = np.ones(64, np.float32)
    x[3] = np.nan
    out = decoded(jc.nuqsgd(4, bucket=32, norm="max"), x)
    assert np.isnan(out[:32]).any()
    np.testing.assert_array_equal(out[32:], 1.0)


UNLIKE = np.array([-1, -0.5, -0.1, -0.02, 0.01, 0.2, 0.6, 1], np.float32)
CODE = jc.with_levels(UNLIKE, bits=3, bucket=64, norm="max", zero_level=False)
ROUND_TRIP = jax.jit(lambda x, key: CODE.decompress(CODE.compress(x, key), x))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_every_entry_goes_to_a_neighbor(seed):
    x = np.random.default_rng(seed).standard_cauchy(64).astype(np.float32)
    scale = np.abs(x).max()
    out = np.asarray(ROUND_TRIP(x, jax.random.key(seed))) / scale
    index = np.clip(np.searchsorted(UNLIKE, x / scale, side="right") - 1, 0, 6)
    assert np.minimum(np.abs(out - UNLIKE[index]), np.abs(out - UNLIKE[index + 1])).max() < 1e-6


def test_levels_may_be_traced():
    traces = []

    @jax.jit
    def run(x, levels, key):
        traces.append(None)
        code = jc.with_levels(levels, bits=3, bucket=64, zero_level=False)
        return code.decompress(code.compress(x, key), x), code.variance(x.shape)

    x = jnp.asarray(gaussian(150))
    for base in (0.5, 0.3):
        table = powers(8, base)
        out, omega = run(x, jnp.asarray(table), KEY)
        code = jc.with_levels(table, bits=3, bucket=64, zero_level=False)
        np.testing.assert_allclose(out, decoded(code, x), rtol=1e-6)
        assert float(omega) == pytest.approx(code.variance((150,)), rel=1e-4)
    assert len(traces) == 1


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (2, 1, 3, 2, 2)])
def test_any_shape_under_strict_promotion(shape, mesh):
    # One dtype for each number of dimensions: what a code does with one does not depend on the other.
    dtype = (jnp.float32, jnp.bfloat16, jnp.float16)[len(shape) % 3]
    x = jax.ShapeDtypeStruct(shape, dtype)
    with jax.numpy_dtype_promotion("strict"):
        for code in (jc.nuqsgd(4), jc.nuqsgd(3, zero_level=False, norm="max")):
            out = jax.eval_shape(lambda x, key, code=code: code.decompress(code.compress(x, key), x), x, KEY)
            assert (out.shape, out.dtype) == (shape, dtype)
        jax.eval_shape(lambda x: jc.expected_variance(x, jnp.array(PAPER)), x)


def test_types_under_shard_map(mesh):
    def one_worker(x, key, levels):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        code = jc.with_levels(levels, bits=3, zero_level=False)
        return code.decompress(code.compress(x, key), x)

    mapped = jax.shard_map(one_worker, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    out = jax.eval_shape(mapped, jax.ShapeDtypeStruct((40,), jnp.float32), KEY, jnp.asarray(powers(8, 0.5)))
    assert out.shape == (40,)


def test_bad_arguments_are_named():
    for table, options, message in (
        (PAPER, {"bits": 5}, "bits must be 2, 3, 4 or 8, got 5"),
        (PAPER, {"bits": 3}, "2 to 4 for these bits, got shape"),
        (PAPER, {"bits": 4, "zero_level": False}, "increase from -1 to 1"),
        ([0, 0.5, 0.5, 1], {"bits": 4}, "increase from 0 to 1"),
        (LEARNED, {"bits": 4}, "increase from 0 to 1"),
        (PAPER, {"bits": 4, "bucket": 0}, "bucket must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            jc.with_levels(np.array(table), **options)
    for options, message in (
        ({"bits": 5}, "got 5"),
        ({"bits": 4, "base": 1.0}, r"base must be in \(0, 1\), got 1.0"),
        ({"bits": 8, "base": 0.1}, "increase from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            jc.nuqsgd(**options)
