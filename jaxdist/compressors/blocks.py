"""Short blocks with a scale each: integers of 4 and 8 bits."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._typing import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .buckets import from_buckets, sent, to_buckets
from .packing import pack, unpack
from .rounding import Rounding, check_block, largest_error, to_integers, with_error
from .rows import TINY, largest_magnitude


class BlockPayload(NamedTuple):
    """Packed codes, and what the numbers of each block that they stand for are multiplied by."""

    codes: UInt[Array, " bytes"]
    scales: Float[Array, " blocks"]


def int8(*, block: int = 256, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 255 evenly spaced numbers: `C(x)_i = s round(x_i / s)`, `s = max|x| / 127`.

    The largest entry is exact, the others are off by at most s/2. To nearest, for d entries in a block,
    `δ = 1 - (d-1) / (4·127² + d-1)`, 0.996 for 256, attained by one large entry among those of s/2, which become zero;
    for Gaussian entries the loss is 5e-5. At random the code is that of `qsgd(8, bucket=block)`, with ω = 0.0039.

    Arithmetic is float32 whatever the dtype of x. Blocks below 1.5e-36 have steps of 1.2e-38; a block with NaN or
    infinity decodes to such.

    On the wire: a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per block;
    3.9 times less than float32.

    Args:
      block: entries that share a scale. Smaller is more exact and costs 4 bytes per block: 64 to 1024.
      rounding: "nearest" loses half as much; inside error feedback, or as it is. "stochastic" is right on average.

    Returns:
      A compressor, unbiased with stochastic rounding; payloads are gathered, not summed.

    Raises:
      ValueError: `block` is below 1, or there is no such rounding.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = int8(), jnp.array([127.0, -3.4, 0.0, 0.6])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([127.,  -3.,   0.,   1.], dtype=float32)

    References:
      T. Dettmers, "8-bit approximations for parallelism in deep learning", arXiv:1511.04561, 2015.
      T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit optimizers via block-wise quantization",
      arXiv:2110.02861, 2021.
    """
    return _integers(8, block, rounding)


def int4(*, block: int = 32, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 15 evenly spaced numbers: `C(x)_i = s round(x_i / s)`, `s = max|x| / 7`.

    The largest entry is exact, the others are off by at most s/2: symmetric, since with 8 numbers below zero the
    largest positive entry would lose an eighth. To nearest, for d entries in a block, `δ = 1 - (d-1) / (4·7² + d-1)`,
    0.863 for 32; for Gaussian entries the loss is 0.009. At random the code is that of `qsgd(4, bucket=block)`, with
    ω = 0.14.

    Arithmetic is float32 whatever the dtype of x. Blocks below 8e-38 have steps of 1.2e-38; a block with NaN or
    infinity decodes to such.

    On the wire: half a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per
    block: 5 bits an entry, 6.4 times less than float32. `mxfp4` has scales of one byte.

    Args:
      block: entries that share a scale. Smaller is more exact and costs 4 bytes per block: 16 to 256.
      rounding: "nearest" loses half as much and wants error feedback; "stochastic" is right on average.

    Returns:
      A compressor, unbiased with stochastic rounding; payloads are gathered, not summed.

    Raises:
      ValueError: `block` is below 1, or there is no such rounding.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = int4(), jnp.array([7.0, -3.4, 0.0, 0.6])
      >>> payload = code.compress(x, jax.random.key(0))
      >>> payload.codes.nbytes, code.decompress(payload, x)
      (2, Array([ 7., -3.,  0.,  1.], dtype=float32))

    References:
      G. Wang et al., "ZeRO++: extremely efficient collective communication for giant model training",
      arXiv:2306.10209, 2023.
    """
    return _integers(4, block, rounding)


def _integers(bits: int, block: int, rounding: Rounding) -> Compressor:
    check_block(block, rounding)
    most = 2 ** (bits - 1) - 1
    offset = 2 ** (bits - 1)

    def compress(x: Array, key: PRNGKeyArray) -> BlockPayload:
        blocks = to_buckets(x, block)
        scales = normal_scales(largest_magnitude(blocks), most)
        levels = to_integers(blocks * (1.0 / scales), rounding, key)
        # The clip: rounding errors at random, and whatever NaN becomes, must stay inside their bits.
        codes = (jnp.clip(levels, -most, most) + offset).astype(jnp.uint8)
        return BlockPayload(pack(codes.reshape(-1)[: sent(x.size, bits)], bits), scales[:, 0])

    def decompress(payload: BlockPayload, like: Like) -> Array:
        codes = unpack(payload.codes, bits, math.prod(like.shape)).astype(jnp.int32)
        levels = to_buckets((codes - offset).astype(jnp.float32), block)
        return from_buckets(levels, payload.scales, like)

    def error(shape: Shape) -> float:
        return largest_error(np.arange(most + 1.0), float(most), min(block, math.prod(shape)), rounding)

    return with_error(Compressor(compress, decompress), error, rounding)


def normal_scales(largest: Float[Array, "*shape"], most: float | int) -> Float[Array, "*shape"]:
    """`largest / most`, or the smallest normal number: one below is flushed to zero, and the block with it."""
    return jnp.maximum(largest / most, TINY)
