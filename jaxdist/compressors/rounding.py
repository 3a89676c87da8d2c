"""Rows of entries that share a norm or scale: exact scaling, rounding to integers, and the largest error of a grid."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.checks import check_count
from .._core.dtypes import saturate
from .._core.types import Array, Float, Int, Like, Shape
from .._core.xla_quirks import hide_constants, largest_magnitude, sum_rows
from .compressor import Compressor, Factor
from .random import KeyOrStream, uniform_hash

# To the nearest value (ties to even), or to one of the two neighbors at random, unbiased.
Rounding = Literal["nearest", "stochastic"]
# Of float32: the smallest normal number, and how its exponent is written.
TINY = 2.0**-126
MANTISSA, BIAS = 23, 127


def block_grid(size: int, block: int) -> tuple[int, int]:
    """The number of blocks that `size` entries fill, and the number of entries of each."""
    width = min(block, size)
    return (-(-size // width) if width else 1), width


class UnitRows(NamedTuple):
    """Rows as `rows * unit`; `largest` is the largest magnitude of each of `rows`, below 4."""

    rows: Float[Array, "rows width"]
    largest: Float[Array, "rows 1"]
    unit: Float[Array, "rows 1"]


def to_unit(rows: Float[Array, "rows width"]) -> UnitRows:
    """Divides each row by the power of two below its largest magnitude, which is exact.

    Sums, squares, differences and quotients of the rows then neither overflow nor vanish, and neither does a reciprocal
    of their sizes: XLA divides by multiplying, and 1 / 1e38 is flushed to zero. Results are the same bit for bit as
    without scaling, wherever those are right; `from_unit` scales them back. The largest magnitude is at least 1 if it
    was a normal number, and 0 for rows of zeros. A row with NaN or infinity keeps them.
    """
    # Or the square of a constant would overflow.
    rows = hide_constants(rows)
    largest = largest_magnitude(rows)
    unit, inverse = powers_below(largest)
    return UnitRows(rows * inverse, largest * inverse, unit)


def from_unit(values: Float[Array, "*shape"], unit: Float[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """Scales results of `to_unit` rows back: `values * unit`."""
    # Or the unit would be multiplied by a constant factor of the values first, which may flush or overflow.
    return hide_constants(values) * unit


def powers_below(magnitudes: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The power of two below each magnitude, and its reciprocal; from 2^-126 to 2^126, so that both are normal."""
    exponents = jax.lax.bitcast_convert_type(jnp.abs(magnitudes), jnp.int32) >> MANTISSA
    exponents = jnp.clip(exponents, 1, 2 * BIAS - 1)
    powers = (jax.lax.bitcast_convert_type(x << MANTISSA, jnp.float32) for x in (exponents, 2 * BIAS - exponents))
    return next(powers), next(powers)


def check_block(block: int, rounding: str) -> None:
    """Checks that `block` is positive and `rounding` is known."""
    check_count("block", block, 1)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'rounding must be "nearest" or "stochastic", got {rounding!r}')


def check_buckets(bucket: int, norm: str) -> None:
    """Checks that `bucket` is positive and `norm` is known."""
    check_count("bucket", bucket, 1)
    if norm not in ("max", "l2"):
        raise ValueError(f'norm must be "max" or "l2", got {norm!r}')


def to_buckets(x: Array, bucket: int) -> Float[Array, "buckets width"]:
    """Rows of `bucket` entries in float32, the last padded with zeros; an array shorter than a bucket is one row."""
    width = min(bucket, max(x.size, 1))
    rows = -(-x.size // width)
    flat = x.reshape(-1).astype(jnp.float32)
    if rows * width > x.size:
        flat = jnp.pad(flat, (0, rows * width - x.size))
    return flat.reshape(rows, width)


def from_buckets(buckets: Float[Array, "buckets width"], scales: Float[Array, " buckets"], like: Like) -> Array:
    """The inverse of `to_buckets`, of rows times their scales; finite where the scale is finite, else NaN."""
    # NaN instead of infinity, which the limits of `saturate` would cut off. With limits for each block XLA:TPU would
    # lay out three numbers for each entry in place of one, which is most of the program of a decoder.
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)[:, None]
    return from_rows(from_unit(buckets, scales), like)


def from_rows(values: Float[Array, "buckets width"], like: Like) -> Array:
    """The inverse of `to_buckets`; what is above the largest number of the dtype becomes that number, except NaN."""
    return saturate(values, like.dtype, True).reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def norms_of(scaled: UnitRows, norm: str) -> Float[Array, "buckets 1"]:
    """The largest magnitude of each of `scaled.rows` (`norm="max"`) or its Euclidean length (`"l2"`)."""
    return scaled.largest if norm == "max" else jnp.sqrt(sum_rows(scaled.rows * scaled.rows))


def normalize_buckets(x: Array, bucket: int, norm: str) -> tuple[Float[Array, "b width"], Float[Array, "b 1"]]:
    """Returns each bucket divided by its norm, from -1 to 1, and the norms.

    A length above the largest float becomes that number: ratios are then larger, and the error of rounding them to
    levels grows by less than in proportion, so that bounds for vectors of length 1 hold.
    """
    scaled = to_unit(to_buckets(x, bucket))
    norms = norms_of(scaled, norm)
    limits = jnp.where(jnp.isfinite(norms), jnp.finfo(jnp.float32).max / scaled.unit, jnp.inf)
    norms = jnp.minimum(norms, limits)
    # The clip keeps ratios from exceeding 1 by a rounding error.
    ratios = jnp.clip(scaled.rows / jnp.where(norms == 0, 1.0, norms), -1.0, 1.0)
    return ratios, from_unit(norms, scaled.unit)


def shrink_norms(
    norms: Float[Array, " buckets"],
    ratios: Float[Array, "buckets width"],
    lost: Float[Array, "buckets width"],
    worst: Any,
    factor: Factor,
) -> Float[Array, " buckets"]:
    """The norms times `factor(ω_x, ω)`, from what each ratio of a bucket to its norm loses on average.

    `ω_x = Σ lost / Σ ratio²` of each bucket, in units of its norm.
    """
    squares = sum_rows(ratios * ratios)[:, 0]
    own = sum_rows(lost)[:, 0] / jnp.where(squares == 0, 1.0, squares)
    return norms * factor(own, worst)


def whole_words(size: int, bits: int) -> int:
    """The number of codes that fill the 32-bit words of `size` codes."""
    # XLA:CPU is ten times slower for odd lengths.
    whole = 32 // math.gcd(32, bits)
    return -(-size // whole) * whole


def to_integers(x: Float[Array, "*shape"], rounding: str, key: KeyOrStream) -> Int[Array, "*shape"]:
    """Rounds to integers: the nearest, or `floor(x + u)` with u uniform in [0, 1)."""
    if rounding == "nearest":
        return jnp.rint(x).astype(jnp.int32)
    whole = jnp.floor(x)
    # Not `floor(x + u)`, whose rounded sum may change integers.
    return (whole + jnp.floor((x - whole) + uniform_hash(key, x.shape))).astype(jnp.int32)


def largest_error(grid: np.ndarray, lowest: float, size: int, rounding: str) -> float:
    """The supremum of `E|C(x) - x|² / |x|²` over blocks of `size` entries: 1 - δ of "nearest", ω of "stochastic".

    Entries have magnitudes up to the end of the grid, which begins with 0, and the largest is at least `lowest`, one of
    the grid. Rounding is to the grid: an
    entry x between l and h loses at most `(h - l)² / 4`, halfway between them, or `(x - l)(h - x)` on average. The
    ratio ρ is exceeded exactly if there are entries whose losses minus `ρ x²` have a positive sum. The worst entries
    for one ρ are all equal except the largest, which leaves a search for ρ, by bisection.

    Examples:
      >>> round(largest_error(np.arange(8.0), 7.0, 32, "nearest"), 6)  # 31 / (4 · 7² + 31)
      0.136564
    """
    low, high = grid[:-1], grid[1:]

    def gain(ratio: float) -> float:
        # The entry of each interval whose loss minus ρ x² is largest.
        worst = np.clip((low + high) / (2.0 * (1.0 + ratio)), low, high)
        x = (low + high) / 2.0 if rounding == "nearest" else worst
        gains = (x - low) * (high - x) - ratio * x * x
        first = np.max(gains, where=low >= lowest, initial=-ratio * lowest**2)
        return first + (size - 1) * np.max(gains, initial=0.0)

    below, above = 0.0, float(max(size, 1))
    for _ in range(100):
        middle = (below + above) / 2.0
        below, above = (middle, above) if gain(middle) > 0 else (below, middle)
    return above


def with_error(code: Compressor, error: Callable[[Shape], float], rounding: str) -> Compressor:
    """Adds the law that follows from the largest error: δ to nearest, ω at random."""
    if rounding == "nearest":
        return code._replace(contraction=lambda shape: 1.0 - error(shape))
    return code._replace(variance=error)
