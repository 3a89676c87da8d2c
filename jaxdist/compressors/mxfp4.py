"""MXFP4: floats of 4 bits in blocks of 32 with a power of two each."""

from .._core.descriptions import with_description
from .block_floats import E2M1, mx_blocks
from .compressor import Compressor
from .rounding import Rounding


@with_description
def mxfp4(*, rounding: Rounding = "nearest") -> Compressor:
    """The MX format of 4 bits: blocks of 32 of 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives, times a power of two s.

    To nearest `s = 2^(floor(log2 max|x|) - 2)`, as in the specification; entries then above 6 become 6 and lose up to
    a quarter. δ = 0.891, attained by one entry of 5 among those of a quarter; for Gaussian entries the loss is 0.013.
    At random s is the power of two with which nothing is cut off, as the mean requires; ω = 0.18.

    *On the wire*: half a byte an entry (in whole 32-bit words where there are several blocks) and a byte per block:
    4.25 bits an entry, 7.5 times less than float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = mxfp4(), jnp.array([0.1, -0.2, 0.9, 3.3])  # the scale is 1/2
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 0.  , -0.25,  1.  ,  3.  ], dtype=float32)
    """
    return mx_blocks(E2M1, rounding)
