import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.compressors.random import Stream, key_words, random_subset, uniform_hash

SIZE = 2**19
draw = jax.jit(uniform_hash, static_argnums=1)


def stream(key, size=SIZE):
    return np.asarray(draw(key, (size,)), np.float64)


def chi_square(counts):
    """In standard deviations from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def correlation(left, right):
    """In standard errors."""
    return abs(((left - 0.5) * (right - 0.5)).mean()) * 12 * np.sqrt(left.size)


KEYS = [0, 1, 2, 12345, 2**31]


@pytest.mark.parametrize("seed", KEYS)
def test_uniform(seed):
    noise = stream(jax.random.key(seed))
    assert noise.min() >= 0
    assert noise.max() < 1
    for power in (1, 2, 3, 4):
        spread = np.sqrt(1 / (2 * power + 1) - 1 / (power + 1) ** 2)
        assert abs((noise**power).mean() - 1 / (power + 1)) < 5 * spread / np.sqrt(SIZE)
    for bins in (16, 1024):
        assert abs(chi_square(np.bincount((noise * bins).astype(int), minlength=bins))) < 5
    low_bits = (noise * 2**24).astype(np.int64) % 256
    assert abs(chi_square(np.bincount(low_bits, minlength=256))) < 5
    kolmogorov = np.abs(np.sort(noise) - (np.arange(SIZE) + 0.5) / SIZE).max() * np.sqrt(SIZE)
    assert kolmogorov < 2.2  # the 1e-4 quantile


@pytest.mark.parametrize("seed", KEYS)
def test_no_serial_correlation(seed):
    noise = stream(jax.random.key(seed))
    for lag in (1, 2, 3, 4, 8, 16, 32, 256, 512, 4096, 65536):
        assert correlation(noise[:-lag], noise[lag:]) < 5, lag
    pairs = (noise.reshape(-1, 2) * 32).astype(int)
    assert abs(chi_square(np.bincount(pairs[:, 0] * 32 + pairs[:, 1], minlength=1024))) < 5


def test_neighboring_keys_are_independent_in_every_bit():
    key = jax.random.key(0)
    steps = [jax.random.fold_in(key, step) for step in range(3)]
    workers = [jax.random.fold_in(steps[0], worker) for worker in range(3)]
    leaves = [jax.random.fold_in(workers[0], leaf) for leaf in range(3)]
    keys = [key, jax.random.key(1), jax.random.key(2), jax.random.key(3), *steps, *workers, *leaves]
    words = [(stream(key, 2**14) * 2**24).astype(np.uint32) for key in keys]
    for left, right in itertools.combinations(words, 2):
        for shift in (0, 1):  # aligned, and one element apart
            different = (left[shift:] ^ right[: right.size - shift])[:, None] >> np.arange(24) & 1
            assert np.abs(different.mean(0) - 0.5).max() * 2 * np.sqrt(different.shape[0]) < 6


def test_every_key_bit_changes_half_of_the_noise():
    words = jnp.zeros(2, jnp.uint32)
    base = (stream(jax.random.wrap_key_data(words), 4096) * 2**24).astype(np.uint32)
    for bit in range(64):
        flipped = words.at[bit // 32].set(jnp.uint32(2 ** (bit % 32)))
        noise = (stream(jax.random.wrap_key_data(flipped), 4096) * 2**24).astype(np.uint32)
        share = np.unpackbits((base ^ noise).view(np.uint8)).mean() * 32 / 24
        assert abs(share - 0.5) < 0.01, bit


def test_key_words_are_lossless_and_take_any_implementation():
    keys = jax.random.split(jax.random.key(0), 1000)
    left, right = jax.vmap(key_words)(keys)
    assert len(set(zip(left.tolist(), right.tolist()))) == 1000
    assert uniform_hash(jax.random.key(0, impl="rbg"), (3,)).shape == (3,)


def test_a_part_of_a_stream():
    key = jax.random.key(4)
    part = uniform_hash(Stream(*key_words(key), jnp.uint32(1000)), (2, 50))
    np.testing.assert_array_equal(part.reshape(-1), uniform_hash(key, (1100,))[1000:])


def test_more_than_24_bits_of_elements():
    size = 2**24 + 2**20
    noise = np.asarray(draw(jax.random.key(5), (size,)))
    tail, head = noise[2**24 :].astype(np.float64), noise[: 2**20].astype(np.float64)
    assert correlation(tail, head) < 5
    assert abs(chi_square(np.bincount((tail * 256).astype(int), minlength=256))) < 5


def test_rounding_with_the_noise_is_unbiased():
    values = np.linspace(-3, 3, 13, dtype=np.float32)
    noise = stream(jax.random.key(9)).reshape(-1, 1)
    rounded = np.floor(values + noise[:200_000])
    spread = np.sqrt((values - np.floor(values)) * (1 - values + np.floor(values)) / 200_000)
    assert (np.abs(rounded.mean(0) - values) <= 5 * spread + 1e-6).all()


@pytest.mark.parametrize("noise", [uniform_hash, jax.random.uniform])
def test_same_signature_and_results_in_every_mode(noise):
    keys = jax.random.split(jax.random.key(0), 3)
    single = jnp.stack([noise(key, (2, 5)) for key in keys])
    assert single.dtype == jnp.float32
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda key: noise(key, (2, 5))))(keys), single)
    assert noise(keys[0], ()).shape == ()
    assert noise(keys[0], (0, 4)).shape == (0, 4)


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 1), (2, 3), (64, 64), (1000, 1001), (5000, 2**25)])
def test_subset_has_no_duplicates(count, size):
    positions = random_subset(jnp.uint32(count + 1), count, size)
    assert len(set(positions.tolist())) == count
    assert count == 0 or int(positions.max()) < size


def test_every_subset_is_equally_likely():
    draws = 20_000
    seeds = jnp.arange(draws, dtype=jnp.uint32)
    subsets = np.sort(np.asarray(jax.jit(jax.vmap(lambda seed: random_subset(seed, 3, 6)))(seeds)), 1)
    _, counts = np.unique(subsets @ np.array([36, 6, 1]), return_counts=True)
    assert counts.size == 20
    assert abs(chi_square(counts)) < 5
    large = np.asarray(jax.jit(jax.vmap(lambda seed: random_subset(seed, 50, 1000)))(seeds[:5000]))
    assert abs(chi_square(np.bincount(large.ravel(), minlength=1000)) + 0.05 * np.sqrt(999 / 2)) < 5
