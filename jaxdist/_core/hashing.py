"""Hashes of the bits of arrays to 32 bits: they detect copies that differ, and choose random draws."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .dtypes import working_dtype
from .types import Array, UInt
from .xla_quirks import reduce_all

# Odd numbers with irregular bits: the golden ratio times 2³², and the multipliers of MurmurHash3.
GOLDEN, FIRST, SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def hash_of(x: np.ndarray) -> int:
    """Hashes an array on the host, without compiling; equal to `hash_array`."""
    width = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    return int(_mix_words(np.ascontiguousarray(x).reshape(-1).view(width).astype(np.uint32), np).sum(dtype=np.uint32))


def hash_array(x: Array) -> UInt[Array, ""]:
    """Hashes an array of any dtype on its device: a sum of mixed words, so the order of adding does not matter."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.iscomplexobj(x):
        # As they are stored: the real and the imaginary part of each number side by side.
        x = jnp.stack([x.real, x.imag], -1)
    # Numbers of less than a byte become the bytes in which NumPy, and so `hash_of`, has them.
    widths = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}
    width = widths[jax.dtypes.itemsize_bits(x.dtype)]
    words = lax.bitcast_convert_type(x, width).astype(jnp.uint32).ravel()
    return reduce_all(partial(jnp.sum, dtype=jnp.uint32), _mix_words(words, jnp))


def _mix_words(words: Any, xp: Any) -> Any:
    # Mixed with its position, so that permuted entries have another hash.
    position = xp.arange(words.size, dtype=xp.uint32) * xp.uint32(GOLDEN)
    mixed = (words ^ position) * xp.uint32(FIRST)
    return (mixed ^ (mixed >> 15)) * xp.uint32(SECOND)


def cheap_hash(arrays: Sequence[Array]) -> Array:
    """Hashes the values of several arrays by a weighted sum of words, which is cheap compared with any compressor."""
    total = jnp.zeros((), jnp.uint32)
    for x in arrays:
        wide = x.astype(working_dtype(x.dtype)).ravel()
        words = lax.bitcast_convert_type(wide.astype(jnp.float32), jnp.uint32)
        # Odd weights: every word can change the sum, and exchanged words do.
        odd = 2 * lax.iota(jnp.uint32, words.size) + 1
        total = total * jnp.uint32(GOLDEN) + (words * odd).sum(dtype=jnp.uint32)
    return total
