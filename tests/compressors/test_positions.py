"""Positions in about as few bits as there can be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.compressors.bitmaps import positions
from jaxdist.compressors.positions import decode_positions, encode_positions, positions_bytes

SIZES = [1, 2, 3, 10, 100, 4096, 65_536, 65_537, 10**6, 2**24, 2**30]
DENSITIES = [1e-5, 0.001, 0.01, 0.0157, 0.05, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0]
PAIRS = [(max(1, round(part * size)), size) for size in SIZES for part in DENSITIES]


def sets(count, size, draws=3):
    """Random, first, last, and clustered at both ends."""
    rng = np.random.default_rng(0)
    yield from (np.sort(rng.choice(size, count, replace=False)) for _ in range(draws))
    yield np.arange(count)
    yield np.arange(size - count, size)
    yield np.concatenate([np.arange(count // 2), np.arange(size - (count - count // 2), size)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("count", "size"),
    [(0, 7), (1, 1), (1, 65_536), (3, 10), (10, 10), (5, 65_537), (40, 4096), (9000, 65_536), (300, 2**30)],
)
def test_every_set_comes_back(count, size):
    if size == 2**30:  # no list of all positions
        cases = [
            np.unique(np.random.default_rng(0).integers(0, size, 2 * count))[:count],
            np.arange(size - count, size),
        ]
    else:
        cases = list(sets(count, size))
    where = np.stack(cases).astype(np.int32)
    words = jax.jit(jax.vmap(lambda where: encode_positions(where, size)))(where)
    assert words[0].nbytes == positions_bytes(count, size)
    back = jax.jit(jax.vmap(lambda words: decode_positions(words, count, size)))(words)
    assert back.dtype == jnp.int32
    np.testing.assert_array_equal(back, where)


@pytest.mark.parametrize(("count", "size"), PAIRS)
def test_never_larger_than_plain_words_and_near_the_entropy(count, size):
    bits = 8 * positions_bytes(count, size)
    assert bits <= count * (16 if size <= 2**16 else 32)
    assert bits <= size + 7
    if 10 <= count <= size / 2:
        subsets = (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)
        # The entropy k H: a subset of known size needs a logarithm less.
        part = count / size
        entropy = -size * (part * math.log2(part) + (1 - part) * math.log2(1 - part))
        assert bits <= entropy + 0.56 * count + 14
        assert bits <= subsets + 0.56 * count + 14 + 0.5 * math.log2(2 * math.pi * count)


def test_what_theory_says_at_one_percent():
    assert positions_bytes(167_772, 2**24) * 8 / 167_772 == pytest.approx(8.55, abs=0.01)
    assert positions_bytes(1000, 2000) == 250  # every second entry: a bitmap


def test_the_excess_is_what_the_docstring_says():
    """`2 - log2(e)`, in the limit of low densities, where one of two widths is as good as the other."""
    worst = 0.0
    for ratio in np.exp2(np.linspace(0, 20, 2000)):
        cost = min(low + 1 + ratio / 2**low for low in range(25))
        worst = max(worst, cost - math.log2(1 + ratio) - ratio * math.log2(1 + 1 / ratio))
    assert worst == pytest.approx(2 - math.log2(math.e), abs=1e-3)
    assert worst < 0.56


@pytest.mark.slow
def test_positions_in_a_bitmap_whose_first_ones_come_late():
    """Before them are more words than float32 counts."""
    words = np.zeros(2**24 + 40, np.uint32)
    words[-3:] = 1
    np.testing.assert_array_equal(positions(jnp.asarray(words), 3), 32 * (words.size - np.array([3, 2, 1])))
