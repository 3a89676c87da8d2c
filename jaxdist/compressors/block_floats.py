"""Floats of 4 and 8 bits, in blocks that share a scale."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Float, Int, Like, Shape, UInt
from .._core.xla_quirks import largest_magnitude
from .blocks import BlockPayload, normal_scales
from .compressor import Compressor
from .one_pass import in_blocks
from .packing import pack, unpack
from .random import KeyOrStream
from .rounding import (
    Rounding,
    check_block,
    from_buckets,
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
    """Returns all finite magnitudes of a format, in the order of their codes."""
    codes = np.arange(form.largest_code + 1)
    doublings = np.maximum((codes >> form.mantissa) - 1, 0)
    return np.ldexp(codes - (doublings << form.mantissa), doublings + form.emin - form.mantissa)


def encode(x: Float[Array, "*shape"], form: Minifloat, rounding: str, key: KeyOrStream) -> UInt[Array, "*shape"]:
    """Encodes float32 values; those out of range become the largest of the format.

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
    """Decodes codes of a format to float32."""
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
    return from_exponents(exponents + BIAS)


def from_exponents(biased: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the float32 powers of two with these biased exponents."""
    return jax.lax.bitcast_convert_type(biased << MANTISSA, jnp.float32)


FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
# Entries that share a scale, by the specification of the MX formats.
MX_BLOCK = 32
# The biased exponent of infinity and NaN, which is that of the scale of a block that has one.
NOT_FINITE = 2 * BIAS + 1


class Scaling(NamedTuple):
    """How blocks are scaled to the range of their format, and how their scales are sent."""

    # `make(largest) -> (scales, reciprocals)` from the largest magnitudes of blocks; scales as they are sent.
    make: Callable[[Float[Array, "blocks 1"]], tuple[Array, Array]]
    # Converts sent scales to floats.
    read: Callable[[Array], Array]
    # The magnitudes of the format, and a last one that is as far beyond as saturation reaches.
    grid: np.ndarray
    # The smallest value of the largest entry of a block, after scaling.
    lowest: float


def format_named(name: str) -> Minifloat:
    """Returns the format with this name; raises `ValueError` if there is none."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def largest_exact(form: Minifloat, block: int, rounding: Rounding) -> Compressor:
    """Float scales that map the largest entry of a block to the largest number of the format."""
    check_block(block, rounding)
    grid = magnitudes(form)
    most = float(grid[-1])

    def make(largest: Float[Array, "blocks 1"]) -> tuple[Array, Array]:
        scales = normal_scales(largest, most)
        return scales, 1.0 / scales

    return _floats(form, block, rounding, Scaling(make, lambda scales: scales, grid, most))


def mx_blocks(form: Minifloat, rounding: Rounding) -> Compressor:
    """Makes a compressor of MX blocks, 32 entries that share a power of two."""
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
        return exponents.astype(jnp.uint8), from_exponents(2 * BIAS - exponents)

    def read(words: UInt[Array, " blocks"]) -> Float[Array, " blocks"]:
        return from_exponents(words.astype(jnp.int32))

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

    return with_error(Compressor(in_blocks(compress, block, form.bits), decompress), error, rounding)
