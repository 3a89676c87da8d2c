"""Signs scaled by the mean magnitude."""

import math

import jax.numpy as jnp

from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.types import Array, Shape
from .._core.xla_quirks import sum_rows
from .compressor import Compressor
from .rounding import UnitRows
from .sign import signs_and_scales


@with_description
def scaled_sign(*, bucket: int | None = None) -> Compressor:
    """Sends the sign of each entry and one scale: `C(x) = (|x|₁ / d) sgn(x)`, with `sgn(0) = +1`.

    The scale is the least-squares one. δ = |x|₁² / (d |x|₂²), at least 1/d (one nonzero entry) and 2/π = 0.64 for
    Gaussian entries, so use it only inside error feedback. A single bit cannot represent zero: entries that are
    always zero decode to plus the scale, which the feedback must correct.

    *On the wire*: `ceil(n / 8)` bytes of signs, 4 bytes of scale per bucket; up to 32 times less than float32.

    Args:
      bucket: the number d of entries that share a scale; None: the whole array, which suits one layer of a model. If
        layers of different magnitudes are encoded as one vector (`two_shot`, `bucketed`), use 512 to 8192.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = scaled_sign(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 4.75, -4.75,  4.75,  4.75], dtype=float32)

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847, 2019.
    """
    if bucket is not None:
        check_count("bucket", bucket, 1)

    def mean_magnitude(scaled: UnitRows, counts: Array) -> Array:
        return sum_rows(jnp.abs(scaled.rows)) / counts

    def contraction(shape: Shape) -> float:
        size = max(math.prod(shape), 1)
        return 1.0 / min(size, bucket or size)

    return signs_and_scales(bucket, mean_magnitude)._replace(contraction=contraction)
