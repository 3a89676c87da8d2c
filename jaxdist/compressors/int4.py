"""Integers of 4 bits in blocks with a scale each."""

from .._core.descriptions import with_description
from .blocks import block_integers
from .compressor import Compressor
from .rounding import Rounding


@with_description
def int4(*, block: int = 32, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 15 evenly spaced numbers: `C(x)_i = s round(x_i / s)`, `s = max|x| / 7`.

    To nearest it is biased and needs error feedback: `δ = 1 - (d-1) / (4·7² + d-1)`, 0.863 for d = 32 entries in a
    block. At random the code is that of `qsgd(4, bucket=block)`, with ω = 0.14. Blocks below 8e-38 have steps of
    1.2e-38.

    *On the wire*: half a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per
    block: 5 bits an entry, 6.4 times less than float32.

    Args:
      block: entries that share a scale, 16 to 256. Smaller is more exact and costs 4 bytes per block.
      rounding: as for `int8`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = int4(), jnp.array([7.0, -3.4, 0.0, 0.6])
      >>> payload = jax.jit(code.compress)(x, jax.random.key(0))
      >>> payload.codes.nbytes, jax.jit(code.decompress)(payload, x)
      (2, Array([ 7., -3.,  0.,  1.], dtype=float32))

    References:
      Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv:2306.10209,
      2023.
    """
    return block_integers(4, block, rounding)
