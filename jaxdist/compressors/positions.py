"""Ascending positions of the entries of a sparse payload, in nearly the fewest bytes (Elias-Fano)."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.types import Array, Int, UInt
from .bitmaps import WORD, from_positions, positions, to_bitmap
from .packing import bytes_of_codes, pack, pack_on_host, unpack, unpack_on_host


def encode_positions(where: Int[Array, " count"], size: int) -> UInt[Array, " words"]:
    """Encodes ascending, different positions in `range(size)` exactly, in a number of bytes known beforehand.

    Elias-Fano: of `q_s = p_s - s`, which does not decrease, the lowest `b` bits of each are packed, and the rest
    `h_s = q_s >> b` is a bitmap with ones at `h_s + s`. Together `k b + k + ((d - k) >> b)` bits for k of d positions,
    for the best b: up to a density of one half at most `2 - log2(e)` = 0.56 bits an entry more than the entropy of k
    arbitrary positions (and two bytes of rounding). Where that takes no fewer bytes (few entries), plain u16 (up to
    65,536 positions) or u32. d is below 2**31.

    References:
      Elias, "Efficient storage and retrieval by content and address of static files", 1974.
    """
    count = where.shape[0]
    bits = _low_bits(count, size)
    if bits is None:
        return where.astype(jnp.uint16 if size <= 2**16 else jnp.uint32)
    # q_s, whose high parts h_s are ones at h_s + s.
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
    # The low parts come first; the bitmap of the high ones follows.
    cut, length = bytes_of_codes(count, bits), _high_size(count, size, bits)
    places = positions(to_bitmap(jnp.pad(unpack(words[cut:], 1, length), (0, -length % WORD))), count)
    if bits == 0:
        return places
    index = lax.iota(jnp.int32, count)
    # p_s = (h_s << b | low) + s, with h_s + s among the places.
    return (((places - index) << bits) | unpack(words[:cut], bits, count).astype(jnp.int32)) + index


def encode_host_positions(where: np.ndarray, size: int) -> np.ndarray:
    """The words of `encode_positions`, of positions in host memory."""
    count = len(where)
    bits = _low_bits(count, size)
    if bits is None:
        return where.astype(np.uint16 if size <= 2**16 else np.uint32)
    index = np.arange(count)
    rest = where - index
    bitmap = np.zeros(_high_size(count, size, bits), np.uint8)
    bitmap[(rest >> bits) + index] = 1
    high = pack_on_host(bitmap, 1)
    return np.append(pack_on_host(rest & (2**bits - 1), bits), high) if bits else high


def decode_host_positions(words: np.ndarray, count: int, size: int) -> np.ndarray:
    """The positions of `decode_positions`, as int64, of words in host memory."""
    bits = _low_bits(count, size)
    if bits is None:
        return words.astype(np.int64)
    cut = bytes_of_codes(count, bits)
    places = np.flatnonzero(unpack_on_host(words[cut:], 1, _high_size(count, size, bits)))
    if bits == 0:
        return places
    index = np.arange(count)
    return (((places - index) << bits) | unpack_on_host(words[:cut], bits, count)) + index


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
    return bytes_of_codes(count, bits) + bytes_of_codes(_high_size(count, size, bits), 1)


def _plain_bytes(count: int, size: int) -> int:
    return count * (2 if size <= 2**16 else 4)
