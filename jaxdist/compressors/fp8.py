"""Floats of 8 bits in blocks with a float32 scale each."""

from typing import Literal

from .._core.descriptions import with_description
from .block_floats import format_named, largest_exact
from .compressor import Compressor
from .rounding import Rounding


@with_description
def fp8(*, block: int = 128, format: Literal["e4m3", "e5m2"] = "e4m3", rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 8-bit floats: `C(x)_i = s float8(x_i / s)`, `s = max|x| / max(float8)`.

    The largest entry is exact, any other is off by at most a 17th of itself (e5m2: a 9th), down to a 28,000th of the
    largest entry (e5m2: a billionth): for blocks with entries of very different size, where integers lose the small
    ones. For Gaussian entries the loss is 7e-4 (e5m2: 3e-3), more than that of `int8`. To nearest δ is 0.9965 for any
    block (e5m2: 0.988); at random ω is 0.0035 (e5m2: 0.0125).

    *On the wire*: a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per
    block.

    Args:
      block: entries that share a scale, 4 bytes each: 64 to 1024. `cast(float8_e4m3fn)` has one for the whole array.
      format: "e4m3" (3 digits of mantissa), or "e5m2" for entries across more than five orders of magnitude.
      rounding: "nearest" loses half as much; inside error feedback. "stochastic" is unbiased.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = fp8(), jnp.array([448.0, -17.0, 0.0, 0.3])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x).tolist()
      [448.0, -16.0, 0.0, 0.3125]
    """
    return largest_exact(format_named(format), block, rounding)
