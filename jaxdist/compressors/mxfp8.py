"""MXFP8: floats of 8 bits in blocks of 32 with a power of two each."""

from typing import Literal

from .._core.descriptions import with_description
from .block_floats import format_named, mx_blocks
from .compressor import Compressor
from .rounding import Rounding


@with_description
def mxfp8(*, format: Literal["e4m3", "e5m2"] = "e4m3", rounding: Rounding = "nearest") -> Compressor:
    """The MX format of 8 bits: blocks of 32 floats `C(x)_i = s float8(x_i / s)` with a power of two s of one byte.

    Formats and rounding are those of `fp8`.
    To nearest `s = 2^(floor(log2 max|x|) - emax)`, emax = 8 (e5m2: 15), as in the specification; entries then above the
    largest float8, 448 (57344), become that and lose up to an eighth. Hence δ = 63/64 = 0.984 for both. At random s
    is the power of two with which nothing is cut off, as the mean requires; ω = 0.0035 (e5m2: 0.0125).

    *On the wire*: a byte an entry (in whole 32-bit words where there are several blocks) and a byte per block: 8.25
    bits an entry.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = mxfp8(), jnp.array([1.0, -0.3, 0.0, 1.93])  # the scale is 1/256: 448 of them are 1.75
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 1.    , -0.3125,  0.    ,  1.75  ], dtype=float32)

    References:
      Rouhani et al., "Microscaling data formats for deep learning", arXiv:2310.10537, 2023.
    """
    return mx_blocks(format_named(format), rounding)
