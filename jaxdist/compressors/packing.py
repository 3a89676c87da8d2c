"""Codes of 1, 2, 4 or 8 bits in bytes, and floats narrower than 32 bits as unsigned words."""

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._typing import Array, Shaped, UInt

WORD_DTYPES = {1: jnp.uint8, 2: jnp.uint16}


def packed_size(size: int, bits: int) -> int:
    """The number of bytes that hold `size` codes: `ceil(size * bits / 8)`."""
    return -(-size * bits // 8)


def pack(codes: UInt[Array, "*batch size"], bits: int) -> UInt[Array, "*batch bytes"]:
    """Packs unsigned codes along the last axis, the first code in the lowest bits of each byte.

    A code must be below `2**bits`: higher bits would spill into its neighbours. The last byte is filled with zeros.

    Args:
      codes: u8 codes, any number of leading axes.
      bits: 1, 2, 4 or 8.

    Returns:
      u8 words; the last axis has `ceil(size * bits / 8)` of them.

    Example:
      >>> import jax.numpy as jnp
      >>> pack(jnp.array([1, 15, 7, 8], jnp.uint8), 4)
      Array([241, 135], dtype=uint8)
    """
    per_byte = _codes_per_byte(bits)
    if per_byte == 1:
        return codes
    *batch, size = codes.shape
    padding = -size % per_byte
    if padding:
        codes = jnp.pad(codes, [(0, 0)] * len(batch) + [(0, padding)])
    groups = codes.reshape(*batch, (size + padding) // per_byte, per_byte)
    # The shifted codes share no bit, so their sum is their union; XLA fuses this form with whatever made the codes.
    return jnp.sum(groups << _shifts(groups.shape, bits), axis=-1, dtype=jnp.uint8)


def unpack(words: UInt[Array, "*batch bytes"], bits: int, size: int) -> UInt[Array, "*batch size"]:
    """Takes `size` codes of `bits` bits out of u8 words: the inverse of `pack`.

    Args:
      words: what `pack` returned.
      bits: 1, 2, 4 or 8, as it was packed.
      size: how many codes there were; what follows them is dropped.

    Returns:
      u8 codes.

    Example:
      >>> import jax.numpy as jnp
      >>> unpack(jnp.array([241, 7], jnp.uint8), 4, 3)
      Array([ 1, 15,  7], dtype=uint8)
    """
    per_byte = _codes_per_byte(bits)
    if per_byte == 1:
        return words[..., :size]
    *batch, count = words.shape
    spread = jnp.broadcast_to(words[..., None], (*batch, count, per_byte))
    codes = (spread >> _shifts(spread.shape, bits)) & jnp.uint8(2**bits - 1)
    return codes.reshape(*batch, count * per_byte)[..., :size]


def to_words(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The same bits as u8 or u16 words where `x` is narrower than 32 bits; other arrays as they are.

    XLA widens bfloat16 and float8 in the collectives of some backends, but moves words unchanged.

    Args:
      x: an array of any dtype of at least 8 bits.

    Returns:
      An array of the same shape and the same number of bytes.

    Example:
      >>> import jax.numpy as jnp
      >>> to_words(jnp.ones(2, jnp.bfloat16))
      Array([16256, 16256], dtype=uint16)
    """
    word = WORD_DTYPES.get(x.dtype.itemsize)
    return x if word is None else jax.lax.bitcast_convert_type(x, word)


def from_words(words: Shaped[Array, "..."], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """The array of `dtype` whose `to_words` is `words`.

    Args:
      words: what `to_words` returned.
      dtype: the dtype that went into `to_words`.

    Returns:
      An array of `dtype` with the shape of `words`.

    Example:
      >>> import jax.numpy as jnp
      >>> from_words(jnp.array([16256], jnp.uint16), jnp.bfloat16)
      Array([1], dtype=bfloat16)
    """
    return words if jnp.dtype(dtype) == words.dtype else jax.lax.bitcast_convert_type(words, dtype)


def _codes_per_byte(bits: int) -> int:
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits must be 1, 2, 4 or 8 so that codes tile a byte, got {bits}")
    return 8 // bits


def _shifts(shape: tuple[int, ...], bits: int) -> UInt[Array, "..."]:
    return jax.lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 1) * jnp.uint8(bits)
