"""Integers of 8 bits in blocks with a scale each."""

from .._core.descriptions import with_description
from .blocks import block_integers
from .compressor import Compressor
from .rounding import Rounding


@with_description
def int8(*, block: int = 256, rounding: Rounding = "nearest") -> Compressor:
    """Rounds each block to 255 evenly spaced numbers: `C(x)_i = s round(x_i / s)`, `s = max|x| / 127`.

    The largest entry is exact, the others are off by at most s/2. To nearest, for d entries in a block,
    `δ = 1 - (d-1) / (4·127² + d-1)`, 0.996 for 256, attained by one large entry among those of s/2, which become zero;
    for Gaussian entries the loss is 5e-5. At random the code is that of `qsgd(8, bucket=block)`, with ω = 0.0039.

    Blocks below 1.5e-36 have steps of 1.2e-38.

    *On the wire*: a byte an entry (in whole 32-bit words where there are several blocks) and 4 bytes of scale per
    block; 3.9 times less than float32.

    Args:
      block: entries that share a scale. Smaller is more exact and costs 4 bytes per block: 64 to 1024.
      rounding: "nearest" loses half as much, with or without error feedback; "stochastic" is unbiased.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = int8(), jnp.array([127.0, -3.4, 0.0, 0.6])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([127.,  -3.,   0.,   1.], dtype=float32)

    References:
      Dettmers, "8-bit approximations for parallelism in deep learning", arXiv:1511.04561, 2015.
    """
    return block_integers(8, block, rounding)
