"""Positions of a sparse payload in nearly the fewest bits (Elias-Fano codes), and the bitmaps they are made from.

`encode_positions` and `decode_positions` are the code; the functions on bitmaps of u32 words select and find the ones.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Int, Shaped, UInt
from .packing import pack, packed_size, unpack

# Bits of a word of a bitmap, and words or numbers that are summed in one product or search.
WORD = 32
ROW = 32


def encode_positions(where: Int[Array, " count"], size: int) -> UInt[Array, " words"]:
    """Encodes ascending, different positions in `range(size)` exactly, in a number of bytes known beforehand.

    Elias-Fano: of `q_s = p_s - s`, which does not decrease, the lowest `b` bits of each are packed, and the rest
    `h_s = q_s >> b` is a bitmap with ones at `h_s + s`. Together `k b + k + ((d - k) >> b)` bits for k of d positions,
    for the best b: up to a density of one half at most `2 - log2(e)` = 0.56 bits an entry more than the entropy of k
    arbitrary positions (and two bytes of rounding). Where that takes no fewer bytes (few entries), plain u16 (up to
    65,536 positions) or u32.

    Args:
      where: the positions.
      size: d, below 2**31.

    Returns:
      u8 words, or plain u16 or u32.

    References:
      P. Elias, "Efficient storage and retrieval by content and address of static files", 1974.
    """
    count = where.shape[0]
    bits = _low_bits(count, size)
    if bits is None:
        return where.astype(_plain_dtype(size))
    rest = where - lax.iota(jnp.int32, count)
    ones_at = (rest >> bits) + lax.iota(jnp.int32, count)
    high = pack(from_positions(ones_at, _high_size(count, size, bits)).astype(jnp.uint8), 1)
    low = (rest & (2**bits - 1)).astype(jnp.uint32)
    return high if bits == 0 else jnp.concatenate([pack(low, bits), high])


def decode_positions(words: UInt[Array, " words"], count: int, size: int) -> Int[Array, " count"]:
    """Decodes the `count` positions in `range(size)`; the inverse of `encode_positions`."""
    bits = _low_bits(count, size)
    if bits is None:
        return words.astype(jnp.int32)
    cut = packed_size(count, bits)
    high = jnp.pad(words[cut:], (0, -(words.shape[0] - cut) % 4)).reshape(-1, 4)
    places = positions(lax.bitcast_convert_type(high, jnp.uint32), count)
    if bits == 0:
        return places
    index = lax.iota(jnp.int32, count)
    return (((places - index) << bits) | unpack(words[:cut], bits, count).astype(jnp.int32)) + index


def positions_bytes(count: int, size: int) -> int:
    """The number of bytes of `encode_positions` for `count` positions in `range(size)`."""
    bits = _low_bits(count, size)
    return _plain_bytes(count, size) if bits is None else _elias_fano_bytes(count, size, bits)


def _low_bits(count: int, size: int) -> int | None:
    """The number of packed bits of each position; `None` where plain words take no more bytes."""
    best = min(range(32), key=lambda bits: _elias_fano_bytes(count, size, bits))
    return best if _elias_fano_bytes(count, size, best) < _plain_bytes(count, size) else None


def _high_size(count: int, size: int, bits: int) -> int:
    return count + ((size - count) >> bits)


def _elias_fano_bytes(count: int, size: int, bits: int) -> int:
    return packed_size(count, bits) + packed_size(_high_size(count, size, bits), 1)


def _plain_dtype(size: int) -> Any:
    return jnp.uint16 if size <= 2**16 else jnp.uint32


def _plain_bytes(count: int, size: int) -> int:
    return count * (2 if size <= 2**16 else 4)


def to_bitmap(flags: Shaped[Array, "rows width"]) -> UInt[Array, "rows words"]:
    """Booleans as u32 words, the first in the lowest bit; the width is a multiple of 32."""
    rows, width = flags.shape
    # Eight to a byte first, since this is the only form that XLA:CPU vectorizes, at the speed of memory.
    groups = flags.reshape(rows, width // 8, 8).astype(jnp.uint8)
    packed = jnp.sum(groups << lax.broadcasted_iota(jnp.uint8, groups.shape, 2), axis=2, dtype=jnp.uint8)
    return lax.bitcast_convert_type(packed.reshape(rows, width // WORD, 4), jnp.uint32)


def full(size: int) -> UInt[Array, " words"]:
    """The bitmap with all ones of `range(size)`."""
    left = jnp.clip(size - WORD * lax.iota(jnp.int32, -(-size // WORD)), 0, WORD)
    return jnp.where(left == WORD, jnp.uint32(2**WORD - 1), (jnp.uint32(1) << left.astype(jnp.uint32)) - 1)


def ones(words: UInt[Array, "..."]) -> Int[Array, "..."]:
    """The number of ones in each word."""
    return lax.population_count(words).astype(jnp.int32)


def row_sums(counts: Int[Array, "rows width"]) -> Int[Array, " rows"]:
    """The sum of each row."""
    # Eighths are added as vectors first, since XLA:CPU adds the numbers of a row one by one.
    while counts.shape[1] >= 1024:
        counts = jnp.pad(counts, [(0, 0), (0, -counts.shape[1] % 64)])
        eighth = counts.shape[1] // 8
        parts = [lax.slice_in_dim(counts, i * eighth, (i + 1) * eighth, axis=1) for i in range(8)]
        counts = sum(parts[1:], parts[0])
    return jnp.sum(counts, axis=1, dtype=jnp.int32)


def running_sum(x: Int[Array, " size"]) -> Int[Array, " size"]:
    """`jnp.cumsum` of integers whose sum is below `2**24`."""
    # In two levels, of which the lower is a product with a triangular matrix: several times as fast on XLA:CPU.
    size = x.shape[0]
    rows = jnp.pad(x, (0, -size % ROW)).reshape(-1, ROW)
    # Exact in float32; HIGHEST, since some backends multiply in lower precision by default.
    upper = lax.broadcasted_iota(jnp.int32, (ROW, ROW), 0) <= lax.broadcasted_iota(jnp.int32, (ROW, ROW), 1)
    within = jnp.dot(rows.astype(jnp.float32), upper.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    within = within.astype(jnp.int32)
    totals = within[:, -1]
    before = jnp.cumsum(totals) - totals
    return (within + before[:, None]).reshape(-1)[:size]


def first_ones(words: UInt[Array, " words"], count: Int[Array, ""]) -> UInt[Array, " words"]:
    """Keeps only the first `count` ones of a bitmap."""
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
    """The ascending positions of the first `count` ones of a bitmap that has at least that number of ones."""
    counts = ones(words)
    # Each result finds its word by a running sum over the results at which words start, and its bit by counting.
    starts = running_sum(counts) - counts
    starting = jnp.zeros(count + 1, jnp.int32).at[jnp.minimum(starts, count)].add(1, mode="promise_in_bounds")
    word = running_sum(starting)[:count] - 1
    rank = lax.iota(jnp.int32, count) - starts.at[word].get(mode="promise_in_bounds")
    return word * WORD + nth_one(words.at[word].get(mode="promise_in_bounds"), rank)


def from_positions(where: Int[Array, " count"], size: int) -> Shaped[Array, " size"]:
    """Booleans that are true at the given, different positions."""
    return jnp.zeros(size, jnp.bool_).at[where].set(True, mode="promise_in_bounds", unique_indices=True)
