"""256 numbers between the smallest and the largest entry."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._typing import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor, saturated
from .rows import from_unit, powers_below

# The steps are wider than the range by this, so that no rounding error makes 257 of 256 codes.
WIDER = 1.0 + 2.0**-20
# The least range, as a part of the largest magnitude: with it all codes are whole numbers in float32.
NARROWEST = 2.0**-15


class MinMaxPayload(NamedTuple):
    """Codes, and the smallest and the largest entry."""

    codes: UInt[Array, " entries"]
    ends: Float[Array, " 2"]


def min_max_uint8() -> Compressor:
    """Rounds each entry to one of 256 multiples of a step, `C(x)_i = h round(x_i / h)`, `h = (max x - min x) / 255`.

    Codes count down from `round(max x / h)`; zero is a multiple where it is in the range. An entry is off
    by at most h/2, so `δ = 1 - d / (d + 2·255² - 2)` for d entries, attained by two ends of ±127.5 h among entries of
    h/2. For entries on both sides of zero `int8` with blocks is as exact and robust to outliers; this code is for
    arrays on one side, and the one of BAGUA, which adds 1e-7 to the range where this one widens it by a millionth:
    arrays of any magnitude keep their digits.

    Arithmetic is float32 whatever the dtype of x. An array with NaN or infinity decodes to NaN.

    On the wire: a byte an entry and 8 bytes; 4 times less than float32.

    Returns:
      A biased compressor; payloads are gathered, not summed.

    Example:
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
        # XLA must not know the entries: it would reorder the products, and one of them may overflow.
        flat = jax.lax.optimization_barrier(x.reshape(-1).astype(jnp.float32))
        ends = jnp.stack([jnp.min(flat, initial=jnp.inf), jnp.max(flat, initial=-jnp.inf)])
        _, inverse = powers_below(jnp.max(jnp.abs(ends)))
        step, lowest = _steps(ends * inverse)
        codes = jnp.clip(jnp.rint(flat * inverse / step) - lowest, 0, 255)
        return MinMaxPayload(codes.astype(jnp.int32).astype(jnp.uint8), ends)

    def decompress(payload: MinMaxPayload, like: Like) -> Array:
        largest = jnp.max(jnp.abs(payload.ends))
        unit, inverse = powers_below(largest)
        step, lowest = _steps(payload.ends * inverse)
        codes = payload.codes.astype(jnp.int32).astype(jnp.float32)
        return saturated(from_unit((codes + lowest) * step, unit), like.dtype, jnp.isfinite(largest)).reshape(
            like.shape
        )

    def contraction(shape: Shape) -> float:
        size = max(math.prod(shape), 1)
        return max(0.0, 1.0 - WIDER**2 * size / (size + 2 * 255**2 - 2))

    return Compressor(compress, decompress, contraction=contraction)


def _steps(ends: Float[Array, " 2"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The step, and how many of them the code 0 stands for; of ends near 1, so that no step is too small to be kept."""
    span = jnp.maximum(ends[1] - ends[0], NARROWEST * jnp.max(jnp.abs(ends)))
    step = jnp.where(span == 0, 1.0, span * (WIDER / 255))
    return step, jnp.rint(ends[1] / step) - 255
