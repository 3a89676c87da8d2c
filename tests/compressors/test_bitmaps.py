"""Bitmaps in words of 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._core.xla_quirks import running_sum, sum_rows
from jaxdist.compressors import bitmaps


def random_bitmap(words, part, seed=0):
    flags = np.random.default_rng(seed).random((1, 32 * words)) < part
    return flags[0], bitmaps.to_bitmap(jnp.asarray(flags))[0]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("words", [1, 5, 1100])
@pytest.mark.parametrize("part", [0.02, 0.9])
def test_bitmaps(words, part):
    flags, bitmap = random_bitmap(words, part)
    flags[-1] = True
    bitmap = bitmap.at[-1].set(bitmap[-1] | jnp.uint32(2**31))
    where = np.flatnonzero(flags)
    np.testing.assert_array_equal(bitmap, np.packbits(flags, bitorder="little").view(np.uint32))

    @jax.jit
    def of_all(bitmap, flags, where):
        counts = bitmaps.ones(bitmap)
        sums = running_sum(counts, most=32 * words), sum_rows(counts[None].astype(jnp.float32))
        found = bitmaps.positions(bitmap, where.size), bitmaps.from_positions(where, flags.size)
        return bitmaps._to_words(flags), counts, sums, found

    in_words, counts, (running, total), (found, again) = of_all(bitmap, flags, where)
    np.testing.assert_array_equal(in_words, bitmap)
    np.testing.assert_array_equal(found, where)
    np.testing.assert_array_equal(running, np.cumsum(counts))
    assert total.tolist() == [[where.size]]
    np.testing.assert_array_equal(again, flags)
    first = jax.jit(jax.vmap(bitmaps.first_ones, in_axes=(None, 0)))
    limits = np.array([0, 1, 2, where.size // 2, where.size - 1, where.size, where.size + 7])
    for limit, limited in zip(limits, first(bitmap, limits)):
        expected = flags & (np.cumsum(flags) <= limit)
        np.testing.assert_array_equal(limited, np.packbits(expected, bitorder="little").view(np.uint32))


def test_nth_one():
    words = np.random.default_rng(0).integers(0, 2**32, 200, dtype=np.uint32)
    words[:2] = 2**32 - 1, 2**31
    ranks = np.arange(32)
    found = np.asarray(jax.jit(bitmaps.nth_one)(np.repeat(words, 32), np.tile(ranks, 200))).reshape(200, 32)
    for word, row in zip(words, found):
        where = np.flatnonzero(np.unpackbits(np.array([word]).view(np.uint8), bitorder="little"))
        np.testing.assert_array_equal(row[: where.size], where)
