"""Blocks of 4- and 8-bit floats with a scale each: `fp8`, MX formats (`mxfp8`, `mxfp4`), `e3m0` (Streaming DiLoCo)."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Float, Int, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .blocks import BlockPayload, normal_scales
from .minifloat import BIAS, E2M1, E3M0, E4M3, E5M2, MANTISSA, Minifloat, decode, encode, magnitudes
from .packing import pack, unpack
from .rounding import Rounding, check_block, from_buckets, largest_error, to_buckets, whole_words, with_error
from .rows import largest_magnitude

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
# Entries that share a scale, by the specification of the MX formats.
MX_BLOCK = 32
# The biased exponent of infinity and NaN.
NOT_FINITE = 2 * BIAS + 1


class Scaling(NamedTuple):
    """The scaling of blocks to the range of their format.

    Attributes:
      make: `make(largest) -> (scales, reciprocals)` from the largest magnitudes of blocks; scales as they are sent.
      read: converts sent scales to floats.
      grid: the magnitudes of the format, and a last one that is as far beyond as saturation reaches.
      lowest: the smallest value of the largest entry of a block, after scaling.
    """

    make: Callable[[Float[Array, "blocks 1"]], tuple[Array, Array]]
    read: Callable[[Array], Array]
    grid: np.ndarray
    lowest: float


def fp8(*, block: int = 128, format: Literal["e4m3", "e5m2"] = "e4m3", rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 8-bit floats: `C(x)_i = s float8(x_i / s)`, `s = max|x| / max(float8)`.

    The largest entry is exact, any other is off by at most a 17th of itself (e5m2: a 9th), down to a 28,000th of the
    largest entry (e5m2: a billionth): for blocks with entries of very different size, where integers lose the small
    ones. For Gaussian entries the loss is 7e-4 (e5m2: 3e-3), more than that of `int8`. To nearest δ is 0.9965 for any
    block (e5m2: 0.988); at random ω is 0.0035 (e5m2: 0.0125).

    Arithmetic is float32 whatever the dtype of x. A block with NaN or infinity decodes to such.

    On the wire: a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per block.

    Args:
      block: entries that share a scale, 4 bytes each: 64 to 1024. `cast(float8_e4m3fn)` has one for the whole array.
      format: "e4m3" (3 digits of mantissa), or "e5m2" for entries across more than five orders of magnitude.
      rounding: "nearest" loses half as much; inside error feedback. "stochastic" is unbiased.

    Returns:
      A compressor, unbiased with stochastic rounding; payloads are gathered, not summed.

    Raises:
      ValueError: `block` is below 1, or `format` or `rounding` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = fp8(), jnp.array([448.0, -17.0, 0.0, 0.3])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x).tolist()
      [448.0, -16.0, 0.0, 0.3125]

    References:
      P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, 2022.
    """
    return _largest_exact(_format(format), block, rounding)


def mxfp8(*, format: Literal["e4m3", "e5m2"] = "e4m3", rounding: Rounding = "nearest") -> Compressor:
    """The MX format of 8 bits: blocks of 32 floats `C(x)_i = s float8(x_i / s)` with a power of two s of one byte.

    To nearest `s = 2^(floor(log2 max|x|) - emax)`, emax = 8 (e5m2: 15), as in the specification; entries then above the
    largest float8, 448 (57344), become that and lose up to an eighth. Hence δ = 63/64 = 0.984 for both. At random s
    is the power of two with which nothing is cut off, as the mean requires; ω = 0.0035 (e5m2: 0.0125).

    Arithmetic is float32 whatever the dtype of x. A block with NaN or infinity decodes to such.

    On the wire: a byte an entry (in whole 32-bit words where there are several blocks) and a byte per block: 8.25 bits
    an entry.

    Args:
      format: "e4m3" (3 digits of mantissa), or "e5m2" for entries across more than five orders of magnitude.
      rounding: "nearest" inside error feedback; "stochastic" is unbiased.

    Returns:
      A compressor, unbiased with stochastic rounding; payloads are gathered, not summed.

    Raises:
      ValueError: `format` or `rounding` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = mxfp8(), jnp.array([1.0, -0.3, 0.0, 1.93])  # the scale is 1/256: 448 of them are 1.75
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 1.    , -0.3125,  0.    ,  1.75  ], dtype=float32)

    References:
      B. D. Rouhani et al., "Microscaling data formats for deep learning", arXiv:2310.10537, 2023.
    """
    return _mx(_format(format), rounding)


def mxfp4(*, rounding: Rounding = "nearest") -> Compressor:
    """The MX format of 4 bits: blocks of 32 of 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives, times a power of two s.

    To nearest `s = 2^(floor(log2 max|x|) - 2)`, as in the specification; entries then above 6 become 6 and lose up to
    a quarter. δ = 0.891, attained by one entry of 5 among those of a quarter; for Gaussian entries the loss is 0.013.
    At random s is the power of two with which nothing is cut off, as the mean requires; ω = 0.18.

    Arithmetic is float32 whatever the dtype of x. A block with NaN or infinity decodes to such.

    On the wire: half a byte an entry (in whole 32-bit words where there are several blocks) and a byte per block: 4.25
    bits an entry, 7.5 times less than float32.

    Args:
      rounding: "nearest" inside error feedback; "stochastic" is unbiased.

    Returns:
      A compressor, unbiased with stochastic rounding; payloads are gathered, not summed.

    Raises:
      ValueError: `rounding` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = mxfp4(), jnp.array([0.1, -0.2, 0.9, 3.3])  # the scale is 1/2
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0.  , -0.25,  1.  ,  3.  ], dtype=float32)

    References:
      B. D. Rouhani et al., "Microscaling data formats for deep learning", arXiv:2310.10537, 2023.
    """
    return _mx(E2M1, rounding)


def e3m0(*, block: int = 256, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to powers of two of 4 bits: `C(x)_i = ± s 2^e` with e = -2 to 4, or 0, and `s = max|x| / 16`.

    Seven magnitudes, each half of the next, down to a 64th of the largest entry: for blocks with entries of very
    different size, such as the changes of parameters in a round of local steps. To nearest, entries from an 85th of the
    largest on are off by at most a third of themselves, and those below a 128th become 0: δ = 0.89 for blocks of 256
    entries, 0.80 for 4096. For Gaussian entries the loss is 0.038, where `mxfp4` has 0.013. At random ω = 0.124, for
    4096 entries 0.207.

    Arithmetic is float32 whatever the dtype of x. A block with NaN or infinity decodes to such.

    On the wire: half a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per
    block: 4.125 bits an entry, 7.8 times less than float32.

    Args:
      block: entries that share a scale, 4 bytes each: 64 to 4096. An outlier costs its neighbors no digits while it
        is less than 64 times as large.
      rounding: "nearest" inside error feedback; "stochastic" is unbiased.

    Returns:
      A compressor, unbiased with stochastic rounding; payloads are gathered, not summed.

    Raises:
      ValueError: `block` is below 1, or `rounding` is unknown.

    Example:
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
    def compress(x: Array, key: PRNGKeyArray) -> BlockPayload:
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

    return with_error(Compressor(compress, decompress), error, rounding)


def _from_exponents(biased: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(biased << MANTISSA, jnp.float32)
