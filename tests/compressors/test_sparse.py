"""Sparse codes other than `top_k`: by block, of two bits, and two codes in a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import compressors as reference
from reference import sparse
from register import CODES, block_bytes

from jaxdist import compressors as jc
from jaxdist.compressors.two_means import _worst_energy

KEY = jax.random.key(3)


def decoded(code, x, key=KEY):
    compiled = jax.jit(lambda x, key: code.decompress(code.compress(x, key), x))
    return np.asarray(compiled(jnp.asarray(x), key), np.float64)


def payload_bytes(code, size, dtype=jnp.float32):
    payload = jax.eval_shape(code.compress, jax.ShapeDtypeStruct((size,), dtype), KEY)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))


def heavy_tailed(size, seed=0):
    return np.random.default_rng(seed).standard_cauchy(size).astype(np.float32)


# top_k


@pytest.mark.sampled(10)
@pytest.mark.parametrize("density", [0.002, 0.02, 0.3])
def test_methods_agree(density):
    x = heavy_tailed(10_000)
    expected = reference.top_k(x, round(density * x.size))
    for method in ("threshold", "exact"):
        np.testing.assert_array_equal(decoded(jc.top_k(density, method=method), x), expected)


# block_top_k


@pytest.mark.parametrize("size", [37, 64, 10_000])
def test_block_top_k_is_top_k_of_each_block(size):
    x = np.round(heavy_tailed(size), 1)
    width = min(64, size)
    padded = np.pad(x, (0, -size % width)).reshape(-1, width)
    expected = np.stack([reference.top_k(row, max(1, round(0.1 * width))) for row in padded]).reshape(-1)[:size]
    np.testing.assert_array_equal(decoded(jc.block_top_k(0.1, block=64), x), expected)


def test_block_top_k_constant_is_attained():
    code, x = jc.block_top_k(0.25, block=16), np.ones(64, np.float32)
    assert code.contraction((64,)) == code.contraction((70,)) == 0.25
    assert reference.relative_error(decoded(code, x), x) == 1 - 0.25
    assert code.contraction((10,)) == 0.2  # 2 of 10


def test_block_top_k_bytes():
    for size in (100, 4096, 10**6):
        assert payload_bytes(jc.block_top_k(64 / 4096), size) == block_bytes(64 / 4096, 4096)(size)
    bits = 8 * payload_bytes(jc.block_top_k(64 / 4096), 2**20) / (64 * 256)
    assert bits - 32 == pytest.approx(7.97, abs=0.01)
    with pytest.raises(ValueError, match="got 0"):
        jc.block_top_k(0.1, block=0)


# two_means


@pytest.mark.parametrize("size", [1, 5, 64, 70])
def test_two_means_is_the_best_cut(size):
    rng = np.random.default_rng(size)
    rows = [
        heavy_tailed(size, size),
        rng.standard_normal(size),
        np.round(rng.standard_normal(size)),
        np.full(size, -2.0),
    ]
    rows = np.stack([*rows, np.zeros(size), np.eye(1, size)[0]]).astype(np.float32)
    code = jc.two_means(block=64)
    out = jax.jit(jax.vmap(lambda x: code.decompress(code.compress(x, KEY), x)))(rows)
    for row, found in zip(rows, np.asarray(out, np.float64)):
        blocks = [row[i : i + 64] for i in range(0, size, 64)]
        best = np.concatenate([sparse.two_means(block) for block in blocks])
        # The same error, and the same entries unless two cuts are as good.
        error, least = ((found - row) ** 2).sum(), ((best - row) ** 2).sum()
        assert error <= least * (1 + 1e-5) + 1e-10 * (row.astype(np.float64) ** 2).sum()


def worst_magnitudes(size):
    energies = [_worst_energy(size, m) for m in range(1, size + 1)]
    m = int(np.argmax(energies)) + 1
    j = np.arange(m + 1)
    return np.pad(np.diff((j * np.sqrt(m) + np.sqrt(j * (size - j) * (size - m))) / size), (0, size - m))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("block", "constant"), [(2, 1.0), (3, 0.9), (64, 0.635), (256, 0.546), (1024, 0.474)])
def test_two_means_constant_is_attained_and_never_broken(block, constant):
    code = jc.two_means(block=block)
    delta = code.contraction((5000,))
    assert delta == pytest.approx(constant, abs=1e-3)
    x = worst_magnitudes(block).astype(np.float32)
    assert reference.relative_error(decoded(code, x), x) == pytest.approx(1 - delta, abs=1e-5)
    rng = np.random.default_rng(0)
    powers = np.arange(1, block + 1)[None] ** -rng.uniform(0.1, 3, (50, 1))
    rows = np.concatenate([powers, rng.standard_cauchy((50, block)), rng.random((50, block))]).astype(np.float32)
    out = np.asarray(jax.jit(jax.vmap(lambda x: code.decompress(code.compress(x, KEY), x)))(rows), np.float64)
    errors = ((out - rows) ** 2).sum(1) / (rows.astype(np.float64) ** 2).sum(1)
    assert errors.max() <= 1 - delta + 1e-5


def test_two_means_keeps_signs_where_a_uniform_code_does_not():
    """The values of the paper's code: -1.5 and 1.6 both decode to 0.05 there."""
    x = np.array([2, -2, 3, -3, 2.5, -1.5, 1.6, -2.6], np.float32)
    out = decoded(jc.two_means(), x)
    np.testing.assert_array_equal(np.sign(out), np.sign(x))
    centred = x - x.mean()
    scale = 6 * x.std(ddof=1) / 4
    bins = np.clip(np.rint(centred / scale + 2), 0, 3).astype(int)
    assert bins.tolist() == [3, 1, 3, 1, 3, 2, 2, 1]
    table = np.array([centred[bins == b].mean() if (bins == b).any() else 0.0 for b in range(4)])
    np.testing.assert_allclose(table, [0, -2.533333, 0.05, 2.5], atol=1e-6)
    uniform = table[bins] + x.mean()
    assert ((out - x) ** 2).sum() < ((uniform - x) ** 2).sum() / 3


def test_two_means_at_any_magnitude():
    for factor in (1e-30, 1e30):
        x = (factor * np.random.default_rng(0).standard_normal(300)).astype(np.float32)
        assert reference.relative_error(decoded(jc.two_means(), x) / factor, x / factor) < 0.2
    with pytest.raises(ValueError, match="got 0"):
        jc.two_means(block=0)


# chained


def test_chained_codes_the_kept_values():
    x = heavy_tailed(600)
    kept = reference.top_k(x, 60)
    half = decoded(jc.chained(jc.top_k(0.1), jc.cast(jnp.bfloat16)), x)
    np.testing.assert_array_equal(half, np.asarray(jnp.asarray(kept, jnp.bfloat16), np.float64))
    quantized = decoded(jc.chained(jc.top_k(0.1), jc.qsgd(8)), x)
    np.testing.assert_array_equal(quantized != 0, np.abs(quantized) > 0)
    assert reference.relative_error(quantized, kept) < 1e-3
    assert payload_bytes(jc.chained(jc.top_k(0.01), jc.qsgd(4)), 10**6) * 8 / 10_000 < 13


def test_chained_constants():
    shape, qsgd, half = (1000,), jc.qsgd(4, bucket=64), jc.cast(jnp.bfloat16)
    omega = qsgd.variance((100,))
    assert omega < 1 < jc.qsgd(2, bucket=64).variance((100,))
    assert jc.chained(jc.top_k(0.1), half).contraction(shape) == 0.1 * half.contraction((100,))
    assert jc.chained(jc.top_k(0.1), qsgd).contraction(shape) == 0.1 / (1 + omega)
    shrunk = jc.chained(jc.top_k(0.1), jc.qsgd(2, bucket=64))
    assert shrunk.contraction(shape) == 0.1 / (1 + jc.qsgd(2, bucket=64).variance((100,)))
    both = jc.chained(jc.gspar(0.1), qsgd)
    assert both.variance(shape) == pytest.approx((1 + jc.gspar(0.1).variance(shape)) * (1 + omega) - 1)
    assert both.contraction is None
    chain = jc.chained(jc.random_k(0.3), jc.cast(jnp.float16))
    assert chain.summable
    assert chain.shared_key
    assert not jc.chained(jc.random_k(0.3), qsgd).shared_key


def test_the_error_of_the_values_lies_where_the_dropped_entries_do_not():
    """The product of the constants, attained: equal magnitudes, and the worst values for the second code."""
    code = jc.chained(jc.top_k(0.5), jc.scaled_sign())
    x = np.zeros(16, np.float32)
    x[3] = 1.0  # one-hot among the eight kept ones: the worst for the sign, while the first code loses nothing
    assert reference.relative_error(decoded(code, x), x) == pytest.approx(1 - 1 / 8)
    assert code.contraction((16,)) == 0.5 / 8


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "bucket"), [(4, 16), (2, 4096)])
def test_chained_with_levels_that_are_traced(bits, bucket):
    """Levels of a state: ω' is traced, here below 1 and above it."""
    x, key = jax.random.normal(jax.random.key(1), (40_000,)), jax.random.key(2)
    levels = jnp.linspace(-1.0, 1.0, 2**bits)

    def run(levels):
        code = jc.chained(jc.top_k(0.1), jc.with_levels(levels, bits=bits, bucket=bucket, zero_level=False))
        return code.decompress(code.compress(x, key), x), code.contraction(x.shape)

    known = np.asarray(levels)
    (out, delta), (traced_out, traced_delta) = jax.jit(lambda: run(known))(), jax.jit(run)(levels)
    assert (delta < 0.05) == (bits == 2)
    np.testing.assert_allclose(traced_delta, delta, rtol=1e-5)
    np.testing.assert_allclose(traced_out, out, rtol=1e-5)


def test_chained_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="values"):
        jc.chained(jc.scaled_sign(), jc.qsgd(4))
    with pytest.raises(ValueError, match="neither unbiased nor a contraction"):
        jc.chained(jc.gspar(0.1), jc.cast(jnp.bfloat16))
    with pytest.raises(ValueError, match="needs a sparse compressor first"):
        # The other way round, chained(top_k, chained(...)), is what was meant.
        jc.chained(jc.chained(jc.top_k(0.1), jc.qsgd(4)), jc.int8())


@pytest.mark.slow
def test_sparse_loco_is_a_chain():
    """64 of 4096, two bits a value: 10.1 bits an entry, where 12-bit indices make it 14 and more."""
    code = jc.chained(jc.block_top_k(64 / 4096), jc.two_means(block=1024))
    assert payload_bytes(code, 2**20) * 8 / (64 * 256) == pytest.approx(10.05, abs=0.02)
    assert CODES["block_top_k of two_means"].make().contraction((64,)) > 0.2
