"""Bitmaps in words of 32 bits: their making, their ones, and the positions of these."""

import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Int, Shaped, UInt
from .._core.xla_quirks import running_sum

# Bits of a word of a bitmap, and words that are summed in one product or search.
WORD = 32
ROW = 32


def to_bitmap(flags: Shaped[Array, "*rows width"]) -> UInt[Array, "*rows words"]:
    """Booleans as u32 words, the first in the lowest bit; the width is a multiple of 32."""
    return lax.platform_dependent(flags, tpu=_to_words, default=_to_words_by_bytes)


def _to_words(flags: Shaped[Array, "*rows width"]) -> UInt[Array, "*rows words"]:
    """In the numbers of a TPU, whose program of bytes is several times as long."""
    *rows, width = flags.shape
    groups = flags.reshape(*rows, width // WORD, WORD).astype(jnp.uint32)
    return jnp.sum(groups << lax.broadcasted_iota(jnp.uint32, groups.shape, groups.ndim - 1), axis=-1, dtype=jnp.uint32)


def _to_words_by_bytes(flags: Shaped[Array, "*rows width"]) -> UInt[Array, "*rows words"]:
    """Eight to a byte first, since this is the only form that XLA:CPU vectorizes, at the speed of memory."""
    *rows, width = flags.shape
    groups = flags.reshape(*rows, width // 8, 8).astype(jnp.uint8)
    shifts = lax.broadcasted_iota(jnp.uint8, groups.shape, groups.ndim - 1)
    packed = jnp.sum(groups << shifts, axis=-1, dtype=jnp.uint8)
    return lax.bitcast_convert_type(packed.reshape(*rows, width // WORD, 4), jnp.uint32)


def full(size: int) -> UInt[Array, " words"]:
    """The bitmap with all ones of `range(size)`."""
    left = jnp.clip(size - WORD * lax.iota(jnp.int32, -(-size // WORD)), 0, WORD)
    return jnp.where(left == WORD, jnp.uint32(2**WORD - 1), (jnp.uint32(1) << left.astype(jnp.uint32)) - 1)


def ones(words: UInt[Array, "..."]) -> Int[Array, "..."]:
    """The number of ones in each word."""
    return lax.population_count(words).astype(jnp.int32)


def first_ones(words: UInt[Array, " words"], count: Int[Array, ""]) -> UInt[Array, " words"]:
    """Keeps only the first `count` ones of a bitmap."""
    # First the row, then the word, then the bit in which the last of them is.
    padded = jnp.pad(words, (0, -words.shape[0] % ROW)).reshape(-1, ROW)
    totals = jnp.sum(ones(padded), axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(totals)
    row = jnp.minimum(jnp.sum(ends <= count, dtype=jnp.int32), ends.shape[0] - 1)
    counts = ones(padded[row])
    ends_within = jnp.cumsum(counts) + ends[row] - totals[row]
    column = jnp.minimum(jnp.sum(ends_within <= count, dtype=jnp.int32), ROW - 1)
    last = padded[row, column]
    rank = count - (ends_within[column] - counts[column])
    part = last & ((jnp.uint32(1) << nth_one(last, rank).astype(jnp.uint32)) - 1)
    cut, index = row * ROW + column, lax.iota(jnp.int32, words.shape[0])
    limited = jnp.where(index < cut, words, jnp.where(index == cut, part, jnp.uint32(0)))
    return jnp.where(count >= ends[-1], words, limited)


def nth_one(words: UInt[Array, "..."], rank: Int[Array, "..."]) -> Int[Array, "..."]:
    """The bit of the one number `rank`, from 0, in each word; any bit where a word has fewer ones."""
    # Binary search by the number of ones in the lower half.
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        lower = ones(words & jnp.uint32((1 << width) - 1))
        above = rank >= lower
        rank = jnp.where(above, rank - lower, rank)
        words = jnp.where(above, words >> width, words)
        place = jnp.where(above, place + width, place)
    return place


def positions(words: UInt[Array, " words"], count: int) -> Int[Array, " count"]:
    """The ascending positions of the first `count` ones of a bitmap; any of its positions after the last one."""
    counts = ones(words)
    # Each result finds its word by a running sum over the results at which words start, and its bit by counting.
    starts = running_sum(counts, most=WORD * words.shape[0]) - counts
    starting = jnp.zeros(count + 1, jnp.int32).at[jnp.minimum(starts, count)].add(1, mode="promise_in_bounds")
    # The words before the first one may be too many for the product of `running_sum`, of 2^29 bits or more.
    total = jnp.cumsum(starting) if words.shape[0] >= 2**24 else running_sum(starting, most=words.shape[0])
    word = total[:count] - 1
    rank = lax.iota(jnp.int32, count) - starts.at[word].get(mode="promise_in_bounds")
    return word * WORD + nth_one(words.at[word].get(mode="promise_in_bounds"), rank)


def from_positions(where: Int[Array, " count"], size: int) -> Shaped[Array, " size"]:
    """Booleans that are true at the given, different positions."""
    return jnp.zeros(size, jnp.bool_).at[where].set(True, mode="promise_in_bounds", unique_indices=True)
