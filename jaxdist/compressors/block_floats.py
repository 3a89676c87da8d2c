"""Blocks of 4- and 8-bit floats with a scale each: `fp8`, MX formats, `e3m0` and `dynamic_fp8`."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from .._core.descriptions import with_description
from .._core.types import Array, Float, Int, Like, Shape, UInt
from .._core.xla_quirks import largest_magnitude
from .base import Compressor
from .blocks import BlockPayload, normal_scales
from .one_pass import in_one_pass
from .packing import pack, unpack
from .random import KeyOrStream
from .rounding import (
    Rounding,
    check_block,
    from_buckets,
    from_rows,
    from_unit,
    largest_error,
    to_buckets,
    to_integers,
    whole_words,
    with_error,
)

# Of float32: bits of the fraction, and what is added to the exponent.
MANTISSA, BIAS = 23, 127


class Minifloat(NamedTuple):
    """A float format by arithmetic that every backend vectorizes; its finite magnitudes are codes 0 to `largest_code`.

    The exponent of the smallest normal number is `emin`, that of the largest number `emax`.
    """

    bits: int
    mantissa: int
    emin: int
    emax: int
    largest_code: int


E4M3 = Minifloat(bits=8, mantissa=3, emin=-6, emax=8, largest_code=0x7E)
E5M2 = Minifloat(bits=8, mantissa=2, emin=-14, emax=15, largest_code=0x7B)
E2M1 = Minifloat(bits=4, mantissa=1, emin=0, emax=2, largest_code=0x7)
# Powers of two and zero. With no mantissa whose last digit could be even, ties go to the larger of two powers.
E3M0 = Minifloat(bits=4, mantissa=0, emin=-2, emax=4, largest_code=0x7)


def magnitudes(form: Minifloat) -> np.ndarray:
    """All finite magnitudes, in the order of their codes."""
    codes = np.arange(form.largest_code + 1)
    doublings = np.maximum((codes >> form.mantissa) - 1, 0)
    return np.ldexp(codes - (doublings << form.mantissa), doublings + form.emin - form.mantissa)


def encode(x: Float[Array, "*shape"], form: Minifloat, rounding: str, key: KeyOrStream) -> UInt[Array, "*shape"]:
    """The codes of float32 values, saturating.

    Numbers below `2**(emin + 1)` are k units of `2**(emin - mantissa)`, and k is their code. Each doubling from there
    on doubles the unit and puts `2**mantissa` codes below those numbers: rounding up to the next power of two carries.
    """
    magnitude = jnp.abs(x)
    exponent = jax.lax.bitcast_convert_type(magnitude, jnp.int32) >> MANTISSA
    doublings = jnp.maximum(exponent - (BIAS + form.emin), 0)
    units = to_integers(magnitude * _power_of_two(form.mantissa - form.emin - doublings), rounding, key)
    # From below too: what NaN becomes must not reach into the sign.
    codes = jnp.clip((doublings << form.mantissa) + units, 0, form.largest_code)
    return (codes | jnp.where(x < 0, jnp.int32(1 << (form.bits - 1)), 0)).astype(jnp.uint8)


def decode(codes: Int[Array, "*shape"] | UInt[Array, "*shape"], form: Minifloat) -> Float[Array, "*shape"]:
    """The float32 values of codes."""
    wide = codes.astype(jnp.int32)
    sign = 1 << (form.bits - 1)
    code = wide & (sign - 1)
    doublings = jnp.maximum((code >> form.mantissa) - 1, 0)
    units = code - (doublings << form.mantissa)
    # Negated as integers, so that zero has no sign.
    signed = jnp.where(wide >= sign, -units, units).astype(jnp.float32)
    return signed * _power_of_two(doublings + (form.emin - form.mantissa))


def _power_of_two(exponents: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`2**exponents` for exponents of normal numbers."""
    return _from_exponents(exponents + BIAS)


def _from_exponents(biased: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(biased << MANTISSA, jnp.float32)


FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
# Entries that share a scale, by the specification of the MX formats.
MX_BLOCK = 32
# The biased exponent of infinity and NaN, which is that of the scale of a block that has one.
NOT_FINITE = 2 * BIAS + 1


class Scaling(NamedTuple):
    """The scaling of blocks to the range of their format."""

    # `make(largest) -> (scales, reciprocals)` from the largest magnitudes of blocks; scales as they are sent.
    make: Callable[[Float[Array, "blocks 1"]], tuple[Array, Array]]
    # Converts sent scales to floats.
    read: Callable[[Array], Array]
    # The magnitudes of the format, and a last one that is as far beyond as saturation reaches.
    grid: np.ndarray
    # The smallest value of the largest entry of a block, after scaling.
    lowest: float


@with_description
def fp8(*, block: int = 128, format: Literal["e4m3", "e5m2"] = "e4m3", rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 8-bit floats: `C(x)_i = s float8(x_i / s)`, `s = max|x| / max(float8)`.

    The largest entry is exact, any other is off by at most a 17th of itself (e5m2: a 9th), down to a 28,000th of the
    largest entry (e5m2: a billionth): for blocks with entries of very different size, where integers lose the small
    ones. For Gaussian entries the loss is 7e-4 (e5m2: 3e-3), more than that of `int8`. To nearest δ is 0.9965 for any
    block (e5m2: 0.988); at random ω is 0.0035 (e5m2: 0.0125).

    On the wire: a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per block.

    Args:
      block: entries that share a scale, 4 bytes each: 64 to 1024. `cast(float8_e4m3fn)` has one for the whole array.
      format: "e4m3" (3 digits of mantissa), or "e5m2" for entries across more than five orders of magnitude.
      rounding: "nearest" loses half as much; inside error feedback. "stochastic" is unbiased.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = fp8(), jnp.array([448.0, -17.0, 0.0, 0.3])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x).tolist()
      [448.0, -16.0, 0.0, 0.3125]
    """
    return _largest_exact(_format(format), block, rounding)


@with_description
def mxfp8(*, format: Literal["e4m3", "e5m2"] = "e4m3", rounding: Rounding = "nearest") -> Compressor:
    """The MX format of 8 bits: blocks of 32 floats `C(x)_i = s float8(x_i / s)` with a power of two s of one byte.

    Formats and rounding are those of `fp8`.
    To nearest `s = 2^(floor(log2 max|x|) - emax)`, emax = 8 (e5m2: 15), as in the specification; entries then above the
    largest float8, 448 (57344), become that and lose up to an eighth. Hence δ = 63/64 = 0.984 for both. At random s
    is the power of two with which nothing is cut off, as the mean requires; ω = 0.0035 (e5m2: 0.0125).

    On the wire: a byte an entry (in whole 32-bit words where there are several blocks) and a byte per block: 8.25 bits
    an entry.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = mxfp8(), jnp.array([1.0, -0.3, 0.0, 1.93])  # the scale is 1/256: 448 of them are 1.75
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 1.    , -0.3125,  0.    ,  1.75  ], dtype=float32)

    References:
      B. D. Rouhani et al., "Microscaling data formats for deep learning", arXiv:2310.10537, 2023.
    """
    return _mx(_format(format), rounding)


@with_description
def mxfp4(*, rounding: Rounding = "nearest") -> Compressor:
    """The MX format of 4 bits: blocks of 32 of 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives, times a power of two s.

    To nearest `s = 2^(floor(log2 max|x|) - 2)`, as in the specification; entries then above 6 become 6 and lose up to
    a quarter. δ = 0.891, attained by one entry of 5 among those of a quarter; for Gaussian entries the loss is 0.013.
    At random s is the power of two with which nothing is cut off, as the mean requires; ω = 0.18.

    On the wire: half a byte an entry (in whole 32-bit words where there are several blocks) and a byte per block: 4.25
    bits an entry, 7.5 times less than float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = mxfp4(), jnp.array([0.1, -0.2, 0.9, 3.3])  # the scale is 1/2
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0.  , -0.25,  1.  ,  3.  ], dtype=float32)
    """
    return _mx(E2M1, rounding)


@with_description
def e3m0(*, block: int = 256, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to powers of two of 4 bits: `C(x)_i = ± s 2^e` with e = -2 to 4, or 0, and `s = max|x| / 16`.

    Seven magnitudes, each half of the next, down to a 64th of the largest entry: for blocks with entries of very
    different size, such as the changes of parameters in a round of local steps. To nearest, entries from an 85th of the
    largest on are off by at most a third of themselves, and those below a 128th become 0: δ = 0.89 for blocks of 256
    entries, 0.80 for 4096. For Gaussian entries the loss is 0.038, where `mxfp4` has 0.013. At random ω = 0.124, for
    4096 entries 0.207.

    On the wire: half a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per
    block: 4.125 bits an entry, 7.8 times less than float32.

    An outlier costs its neighbors no digits while it is less than 64 times as large, so blocks may have up to 4096
    entries. Rounding is as for `fp8`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = e3m0(), jnp.array([16.0, -5.0, 0.3, 0.1])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([16.  , -4.  ,  0.25,  0.  ], dtype=float32)

    References:
      A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512, 2025 (the format; the
      paper does not say how it is scaled, and a scale for each block is ours).
    """
    return _largest_exact(E3M0, block, rounding)


def _format(name: str) -> Minifloat:
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def _largest_exact(form: Minifloat, block: int, rounding: Rounding) -> Compressor:
    """Float scales that map the largest entry of a block to the largest number of the format."""
    check_block(block, rounding)
    grid = magnitudes(form)
    most = float(grid[-1])

    def make(largest: Float[Array, "blocks 1"]) -> tuple[Array, Array]:
        scales = normal_scales(largest, most)
        return scales, 1.0 / scales

    return _floats(form, block, rounding, Scaling(make, lambda scales: scales, grid, most))


def _mx(form: Minifloat, rounding: Rounding) -> Compressor:
    check_block(MX_BLOCK, rounding)
    grid = magnitudes(form)
    most = float(grid[-1])
    fraction = (1 << MANTISSA) - 1
    # The fraction bits from which on a number times a power of two is above the largest of the format.
    too_large = (int(np.float32(most).view(np.int32)) & fraction) + 1

    def make(largest: Float[Array, "blocks 1"]) -> tuple[Array, Array]:
        bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
        exponents = (bits >> MANTISSA) - form.emax
        if rounding == "stochastic":
            exponents += ((bits & fraction) >= too_large).astype(jnp.int32)
        exponents = jnp.where(jnp.isfinite(largest), jnp.maximum(exponents, 1), NOT_FINITE)
        return exponents.astype(jnp.uint8), _from_exponents(2 * BIAS - exponents)

    def read(words: UInt[Array, " blocks"]) -> Float[Array, " blocks"]:
        return _from_exponents(words.astype(jnp.int32))

    if rounding == "stochastic":
        return _floats(form, MX_BLOCK, rounding, Scaling(make, read, grid, most / 2.0))
    # Entries beyond the largest number, up to the next power of two, are rounded down: half of an interval.
    beyond = 2.0 * 2.0 ** (form.emax + 1) - most
    return _floats(form, MX_BLOCK, rounding, Scaling(make, read, np.append(grid, beyond), 2.0**form.emax))


def _floats(form: Minifloat, block: int, rounding: Rounding, scaling: Scaling) -> Compressor:
    def compress(x: Array, key: KeyOrStream) -> BlockPayload:
        blocks = to_buckets(x, block)
        scales, reciprocals = scaling.make(largest_magnitude(blocks))
        codes = encode(blocks * reciprocals, form, rounding, key).reshape(-1)
        return BlockPayload(pack(codes[: whole_words(x.size, form.bits)], form.bits), scales[:, 0])

    def decompress(payload: BlockPayload, like: Like) -> Array:
        codes = unpack(payload.codes, form.bits, math.prod(like.shape))
        values = to_buckets(decode(codes, form), block)
        return from_buckets(values, scaling.read(payload.scales), like)

    def error(shape: Shape) -> float:
        return largest_error(scaling.grid, scaling.lowest, min(block, math.prod(shape)), rounding)

    return with_error(Compressor(in_one_pass(compress, block), decompress), error, rounding)


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

    On the wire, or in memory: a byte an entry (in whole 32-bit words where there are several blocks) and a byte per
    block: 8.25 bits an entry.

    Args:
      block: entries that share a scale of one byte. Larger blocks contain second moments of a wider range than a block
        can represent: 32 to 128.
      rounding: "stochastic" is unbiased except for entries below `2^-18 s`; "nearest" loses half as much, and freezes
        an average that moves by less than half a digit in a step.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, v = dynamic_fp8(), jnp.array([1.0, 0.0625, 3e-4, 1e-12])
      >>> code.decompress(code.compress(v, jax.random.key(0)), v).tolist()[:2]
      [1.0, 0.0625]
      >>> bool((code.decompress(code.compress(v, jax.random.key(0)), v) > 0).all())
      True

    References:
      T. Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv:2110.02861, 2021 (blocks, and codes for
      small and large entries; theirs are a table, and to nearest).
    """
    check_block(block, rounding)

    def compress(x: Array, key: KeyOrStream) -> BlockPayload:
        blocks = to_buckets(x, block)
        signed = largest_magnitude(jnp.minimum(blocks, 0.0)) > 0
        largest = largest_magnitude(blocks)
        words = _exponents(largest)
        # `2 / s`, whose exponent is that of a normal number for every s but that of zeros, and a half.
        doubled = _from_exponents(jnp.minimum(2 * BIAS + 1 - 2 * words, 2 * BIAS))
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
        scales = jnp.where(words >> 8 == NO_SCALE, jnp.nan, _from_exponents(2 * (words >> 8 & (SIGN - 1))))
        return from_rows(from_unit(values, scales), like)

    def error(shape: Shape) -> float:
        grid = magnitudes(UNSIGNED)[:SIGN]
        # The largest entry of a block is above a fourth of the largest number.
        return largest_error(grid, float(grid[-1]) / 4, min(block, math.prod(shape)), "stochastic")

    # A contraction in both cases: rounding at random is not unbiased, since positive entries never become zero.
    return with_error(Compressor(in_one_pass(compress, block), decompress), error, "nearest")


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


def _exponents(largest: Float[Array, "blocks 1"]) -> Int[Array, "blocks 1"]:
    """Half the biased exponent of the smallest `s = 2^(2k+1)` with `largest <= 31/16 s`; 0 for zeros, at most 127."""
    bits = jnp.minimum(jax.lax.bitcast_convert_type(largest, jnp.int32), 0xFF << MANTISSA)
    return jnp.minimum(((bits + CARRY >> MANTISSA) + 1) >> 1, BIAS)


def _rows(codes: UInt[Array, " size"], block: int) -> UInt[Array, "blocks width"]:
    """As `to_buckets`, of codes."""
    width = min(block, max(codes.size, 1))
    return jnp.pad(codes, (0, -codes.size % width)).reshape(-1, width)
