"""Rows of float32 entries: their shape, largest magnitude and sum, and exact scaling to magnitudes near 1."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.types import Array, Float, Int

STEP = 8
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
    # A barrier, which costs nothing: for a constant c XLA computes (c r)² as c² r², and c² overflows.
    rows = jax.lax.optimization_barrier(rows)
    largest = largest_magnitude(rows)
    unit, inverse = powers_below(largest)
    return UnitRows(rows * inverse, largest * inverse, unit)


def from_unit(values: Float[Array, "*shape"], unit: Float[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """Scales results of `to_unit` rows back: `values * unit`."""
    # A barrier, or XLA would first multiply the unit by a constant factor of the values, which may flush or overflow.
    return jax.lax.optimization_barrier(values) * unit


def powers_below(magnitudes: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The power of two below each magnitude, and its reciprocal; from 2^-126 to 2^126, so that both are normal."""
    exponents = jax.lax.bitcast_convert_type(jnp.abs(magnitudes), jnp.int32) >> MANTISSA
    exponents = jnp.clip(exponents, 1, 2 * BIAS - 1)
    powers = (jax.lax.bitcast_convert_type(x << MANTISSA, jnp.float32) for x in (exponents, 2 * BIAS - exponents))
    return next(powers), next(powers)


def largest_magnitude(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """`max |x|` of each float32 row; NaN where there is one. Rows have at least one entry."""
    return jax.lax.platform_dependent(rows, cpu=_by_bits, default=lambda x: jnp.max(jnp.abs(x), axis=1, keepdims=True))


def total(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """The sum of each row."""
    return jax.lax.platform_dependent(rows, cpu=_by_product, default=lambda x: jnp.sum(x, axis=1, keepdims=True))


def _by_bits(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """The largest magnitude as an integer: the bits of floats that are not negative have their order, NaN last."""
    # XLA:CPU vectorizes only the maximum of integers, and only of short rows: this is twenty times faster.
    bits: Int[Array, "rows width"] = jax.lax.bitcast_convert_type(rows, jnp.int32) & 0x7FFFFFFF
    while bits.shape[1] > STEP and bits.shape[1] % STEP == 0:
        parts = bits.reshape(bits.shape[0], bits.shape[1] // STEP, STEP)
        # The barrier keeps XLA from merging all steps into one reduction.
        bits = jax.lax.optimization_barrier(jnp.max(parts, axis=2))
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=1, keepdims=True), jnp.float32)


def _by_product(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """The sum of each row as a product with a vector of ones."""
    # XLA:CPU vectorizes only the sums in a product with a vector from the left: this is fifteen times faster.
    return (jnp.ones(rows.shape[1], rows.dtype) @ rows.T)[:, None]
