"""Floats of 8 bits whose exponents follow the range of each block, for optimizer states."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from .._core.descriptions import with_description
from .._core.types import Array, Float, Int, Like, Shape, UInt
from .._core.xla_quirks import largest_magnitude
from .block_floats import BIAS, MANTISSA, Minifloat, decode, encode, from_exponents, magnitudes
from .blocks import BlockPayload
from .compressor import Compressor
from .one_pass import in_blocks
from .random import KeyOrStream
from .rounding import Rounding, check_block, from_rows, from_unit, largest_error, to_buckets, whole_words, with_error

# Eight bits of magnitude: 0 to 31/16, four digits of mantissa. The upper half of its codes, 2^8 times larger, is the
# range of magnitudes with a sign.
UNSIGNED = Minifloat(bits=9, mantissa=4, emin=-14, emax=0, largest_code=0xFF)
SIGN, LIFT = 0x80, 2.0**8
# The scale of a block that has NaN or infinity: negative entries and the exponent of zeros, which no other block has.
NO_SCALE = SIGN
# Added to the bits of a float it carries into the exponent beyond 31/16 of a power of two.
CARRY = (1 << MANTISSA) // 16 - 1


@with_description
def dynamic_fp8(*, block: int = 32, rounding: Rounding = "stochastic") -> Compressor:
    """Rounds each block to 8-bit floats with 4 digits of mantissa: `C(x)_i = s float8(x_i / s)`, s a power of 4.

    Made for the moments of optimizers. A block with negative entries (a momentum) has a sign and 7 bits, the numbers
    from `2^-10 s` to `1.9 s`; a block without (a second moment) has 8 bits for the magnitude, from `2^-18 s` to
    `1.9 s`, and in it nothing above zero becomes zero, or Adam would divide by it. Both are off by at most a 17th of
    themselves, to nearest by a 33rd.

    Since the scale is a power, the representable numbers stay the same while entries of the block change: an average
    that moves by a thousandth in a step is rounded up or down at random, unbiased, and one that does not move is not
    changed. For `v' = 0.999 v + 0.001 g²` that leaves a standard deviation of about 0.15 v, 7% of Adam's step.

    δ = 0.999. What is above 3.2e38 decodes to that.

    *On the wire*, or in memory: a byte an entry (in whole 32-bit words where there are several blocks) and a byte per
    block: 8.25 bits an entry.

    Args:
      block: entries that share a scale of one byte. Larger blocks contain second moments of a wider range than a block
        can represent: 32 to 128.
      rounding: "stochastic" is unbiased except for entries below `2^-18 s`; "nearest" loses half as much, and freezes
        an average that moves by less than half a digit in a step.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, v = dynamic_fp8(), jnp.array([1.0, 0.0625, 3e-4, 1e-12])
      >>> found = jax.jit(lambda v: code.decompress(code.compress(v, jax.random.key(0)), v))(v)
      >>> found.tolist()[:2], bool((found > 0).all())
      ([1.0, 0.0625], True)

    References:
      Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, 2021
      (blocks, and codes for small and large entries; theirs are a table, and to nearest).
    """
    check_block(block, rounding)

    def compress(x: Array, key: KeyOrStream) -> BlockPayload:
        blocks = to_buckets(x, block)
        signed = largest_magnitude(jnp.minimum(blocks, 0.0)) > 0
        largest = largest_magnitude(blocks)
        words = _exponents(largest)
        # `2 / s`, whose exponent is that of a normal number for every s but that of zeros, and a half.
        doubled = from_exponents(jnp.minimum(2 * BIAS + 1 - 2 * words, 2 * BIAS))
        scaled, in_signed = jax.lax.platform_dependent(
            blocks, doubled, signed, tpu=_scale_by_one_number, default=_scale_by_block
        )
        codes = encode(scaled, UNSIGNED, rounding, key).astype(jnp.int32)
        # Without a sign, nothing above zero becomes zero.
        with_sign = jnp.minimum(codes, SIGN - 1) | jnp.where(blocks < 0, jnp.int32(SIGN), 0)
        codes = jnp.where(in_signed, with_sign, jnp.maximum(codes, (blocks > 0).astype(jnp.int32))).astype(jnp.uint8)
        scales = jnp.where(jnp.isfinite(largest), words | jnp.where(signed, jnp.int32(SIGN), 0), NO_SCALE)
        return BlockPayload(codes.reshape(-1)[: whole_words(x.size, 8)], scales.astype(jnp.uint8)[:, 0])

    def decompress(payload: BlockPayload, like: Like) -> Array:
        rows = _rows(payload.codes[: math.prod(like.shape)], block).astype(jnp.int32)
        # Each code with the word of its block before it, as one number of a block that XLA:TPU has to lay out.
        words = payload.scales.astype(jnp.int32)[:, None] << 8 | rows
        in_signed = words >= SIGN << 8
        values = decode(jnp.where(in_signed, words & (SIGN - 1), words & 0xFF), UNSIGNED)
        values *= jnp.where(in_signed, jnp.where(words & SIGN > 0, -LIFT, LIFT), 1.0)
        scales = jnp.where(words >> 8 == NO_SCALE, jnp.nan, from_exponents(2 * (words >> 8 & (SIGN - 1))))
        return from_rows(from_unit(values, scales), like)

    def error(shape: Shape) -> float:
        grid = magnitudes(UNSIGNED)[:SIGN]
        # The largest entry of a block is above a fourth of the largest number.
        return largest_error(grid, float(grid[-1]) / 4, min(block, math.prod(shape)), "stochastic")

    # A contraction in both cases: rounding at random is not unbiased, since positive entries never become zero.
    return with_error(Compressor(in_blocks(compress, block, 8), decompress), error, "nearest")


def _exponents(largest: Float[Array, "blocks 1"]) -> Int[Array, "blocks 1"]:
    """Half the biased exponent of the smallest `s = 2^(2k+1)` with `largest <= 31/16 s`; 0 for zeros, at most 127."""
    bits = jnp.minimum(jax.lax.bitcast_convert_type(largest, jnp.int32), 0xFF << MANTISSA)
    return jnp.minimum(((bits + CARRY >> MANTISSA) + 1) >> 1, BIAS)


def _rows(codes: UInt[Array, " size"], block: int) -> UInt[Array, "blocks width"]:
    """As `to_buckets`, of codes."""
    width = min(block, max(codes.size, 1))
    return jnp.pad(codes, (0, -codes.size % width)).reshape(-1, width)


def _scale_by_block(
    blocks: Float[Array, "blocks width"], doubled: Float[Array, "blocks 1"], signed: Bool[Array, "blocks 1"]
) -> tuple[Float[Array, "blocks width"], Bool[Array, "blocks width"]]:
    """The magnitudes `|x| / s` that are encoded, and for each entry whether its block has a sign."""
    scaled = jnp.abs(blocks) * doubled * jnp.where(signed, 0.5 / LIFT, 0.5)
    return scaled, jnp.broadcast_to(signed, blocks.shape)


def _scale_by_one_number(
    blocks: Float[Array, "blocks width"], doubled: Float[Array, "blocks 1"], signed: Bool[Array, "blocks 1"]
) -> tuple[Float[Array, "blocks width"], Bool[Array, "blocks width"]]:
    """The same. XLA:TPU lays out each number of a block for all its entries, which is most of its program."""
    scaled = jnp.abs(blocks) * jnp.where(signed, -doubled, doubled)
    # By the bits, since zeros have a sign as well.
    in_signed = jax.lax.bitcast_convert_type(scaled, jnp.int32) < 0
    return jnp.abs(scaled) * jnp.where(in_signed, 0.5 / LIFT, 0.5), in_signed
