"""Sets of positions as bitmaps: one bit an entry, and the positions of the ones without a sort."""

import jax.numpy as jnp
from jax import lax

from .._typing import Array, Int, Shaped, UInt

WORD = 32
ROW = 32


def to_bitmap(flags: Shaped[Array, "rows width"]) -> UInt[Array, "rows words"]:
    """Booleans as u32 words, the first in the lowest bit; the width is a multiple of 32."""
    rows, width = flags.shape
    # Eight to a byte first: of all forms this is the one that XLA:CPU vectorises, at the speed of memory.
    groups = flags.reshape(rows, width // 8, 8).astype(jnp.uint8)
    packed = jnp.sum(groups << lax.broadcasted_iota(jnp.uint8, groups.shape, 2), axis=2, dtype=jnp.uint8)
    return lax.bitcast_convert_type(packed.reshape(rows, width // WORD, 4), jnp.uint32)


def full(size: int) -> UInt[Array, " words"]:
    """The bitmap of all of `range(size)`."""
    left = jnp.clip(size - WORD * lax.iota(jnp.int32, -(-size // WORD)), 0, WORD)
    return jnp.where(left == WORD, jnp.uint32(2**WORD - 1), (jnp.uint32(1) << left.astype(jnp.uint32)) - 1)


def ones(words: UInt[Array, "..."]) -> Int[Array, "..."]:
    """How many bits of each word are set."""
    return lax.population_count(words).astype(jnp.int32)


def row_sums(counts: Int[Array, "rows width"]) -> Int[Array, " rows"]:
    """The sum of each row; halves are added as vectors first, since XLA:CPU adds the numbers of a row one by one."""
    while counts.shape[1] >= 1024:
        counts = jnp.pad(counts, [(0, 0), (0, -counts.shape[1] % 64)])
        eighth = counts.shape[1] // 8
        parts = [lax.slice_in_dim(counts, i * eighth, (i + 1) * eighth, axis=1) for i in range(8)]
        counts = sum(parts[1:], parts[0])
    return jnp.sum(counts, axis=1, dtype=jnp.int32)


def running_sum(x: Int[Array, " size"]) -> Int[Array, " size"]:
    """`jnp.cumsum` of integers whose sum is below `2**24`, in two levels: several times as fast on CPU."""
    size = x.shape[0]
    rows = jnp.pad(x, (0, -size % ROW)).reshape(-1, ROW)
    # Exact in float32, also where products are shortened by default.
    upper = lax.broadcasted_iota(jnp.int32, (ROW, ROW), 0) <= lax.broadcasted_iota(jnp.int32, (ROW, ROW), 1)
    within = jnp.dot(rows.astype(jnp.float32), upper.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    within = within.astype(jnp.int32)
    totals = within[:, -1]
    before = jnp.cumsum(totals) - totals
    return (within + before[:, None]).reshape(-1)[:size]


def first_ones(words: UInt[Array, " words"], count: Int[Array, ""]) -> UInt[Array, " words"]:
    """The same bitmap with only the first `count` of its ones."""
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
    """The place of the one number `rank`, from 0, in each word; any place where a word has fewer."""
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        lower = ones(words & jnp.uint32((1 << width) - 1))
        above = rank >= lower
        rank = jnp.where(above, rank - lower, rank)
        words = jnp.where(above, words >> width, words)
        place = jnp.where(above, place + width, place)
    return place


def positions(words: UInt[Array, " words"], count: int) -> Int[Array, " count"]:
    """The positions of the ones of a bitmap, ascending, when there are at least `count` of them.

    A slot finds its word by a running sum over the slots at which the words start, and its bit by counting.
    """
    counts = ones(words)
    starts = running_sum(counts) - counts
    begun = jnp.zeros(count + 1, jnp.int32).at[jnp.minimum(starts, count)].add(1, mode="promise_in_bounds")
    word = running_sum(begun)[:count] - 1
    rank = lax.iota(jnp.int32, count) - starts.at[word].get(mode="promise_in_bounds")
    return word * WORD + nth_one(words.at[word].get(mode="promise_in_bounds"), rank)


def from_positions(where: Int[Array, " count"], size: int) -> Shaped[Array, " size"]:
    """Booleans that are true at different positions."""
    return jnp.zeros(size, jnp.bool_).at[where].set(True, mode="promise_in_bounds", unique_indices=True)
