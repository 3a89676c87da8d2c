"""BAGUA's code: integers of 8 bits from the minimum to the maximum."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.dtypes import saturate
from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .._core.xla_quirks import hide_constants, largest_entry, smallest_entry
from .compressor import Compressor
from .rounding import from_unit, powers_below

# The factor by which 256 steps exceed the range, so that no rounding error makes a 257th code.
WIDER = 1.0 + 2.0**-20
# The smallest range, as a share of the largest magnitude, with which all codes are whole numbers in float32.
NARROWEST = 2.0**-15


class MinMaxPayload(NamedTuple):
    """Codes, and the smallest and the largest entry."""

    codes: UInt[Array, " entries"]
    ends: Float[Array, " 2"]


@with_description
def min_max_uint8() -> Compressor:
    """Rounds each entry to one of 256 multiples of a step, `C(x)_i = h round(x_i / h)`, `h = (max x - min x) / 255`.

    Codes count down from `round(max x / h)`; zero is a multiple where it is in the range. An entry is off
    by at most h/2, so `δ = 1 - d / (d + 2·255² - 2)` for d entries, attained by two ends of ±127.5 h among entries of
    h/2. For arrays on one side of zero; on both sides `int8` with blocks is as exact, and robust to outliers. BAGUA
    adds 1e-7 to the range; here it is widened by a millionth, so that arrays of any magnitude keep their digits.

    *On the wire*: a byte an entry and 8 bytes; 4 times less than float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = min_max_uint8(), jnp.array([-1.0, 0.0, 0.25, 1.0])
      >>> payload = code.compress(x, jax.random.key(0))
      >>> payload.codes, code.decompress(payload, x)[2]
      (Array([  1, 128, 160, 255], dtype=uint8), Array(0.25098..., dtype=float32))

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
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


def _steps(ends: Float[Array, " 2"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The step, and the multiple of it that code 0 represents; from ends near 1, so that no step is flushed to zero."""
    span = jnp.maximum(ends[1] - ends[0], NARROWEST * largest_entry(jnp.abs(ends)))
    step = jnp.where(span == 0, 1.0, span * (WIDER / 255))
    return step, jnp.rint(ends[1] / step) - 255
