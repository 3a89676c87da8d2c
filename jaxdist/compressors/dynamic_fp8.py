"""Blocks of 8-bit floats whose sign bit joins the exponent where no entry is negative, for states of optimizers."""

import math

import jax
import jax.numpy as jnp

from .._core.types import Array, Float, Int, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .blocks import BlockPayload
from .minifloat import BIAS, MANTISSA, Minifloat, decode, encode, magnitudes
from .rounding import Rounding, check_block, from_buckets, largest_error, to_buckets, whole_words, with_error
from .rows import largest_magnitude

# Eight bits of magnitude: 0 to 31/16, four digits of mantissa. The upper half of its codes, 2^8 times larger, is the
# range of magnitudes with a sign.
UNSIGNED = Minifloat(bits=9, mantissa=4, emin=-14, emax=0, largest_code=0xFF)
SIGN, LIFT = 0x80, 2.0**8
# Added to the bits of a float it carries into the exponent beyond 31/16 of a power of two.
CARRY = (1 << MANTISSA) // 16 - 1
# The scale of a block that has NaN or infinity: negative entries and the exponent of zeros, which no other block has.
NOT_FINITE = SIGN


def dynamic_fp8(*, block: int = 32, rounding: Rounding = "stochastic") -> Compressor:
    """Rounds each block to 8-bit floats with 4 digits of mantissa: `C(x)_i = s float8(x_i / s)`, s a power of 4.

    Made for the moments of optimizers. A block with negative entries (a momentum) has a sign and 7 bits, the numbers
    from `2^-10 s` to `1.9 s`; a block without (a second moment) has 8 bits for the magnitude, from `2^-18 s` to
    `1.9 s`, and in it nothing above zero becomes zero, or Adam would divide by it. Both are off by at most a 17th of
    themselves, to nearest by a 33rd.

    Since the scale is a power, the representable numbers stay the same while entries of the block change: an average
    that moves by a thousandth in a step is rounded up or down at random, unbiased, and one that does not move is not
    changed. For `v' = 0.999 v + 0.001 g²` that leaves a standard deviation of about 0.15 v, 7% of Adam's step.

    Arithmetic is float32 whatever the dtype of x. δ = 0.999. A block with NaN or infinity decodes to such; what
    is above 3.2e38 decodes to that.

    On the wire, or in memory: a byte an entry (in whole 32-bit words where there are several blocks) and a byte per
    block: 8.25 bits an entry.

    Args:
      block: entries that share a scale of one byte. Larger blocks contain second moments of a wider range than a block
        can represent: 32 to 128.
      rounding: "stochastic" is unbiased except for entries below `2^-18 s`; "nearest" loses half as much, and freezes
        an average that moves by less than half a digit in a step.

    Returns:
      A compressor; payloads are gathered, not summed.

    Raises:
      ValueError: `block` is below 1, or `rounding` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, v = dynamic_fp8(), jnp.array([1.0, 0.0625, 3e-4, 1e-12])
      >>> code.decompress(code.compress(v, jax.random.key(0)), v).tolist()[:2]
      [1.0, 0.0625]
      >>> bool((code.decompress(code.compress(v, jax.random.key(0)), v) > 0).all())
      True

    References:
      T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit optimizers via block-wise quantization",
      arXiv:2110.02861, 2021 (blocks, and codes for small and large entries; theirs are a table, and to nearest).
    """
    check_block(block, rounding)

    def compress(x: Array, key: PRNGKeyArray) -> BlockPayload:
        blocks = to_buckets(x, block)
        signed = largest_magnitude(jnp.minimum(blocks, 0.0)) > 0
        largest = largest_magnitude(blocks)
        words = _exponents(largest)
        # `2 / s`, whose exponent is that of a normal number for every s but that of zeros, and a half.
        doubled = _from_exponents(jnp.minimum(2 * BIAS + 1 - 2 * words, 2 * BIAS))
        scaled = jnp.abs(blocks) * doubled * jnp.where(signed, 0.5 / LIFT, 0.5)
        codes = encode(scaled, UNSIGNED, rounding, key).astype(jnp.int32)
        with_sign = jnp.minimum(codes, SIGN - 1) | jnp.where(blocks < 0, SIGN, 0)
        codes = jnp.where(signed, with_sign, jnp.maximum(codes, (blocks > 0).astype(jnp.int32))).astype(jnp.uint8)
        scales = jnp.where(jnp.isfinite(largest), words | jnp.where(signed, SIGN, 0), NOT_FINITE)
        return BlockPayload(codes.reshape(-1)[: whole_words(x.size, 8)], scales.astype(jnp.uint8)[:, 0])

    def decompress(payload: BlockPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        rows = _rows(payload.codes[:size], block)
        words = payload.scales.astype(jnp.int32)
        scales = jnp.where(words == NOT_FINITE, jnp.nan, _from_exponents(2 * (words & (SIGN - 1))))
        beside_sign = decode(rows & (SIGN - 1), UNSIGNED) * jnp.where(rows >= SIGN, -LIFT, LIFT)
        return from_buckets(jnp.where(words[:, None] >= SIGN, beside_sign, decode(rows, UNSIGNED)), scales, like)

    def error(shape: Shape) -> float:
        grid = magnitudes(UNSIGNED)[:SIGN]
        # The largest entry of a block is above a fourth of the largest number.
        return largest_error(grid, float(grid[-1]) / 4, min(block, math.prod(shape)), "stochastic")

    code = Compressor(compress, decompress)
    # Not unbiased: positive entries never become zero.
    return with_error(code, error, "nearest")


def _exponents(largest: Float[Array, "blocks 1"]) -> Int[Array, "blocks 1"]:
    """Half the biased exponent of the smallest `s = 2^(2k+1)` with `largest <= 31/16 s`; 0 for zeros, at most 127."""
    bits = jnp.minimum(jax.lax.bitcast_convert_type(largest, jnp.int32), 0xFF << MANTISSA)
    return jnp.minimum(((bits + CARRY >> MANTISSA) + 1) >> 1, BIAS)


def _from_exponents(biased: Int[Array, "*blocks"]) -> Float[Array, "*blocks"]:
    return jax.lax.bitcast_convert_type(biased << MANTISSA, jnp.float32)


def _rows(codes: UInt[Array, " size"], block: int) -> UInt[Array, "blocks width"]:
    """As `to_buckets`, of codes."""
    width = min(block, max(codes.size, 1))
    return jnp.pad(codes, (0, -codes.size % width)).reshape(-1, width)
