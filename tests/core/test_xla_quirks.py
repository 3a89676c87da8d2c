from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._core.xla_quirks import (
    MOST_SLICES,
    _running_sum_of_lanes,
    _with_hidden_zero,
    add_rows,
    from_ordered_bits,
    hide_constants,
    largest_entry,
    largest_magnitude,
    ordered_bits,
    reduce_all,
    running_sum,
    smallest_entry,
    sum_counts,
    sum_rows,
    sum_vector,
)


@pytest.mark.parametrize(
    "shape", [(0, 1), (3, 1), (2, 8), (2, 9), (3, 64), (2, 320), (1, 1024), (2, 2**16), (1, 70_001)]
)
def test_rows_are_those_of_numpy(shape):
    rows = np.random.default_rng(0).standard_cauchy(shape).astype(np.float32)
    rows[:, :1] *= -1
    largest, sums = jax.jit(lambda x: (largest_magnitude(x), sum_rows(x)))(rows)
    np.testing.assert_array_equal(largest, np.abs(rows).max(1, keepdims=True))
    np.testing.assert_allclose(sums, rows.astype(np.float64).sum(1, keepdims=True), rtol=1e-5, atol=1e-4)


def test_rows_keep_what_is_not_finite_to_themselves():
    rows = np.ones((4, 64), np.float32)
    rows[0, 5], rows[1, 6], rows[2, 7] = np.nan, -np.inf, -0.0
    rows[0, 6] = np.inf
    largest = np.asarray(jax.jit(largest_magnitude)(rows))[:, 0]
    np.testing.assert_array_equal(largest, [np.nan, np.inf, 1.0, 1.0])
    np.testing.assert_array_equal(np.asarray(jax.jit(sum_rows)(rows))[:, 0], [np.nan, -np.inf, 63.0, 64.0])
    assert not np.signbit(jax.jit(largest_magnitude)(jnp.full((1, 16), -0.0))).any()


def test_rows_inside_vmap():
    rows = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    largest, sums = jax.jit(jax.vmap(lambda x: (largest_magnitude(x), sum_rows(x))))(rows)
    np.testing.assert_array_equal(largest, np.abs(rows).max(2, keepdims=True))
    np.testing.assert_allclose(sums, rows.sum(2, keepdims=True), atol=1e-5)


def test_long_rows_are_not_copied_inside_vmap():
    """As a product with a vector they are, transposed."""
    rows = jax.ShapeDtypeStruct((2, 1, 2**20), jnp.float32)
    compiled = jax.jit(jax.vmap(lambda x: sum_rows(jnp.abs(x)))).lower(rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize("count", [1, 2, 3, MOST_SLICES, MOST_SLICES + 1])
def test_sums_of_rows(count):
    rows = np.random.default_rng(0).standard_normal((count, 2, 5)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(add_rows)(rows), rows.astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)


def test_rows_are_added_without_a_copy_of_wider_ones():
    """A reduction writes them first, at twice the bytes."""
    rows = jax.ShapeDtypeStruct((4, 2**18), jnp.float16)
    compiled = jax.jit(lambda x: add_rows(x.astype(jnp.float32)).astype(x.dtype)).lower(rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**18


@pytest.mark.parametrize("size", [0, 1, 8, 9, 1000, 4097])
def test_sums_of_vectors_and_of_integers(size):
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    counts = np.random.default_rng(0).integers(0, 32, (2, size), np.int32)

    @jax.jit
    def all_sums(x, counts):
        running = [running_sum(counts[0], most=most) for most in (32 * size, 2**24)]
        # The last in the form of TPUs.
        return sum_vector(x), sum_counts(counts), [*running, _running_sum_of_lanes(counts[0])]

    total, totals, running = all_sums(x, counts)
    np.testing.assert_allclose(total, x.astype(np.float64).sum(), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(totals, counts.sum(1))
    for found in running:
        np.testing.assert_array_equal(found, counts[0].cumsum())


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 2**16 + 7])
def test_all_entries_are_reduced_without_an_array_of_what_makes_them(size):
    x, half = np.random.default_rng(0).integers(0, 2**32, size, np.uint32), np.uint32(2**31)

    @jax.jit
    def run(x):
        small = x < half
        return reduce_all(jnp.sum, x * x ^ x), reduce_all(jnp.any, ~small), reduce_all(jnp.all, small)

    assert [int(found) for found in run(x)] == [
        int(np.sum(x * x ^ x, dtype=np.uint32)),
        (x >= half).any(),
        (x < half).all(),
    ]
    if size > 1000:
        plain = jax.jit(lambda x: jnp.sum(x * x ^ x))
        temporary = [f.lower(x).compile().memory_analysis().temp_size_in_bytes for f in (run, plain)]
        assert temporary[0] <= x.nbytes / 4
        # Where XLA learns this, plain reductions do.
        assert temporary[1] >= x.nbytes


def test_products_of_constants_still_overflow():
    """`hide_constants` is needed as long as a supported jax needs it: the XLA of jax 0.12 does not."""

    def square(hide, ratio):
        scaled = hide(jnp.full(8, 1e30, jnp.float32) * ratio)
        return scaled * scaled

    for hide in (hide_constants, _with_hidden_zero):
        assert np.isfinite(jax.jit(partial(square, hide))(jnp.float32(1e-20))).all()
    plain = jax.jit(lambda ratio: square(lambda x: x, ratio))(jnp.float32(1e-20))
    assert np.isfinite(plain).all() == (jax.__version_info__ >= (0, 12))


# Every size at which a reduction takes another way.
EXTREME_SIZES = (1, 7, 100, 4095, 4096, 5000, 70_001)


@jax.jit
def find_extremes(arrays):
    return [(largest_entry(x), smallest_entry(x), largest_entry(abs(x)[None], 1)[0]) for x in arrays]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_extremes_are_those_of_numpy_wherever_a_value_is_not_finite(dtype, value):
    """`jnp.max` loses NaN on CPU from 4,096 entries on."""
    rows = [np.linspace(-1, 1, size, dtype=np.float32) for size in EXTREME_SIZES]
    for row in rows:
        row[len(row) // 3] = value
    arrays = [jnp.asarray(row).astype(dtype) for row in rows]
    for x, extremes in zip(arrays, find_extremes(arrays), strict=True):
        wide = np.asarray(x, np.float32)
        assert {leaf.dtype for leaf in extremes} == {x.dtype}
        np.testing.assert_array_equal(
            [np.asarray(leaf, np.float32) for leaf in extremes], [wide.max(), wide.min(), np.abs(wide).max()]
        )


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (1, 2)])
def test_extremes_over_axes_are_those_of_numpy(axis):
    x = np.random.default_rng(0).standard_cauchy((3, 40, 50)).astype(np.float32)
    x[1, 2, 3] = np.nan
    forms = [
        (ours, numpy, keep)
        for keep in (False, True)
        for ours, numpy in ((largest_entry, np.max), (smallest_entry, np.min))
    ]
    found = jax.jit(lambda x: [ours(x, axis=axis, keepdims=keep) for ours, _, keep in forms])(x)
    for extreme, (_, numpy, keep) in zip(found, forms, strict=True):
        np.testing.assert_array_equal(extreme, numpy(x, axis=axis, keepdims=keep))
    assert int(largest_entry(jnp.array([3, -4]))) == 3
    assert int(smallest_entry(jnp.array([-(2**31), 5], jnp.int32))) == -(2**31)
    assert float(largest_entry(jnp.zeros((0, 3)), initial=0.0)) == 0
    assert float(smallest_entry(jnp.ones(5), initial=0.0)) == 0
    assert np.isnan(largest_entry(jnp.full(5000, jnp.nan), initial=0.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ordered_bits_have_the_order_of_the_floats(dtype):
    values = jnp.array([-np.inf, -2.5, -1e-7, -0.0, 0.0, 1e-7, 1.0, np.inf, np.nan]).astype(dtype)
    bits = ordered_bits(values)
    assert (np.diff(np.asarray(bits, np.int64)) > 0).all()
    assert (
        np.asarray(from_ordered_bits(bits, dtype)).tobytes()[: -values.dtype.itemsize]
        == np.asarray(values).tobytes()[: -values.dtype.itemsize]
    )
    assert np.isnan(from_ordered_bits(bits, dtype)[-1])
    assert ordered_bits(-values)[-1] == bits[-1]


def test_largest_entries_share_the_gradient():
    x = jnp.array([[1.0, 3.0, 3.0], [jnp.nan, 2.0, jnp.inf]])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(largest_entry(x, 1) * jnp.array([2.0, 5.0]))))(x)
    assert gradient.tolist() == [[0, 1, 1], [5, 0, 0]]
    assert jax.grad(smallest_entry)(x[0]).tolist() == [1, 0, 0]
