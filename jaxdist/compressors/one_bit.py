"""The one-bit code of 1-bit SGD: the mean of the entries of each sign."""

import jax.numpy as jnp

from .._core.checks import check_range
from .._core.descriptions import with_description
from .._core.types import Array
from .compressor import Compressor
from .rounding import UnitRows, norms_of
from .sign import signs_and_scales


@with_description
def one_bit(*, contraction: float | int | None = None) -> Compressor:
    """Sends the sign of each entry and the root of the mean square: `C(x) = (|x|₂ / sqrt(d)) sgn(x)`, `sgn(0) = +1`.

    The compressor of 1-bit Adam. It keeps the length of x, and is not a contraction:
    `|C(x) - x|² = 2 (1 - |x|₁ / (sqrt(d) |x|₂)) |x|²`, which is 0.40 |x|² for Gaussian entries, and |x|² or more where
    `|x|₁ <= sqrt(d) |x|₂ / 2`: about as soon as three of four entries are zero. Then the residual of error feedback is
    not bounded, although in most cases it fills the zeros and shrinks again. Error feedback refuses this compressor
    unless a contraction is stated; `scaled_sign`, with the same bytes, needs none, and is better where the length of x
    does not matter.

    *On the wire*: `ceil(d / 8)` bytes of signs, 4 bytes of scale; 32 times less than float32.

    Args:
      contraction: a δ that holds for your arrays, in (0, 1]; 0.59 for Gaussian entries. Leave out entries that are
        always zero, which one bit cannot represent.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> code, x = one_bit(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 6.5, -6.5,  6.5,  6.5], dtype=float32)
      >>> reducer = jd.error_feedback(jd.two_shot(one_bit(contraction=0.5)))

    References:
      Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
      arXiv:2102.02888, 2021.
    """
    if contraction is not None:
        check_range("contraction", contraction, 0, 1, ends="(]", hint="None for arrays of any kind")

    def root_mean_square(scaled: UnitRows, counts: Array) -> Array:
        return norms_of(scaled, "l2") / jnp.sqrt(counts)

    code = signs_and_scales(None, root_mean_square)
    return code if contraction is None else code._replace(contraction=lambda shape: float(contraction))
