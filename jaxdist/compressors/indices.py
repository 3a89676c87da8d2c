"""Where the entries of a sparse payload were: ascending positions in about as few bits as there can be."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Int, Shaped, UInt
from .packing import pack, packed_size, unpack


def encode_positions(where: Int[Array, " count"], size: int) -> UInt[Array, " words"]:
    """Codes ascending, different positions in `range(size)`; always exact, and of a size known beforehand.

    Elias-Fano: of `q_s = p_s - s`, which never falls, the lowest `b` bits of each are packed, and the rest
    `h_s = q_s >> b` is a bitmap with ones at `h_s + s`. Together `k b + k + ((d - k) >> b)` bits for k of d positions,
    for the best b: up to a density of one half at most `2 - log2(e)` = 0.56 bits an entry more than the entropy of k
    positions that could be anywhere (and two bytes of rounding). Where that takes no fewer bytes (a few entries only),
    plain u16 (up to 65,536 positions) or u32.

    Args:
      where: the positions.
      size: d, below 2**31.

    Returns:
      u8 words, or plain u16 or u32.
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
    """The `count` positions in `range(size)` that `encode_positions` coded."""
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
    """How many bytes `encode_positions` takes for `count` positions in `range(size)`."""
    bits = _low_bits(count, size)
    return _plain_bytes(count, size) if bits is None else _coded_bytes(count, size, bits)


def _low_bits(count: int, size: int) -> int | None:
    """How many bits of each position to pack; `None`: plain words are no larger."""
    best = min(range(32), key=lambda bits: _coded_bytes(count, size, bits))
    return best if _coded_bytes(count, size, best) < _plain_bytes(count, size) else None


def _high_size(count: int, size: int, bits: int) -> int:
    return count + ((size - count) >> bits)


def _coded_bytes(count: int, size: int, bits: int) -> int:
    return packed_size(count, bits) + packed_size(_high_size(count, size, bits), 1)


def _plain_dtype(size: int) -> Any:
    return jnp.uint16 if size <= 2**16 else jnp.uint32


def _plain_bytes(count: int, size: int) -> int:
    return count * (2 if size <= 2**16 else 4)


WORD = 32
ROW = 32


def to_bitmap(flags: Shaped[Array, "rows width"]) -> UInt[Array, "rows words"]:
    """Booleans as u32 words, the first in the lowest bit; the width is a multiple of 32."""
    rows, width = flags.shape
    # Eight to a byte first: of all forms this is the one that XLA:CPU vectorizes, at the speed of memory.
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
