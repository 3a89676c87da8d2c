"""Integers of 4 and 8 bits: in blocks with a scale each (`int8`, `int4`), or from minimum to maximum (BAGUA)."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.descriptions import with_description
from .._core.dtypes import saturate
from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .._core.xla_quirks import hide_constants, largest_entry, largest_magnitude, smallest_entry
from .base import Compressor
from .one_pass import in_one_pass
from .packing import pack, unpack
from .random import KeyOrStream
from .rounding import (
    TINY,
    Rounding,
    check_block,
    from_buckets,
    from_unit,
    largest_error,
    powers_below,
    to_buckets,
    to_integers,
    whole_words,
    with_error,
)

# The factor by which 256 steps exceed the range, so that no rounding error makes a 257th code.
WIDER = 1.0 + 2.0**-20
# The smallest range, as a share of the largest magnitude, with which all codes are whole numbers in float32.
NARROWEST = 2.0**-15


class BlockPayload(NamedTuple):
    """Packed codes, and the scale of each block."""

    codes: UInt[Array, " bytes"]
    scales: Float[Array, " blocks"]


class MinMaxPayload(NamedTuple):
    """Codes, and the smallest and the largest entry."""

    codes: UInt[Array, " entries"]
    ends: Float[Array, " 2"]


@with_description
def int8(*, block: int = 256, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 255 evenly spaced numbers: `C(x)_i = s round(x_i / s)`, `s = max|x| / 127`.

    The largest entry is exact, the others are off by at most s/2. To nearest, for d entries in a block,
    `δ = 1 - (d-1) / (4·127² + d-1)`, 0.996 for 256, attained by one large entry among those of s/2, which become zero;
    for Gaussian entries the loss is 5e-5. At random the code is that of `qsgd(8, bucket=block)`, with ω = 0.0039.

    Blocks below 1.5e-36 have steps of 1.2e-38.

    On the wire: a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per block;
    3.9 times less than float32.

    Args:
      block: entries that share a scale. Smaller is more exact and costs 4 bytes per block: 64 to 1024.
      rounding: "nearest" loses half as much, with or without error feedback; "stochastic" is unbiased.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = int8(), jnp.array([127.0, -3.4, 0.0, 0.6])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([127.,  -3.,   0.,   1.], dtype=float32)

    References:
      T. Dettmers, "8-bit approximations for parallelism in deep learning", arXiv:1511.04561, 2015.
    """
    return _integers(8, block, rounding)


@with_description
def int4(*, block: int = 32, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 15 evenly spaced numbers: `C(x)_i = s round(x_i / s)`, `s = max|x| / 7`.

    As `int8`: to nearest `δ = 1 - (d-1) / (4·7² + d-1)`, 0.863 for 32 entries in a block, which needs error feedback;
    for Gaussian entries the loss is 0.009. At random the code is that of `qsgd(4, bucket=block)`, with ω = 0.14.
    Symmetric, since with 8 numbers below zero the largest positive entry would lose an eighth. Blocks below 8e-38 have
    steps of 1.2e-38.

    On the wire: half a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per
    block: 5 bits an entry, 6.4 times less than float32. Blocks of 16 to 256 are common; `mxfp4` has scales of one byte.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = int4(), jnp.array([7.0, -3.4, 0.0, 0.6])
      >>> payload = code.compress(x, jax.random.key(0))
      >>> payload.codes.nbytes, code.decompress(payload, x)
      (2, Array([ 7., -3.,  0.,  1.], dtype=float32))

    References:
      G. Wang et al., "ZeRO++: extremely efficient collective communication for giant model training", arXiv:2306.10209.
    """
    return _integers(4, block, rounding)


@with_description
def min_max_uint8() -> Compressor:
    """Rounds each entry to one of 256 multiples of a step, `C(x)_i = h round(x_i / h)`, `h = (max x - min x) / 255`.

    Codes count down from `round(max x / h)`; zero is a multiple where it is in the range. An entry is off
    by at most h/2, so `δ = 1 - d / (d + 2·255² - 2)` for d entries, attained by two ends of ±127.5 h among entries of
    h/2. For arrays on one side of zero; on both sides `int8` with blocks is as exact, and robust to outliers. BAGUA
    adds 1e-7 to the range; here it is widened by a millionth, so that arrays of any magnitude keep their digits.

    On the wire: a byte an entry and 8 bytes; 4 times less than float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = min_max_uint8(), jnp.array([-1.0, 0.0, 0.25, 1.0])
      >>> payload = code.compress(x, jax.random.key(0))
      >>> payload.codes, code.decompress(payload, x)[2]
      (Array([  1, 128, 160, 255], dtype=uint8), Array(0.25098..., dtype=float32))

    References:
      S. Gan et al., "BAGUA: scaling up distributed learning with system relaxations", arXiv:2107.01499, 2021.
    """

    def compress(x: Array, key: PRNGKeyArray) -> MinMaxPayload:
        del key
        # Or the products of constant entries would be reordered, and one of them may overflow.
        flat = hide_constants(x.reshape(-1).astype(jnp.float32))
        ends = jnp.stack([smallest_entry(flat, initial=jnp.inf), largest_entry(flat, initial=-jnp.inf)])
        _, inverse = powers_below(largest_entry(jnp.abs(ends)))
        step, lowest = _steps(ends * inverse)
        codes = jnp.clip(jnp.rint(flat * inverse / step) - lowest, 0, 255)
        return MinMaxPayload(codes.astype(jnp.int32).astype(jnp.uint8), ends)

    def decompress(payload: MinMaxPayload, like: Like) -> Array:
        largest = largest_entry(jnp.abs(payload.ends))
        unit, inverse = powers_below(largest)
        step, lowest = _steps(payload.ends * inverse)
        values = from_unit((payload.codes.astype(jnp.int32).astype(jnp.float32) + lowest) * step, unit)
        return saturate(values, like.dtype, jnp.isfinite(largest)).reshape(like.shape)

    def contraction(shape: Shape) -> float:
        size = max(math.prod(shape), 1)
        # The δ of the docstring, with steps that are wider by that factor.
        return max(0.0, 1.0 - WIDER**2 * size / (size + 2 * 255**2 - 2))

    return Compressor(compress, decompress, contraction=contraction)


def _integers(bits: int, block: int, rounding: Rounding) -> Compressor:
    check_block(block, rounding)
    # Symmetric: -offset itself is not used.
    most = 2 ** (bits - 1) - 1
    offset = 2 ** (bits - 1)

    def compress(x: Array, key: KeyOrStream) -> BlockPayload:
        blocks = to_buckets(x, block)
        scales = normal_scales(largest_magnitude(blocks), most)
        levels = to_integers(blocks * (1.0 / scales), rounding, key)
        # Clipped, since stochastic rounding errors, and integers made of NaN, must not exceed their bits.
        codes = (jnp.clip(levels, -most, most) + offset).astype(jnp.uint8)
        return BlockPayload(pack(codes.reshape(-1)[: whole_words(x.size, bits)], bits), scales[:, 0])

    def decompress(payload: BlockPayload, like: Like) -> Array:
        codes = unpack(payload.codes, bits, math.prod(like.shape)).astype(jnp.int32)
        levels = to_buckets((codes - offset).astype(jnp.float32), block)
        return from_buckets(levels, payload.scales, like)

    def error(shape: Shape) -> float:
        return largest_error(np.arange(most + 1.0), float(most), min(block, math.prod(shape)), rounding)

    return with_error(Compressor(in_one_pass(compress, block), decompress), error, rounding)


def normal_scales(largest: Float[Array, "*shape"], most: float | int) -> Float[Array, "*shape"]:
    """`largest / most`, at least the smallest normal number: a smaller scale would flush the block to zero."""
    return jnp.maximum(largest / most, TINY)


def _steps(ends: Float[Array, " 2"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The step, and the multiple of it that code 0 represents; from ends near 1, so that no step is flushed to zero."""
    span = jnp.maximum(ends[1] - ends[0], NARROWEST * largest_entry(jnp.abs(ends)))
    step = jnp.where(span == 0, 1.0, span * (WIDER / 255))
    return step, jnp.rint(ends[1] / step) - 255
