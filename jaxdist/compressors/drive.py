"""DRIVE: signs of a randomly rotated vector."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.types import Array, Float, Like, PRNGKeyArray, UInt
from .._core.xla_quirks import sum_rows
from .compressor import Compressor
from .packing import pack_signs, unpack
from .random import key_words, mix
from .rounding import from_buckets, from_unit, to_unit


class DrivePayload(NamedTuple):
    """Signs of the rotated entries, eight to a byte, the scale of each block, and the seed of the rotation."""

    signs: UInt[Array, " bytes"]
    scales: Float[Array, " blocks"]
    seed: UInt[Array, ""]


@with_description
def drive(*, block: int = 256) -> Compressor:
    """Rotates each block at random and sends signs and a scale: `C(x) = s Rᵀ sgn(R x)`, `s = |R x|₁ / d`.

    `R = H D / sqrt(d)` with the Hadamard matrix H of a block of d entries and random signs D, the same for all blocks
    of an array. R spreads every entry over its block, so that signs suit any block: by Khintchine's inequality
    `E|C(x) - x|² <= |x|² / 2`. δ = 1/2, attained by two equal entries among zeros, where `scaled_sign` promises 1/d.
    One entry alone is exact; for Gaussian entries both keep 2/π = 0.64.

    This is the scale with the least error; `|x|² / |R x|₁`, which is unbiased for uniformly random rotations, is not
    for this one: (2, 1) would always decode to (2.5, 0).

    *On the wire*: a bit an entry of whole blocks, 4 bytes of scale per block, and 4 bytes of seed: 1.125 bits an entry.
    An array shorter than a block is one of the next power of two.

    Args:
      block: entries that are rotated together, a power of two from 8 on. The work for an entry grows with it, the bytes
        of scales fall: 128 to 1024.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = drive(), jnp.zeros(256).at[77].set(5.0)
      >>> found = jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      >>> bool(jnp.allclose(found, x, atol=1e-5))
      True

    References:
      Vargaftik et al., "DRIVE: one-bit distributed mean estimation", arXiv:2105.08339, 2021.
      Szarek, "On the best constants in the Khinchin inequality", Studia Mathematica 58, 1976.
    """
    if block < 8 or block & (block - 1):
        raise ValueError(f"block must be a power of two from 8 on, got {block}")

    def compress(x: Array, key: PRNGKeyArray) -> DrivePayload:
        width = _width(x.size, block)
        flat = jnp.pad(x.reshape(-1).astype(jnp.float32), (0, -x.size % width))
        seed, _ = key_words(key)
        blocks = to_unit(flat.reshape(-1, width))
        # R x = H D x / sqrt(d), and s = |R x|₁ / d.
        rotated = _product(blocks.rows * _random_signs(seed, width), width)
        # A mean is at most the largest magnitude, except for rounding errors.
        scales = from_unit(jnp.minimum(sum_rows(jnp.abs(rotated)) / width, blocks.largest), blocks.unit)
        return DrivePayload(pack_signs(rotated.reshape(-1)), scales[:, 0], seed)

    def decompress(payload: DrivePayload, like: Like) -> Array:
        size = math.prod(like.shape)
        width = _width(size, block)
        bits = unpack(payload.signs, 1, 8 * payload.signs.size).reshape(-1, width)
        # Scaled last: the sums of a block may be larger than its entries, and than the largest float.
        rotated = _product(jnp.where(bits == 1, 1.0, -1.0).astype(jnp.float32), width)
        return from_buckets(rotated * _random_signs(payload.seed, width), payload.scales, like)

    return Compressor(compress, decompress, contraction=lambda shape: 0.5)


def _width(size: int, block: int) -> int:
    """Entries of a block of an array: `block`, or a smaller power of two that holds the array."""
    return min(block, max(8, 1 << max(size - 1, 0).bit_length()))


def _random_signs(seed: UInt[Array, ""], width: int) -> Float[Array, "1 width"]:
    words = mix(mix(jax.lax.iota(jnp.uint32, width)) ^ seed)
    return jnp.where(words >> 31 == 1, 1.0, -1.0).astype(jnp.float32)[None]


def _product(rows: Float[Array, "blocks width"], width: int) -> Float[Array, "blocks width"]:
    """`H rows / sqrt(width)`; as a product of matrices, which beats the fast transform's passes over memory."""
    return jnp.matmul(rows, jnp.asarray(_hadamard(width)), precision=jax.lax.Precision.HIGHEST)


def _hadamard(width: int) -> np.ndarray:
    """Symmetric and orthonormal."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(width))
