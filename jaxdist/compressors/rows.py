"""The largest magnitude and the sum of each row, at the speed of memory on the CPU too."""

import jax
import jax.numpy as jnp

from .._typing import Array, Float, Int

STEP = 8


def largest_magnitude(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """`max |x|` of each float32 row; NaN where there is one. Rows have at least one entry."""
    return jax.lax.platform_dependent(rows, cpu=_by_bits, default=lambda x: jnp.max(jnp.abs(x), axis=1, keepdims=True))


def total(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """The sum of each row."""
    return jax.lax.platform_dependent(rows, cpu=_by_product, default=lambda x: jnp.sum(x, axis=1, keepdims=True))


def _by_bits(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """XLA:CPU vectorises the maximum of integers only, and of short rows only: twenty times faster.

    The bits of floats that are not negative are in the order of the floats, NaN last.
    """
    bits: Int[Array, "rows width"] = jax.lax.bitcast_convert_type(rows, jnp.int32) & 0x7FFFFFFF
    while bits.shape[1] > STEP and bits.shape[1] % STEP == 0:
        parts = bits.reshape(bits.shape[0], bits.shape[1] // STEP, STEP)
        # The barrier keeps it from making one reduction of all steps.
        bits = jax.lax.optimization_barrier(jnp.max(parts, axis=2))
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=1, keepdims=True), jnp.float32)


def _by_product(rows: Float[Array, "rows width"]) -> Float[Array, "rows 1"]:
    """XLA:CPU vectorises the sums in a product by a vector from the left, and no others: fifteen times faster."""
    return (jnp.ones(rows.shape[1], rows.dtype) @ rows.T)[:, None]
