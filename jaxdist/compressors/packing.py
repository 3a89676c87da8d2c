"""Packs codes of 1 to 32 bits into bytes, and floats narrower than 32 bits into unsigned words."""

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from .._core.types import Array, Shaped, UInt

WORD_DTYPES = {1: jnp.uint8, 2: jnp.uint16}


def bytes_of_codes(size: int, bits: int) -> int:
    """The number of bytes that hold `size` codes: `ceil(size * bits / 8)`."""
    return -(-size * bits // 8)


def pack(codes: UInt[Array, "*batch size"], bits: int) -> UInt[Array, "*batch bytes"]:
    """Packs unsigned codes along the last axis: one stream of bits, lowest bits first, cut into bytes.

    A code must be below `2**bits`: higher bits would spill into its neighbors. The last axis of the result has
    `ceil(size * bits / 8)` u8 words, the last of which is filled with zeros. Any width from 1 to 32 bits is possible;
    those that tile a byte (1, 2, 4, 8) are the cheapest.

    Examples:
      >>> import jax.numpy as jnp
      >>> pack(jnp.array([1, 15, 7, 8], jnp.uint8), 4), pack(jnp.array([5, 4095], jnp.uint16), 12)
      (Array([241, 135], dtype=uint8), Array([  5, 240, 255], dtype=uint8))
    """
    _check_bits(bits)
    if bits > 8 * codes.dtype.itemsize:
        raise ValueError(f"bits must be at most those of the codes' dtype {codes.dtype}, got {bits}")
    *batch, size = codes.shape
    if bits == 8:
        return codes.astype(jnp.uint8)
    if bits in (16, 32):
        words = jax.lax.bitcast_convert_type(codes.astype(_code_dtype(bits)), jnp.uint8)
        return words.reshape(*batch, size * bits // 8)
    per_group, width = _group(bits)
    padding = -size % per_group
    if padding:
        codes = jnp.pad(codes, [(0, 0)] * len(batch) + [(0, padding)])
    groups = codes.reshape(*batch, (size + padding) // per_group, per_group)
    # Shifted codes share no bit, so their sum is their union; XLA fuses this form with whatever made the codes.
    if width == 1:
        return jnp.sum(groups.astype(jnp.uint8) << _shifts(groups.shape, bits), axis=-1, dtype=jnp.uint8)
    parts = [groups[..., i].astype(jnp.uint32) for i in range(per_group)]
    # One strided pass for each byte of a group: one sum over a table of shifts is twenty times slower on XLA:CPU.
    joined = jnp.stack([_join(parts, bits, 8, j).astype(jnp.uint8) for j in range(width)], axis=-1)
    return joined.reshape(*batch, groups.shape[-2] * width)[..., : bytes_of_codes(size, bits)]


def unpack(words: UInt[Array, "*batch bytes"], bits: int, size: int) -> UInt[Array, "*batch size"]:
    """Takes `size` codes of `bits` bits out of u8 words, as u8, u16 or u32: the inverse of `pack`.

    Examples:
      >>> import jax.numpy as jnp
      >>> unpack(jnp.array([241, 7], jnp.uint8), 4, 3), unpack(jnp.array([5, 240, 255], jnp.uint8), 12, 2)
      (Array([ 1, 15,  7], dtype=uint8), Array([   5, 4095], dtype=uint16))
    """
    _check_bits(bits)
    *batch, count = words.shape
    if bits == 8:
        return words[..., :size]
    if bits in (16, 32):
        used = words[..., : size * bits // 8].reshape(*batch, size, bits // 8)
        return jax.lax.bitcast_convert_type(used, _code_dtype(bits))
    per_group, width = _group(bits)
    if width == 1:
        spread = jnp.broadcast_to(words[..., None], (*batch, count, per_group))
        codes = (spread >> _shifts(spread.shape, bits)) & jnp.uint8(2**bits - 1)
        return codes.reshape(*batch, count * per_group)[..., :size]
    padding = -count % width
    if padding:
        words = jnp.pad(words, [(0, 0)] * len(batch) + [(0, padding)])
    groups = words.reshape(*batch, (count + padding) // width, width)
    parts = [groups[..., j].astype(jnp.uint32) for j in range(width)]
    # The last byte of a code also has bits of the next one.
    codes = [(_join(parts, 8, bits, i) & jnp.uint32(2**bits - 1)).astype(_code_dtype(bits)) for i in range(per_group)]
    return jnp.stack(codes, axis=-1).reshape(*batch, groups.shape[-2] * per_group)[..., :size]


def pack_on_host(codes: np.ndarray, bits: int) -> np.ndarray:
    """The words of `pack`, of a vector of codes in host memory.

    Examples:
      >>> pack_on_host(np.array([5, 4095]), 12).tolist()
      [5, 240, 255]
    """
    _check_bits(bits)
    width = 1 if bits <= 8 else 4
    parts = np.ascontiguousarray(codes, f"<u{width}").view(np.uint8).reshape(len(codes), width)
    return np.packbits(np.unpackbits(parts, axis=1, count=bits, bitorder="little"), bitorder="little")


def unpack_on_host(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """The codes of `unpack`, as u8 or u32, of words in host memory.

    Examples:
      >>> unpack_on_host(np.array([5, 240, 255], np.uint8), 12, 2).tolist()
      [5, 4095]
    """
    _check_bits(bits)
    spread = np.unpackbits(words, count=size * bits, bitorder="little").reshape(size, bits)
    if bits <= 8:
        return functools.reduce(operator.or_, [spread[:, i] << np.uint8(i) for i in range(bits)])
    parts = np.packbits(spread, axis=1, bitorder="little")
    return np.pad(parts, [(0, 0), (0, 4 - parts.shape[1])]).view("<u4")[:, 0]


def to_words(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The same bits as u8 or u16 words of the same shape, if `x` is narrower than 32 bits; other arrays as they are.

    XLA widens bfloat16 and float8 in the collectives of some backends, but moves words unchanged.

    Examples:
      >>> import jax.numpy as jnp
      >>> to_words(jnp.ones(2, jnp.bfloat16))
      Array([16256, 16256], dtype=uint16)
    """
    word = WORD_DTYPES.get(x.dtype.itemsize)
    return x if word is None else jax.lax.bitcast_convert_type(x, word)


def from_words(words: Shaped[Array, "..."], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """The array of `dtype` whose `to_words` is `words`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from_words(jnp.array([16256], jnp.uint16), jnp.bfloat16)
      Array([1], dtype=bfloat16)
    """
    return words if jnp.dtype(dtype) == words.dtype else jax.lax.bitcast_convert_type(words, dtype)


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 32:
        raise ValueError(f"bits must be in 1 to 32, got {bits}")


def _code_dtype(bits: int) -> DTypeLike:
    return jnp.uint8 if bits <= 8 else jnp.uint16 if bits <= 16 else jnp.uint32


def _group(bits: int) -> tuple[int, int]:
    """The smallest number of codes that fill whole bytes, and the number of bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _shifts(shape: tuple[int, ...], bits: int) -> UInt[Array, "..."]:
    return jax.lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 1) * jnp.uint8(bits)


def _join(parts: Sequence[Array], width: int, wanted: int, index: int) -> UInt[Array, "..."]:
    """Item `index` of `wanted` bits in a stream of parts of `width` bits each; higher bits are not cleared."""
    # Where each part begins, counted from the wanted item; those that do not overlap it are left out.
    offsets = [width * i - wanted * index for i in range(len(parts))]
    shifted = [
        part << jnp.uint32(offset) if offset >= 0 else part >> jnp.uint32(-offset)
        for part, offset in zip(parts, offsets)
        if -width < offset < wanted
    ]
    return functools.reduce(operator.or_, shifted)
