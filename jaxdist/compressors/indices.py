"""Where the entries of a sparse payload were: ascending positions in about as few bits as there can be."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._typing import Array, Int, UInt
from .bitmaps import from_positions, positions
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
