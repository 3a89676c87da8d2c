"""One bit an entry."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._typing import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .buckets import from_buckets, norms_of, to_buckets
from .packing import pack, unpack
from .rows import UnitRows, from_unit, to_unit, total


class SignPayload(NamedTuple):
    """Signs, eight to a byte (bit set: not negative), and the magnitude that stands for those of each bucket."""

    signs: UInt[Array, " bytes"]
    scales: Float[Array, " buckets"]


def sign() -> Compressor:
    """Sends the sign of each entry and nothing else: `C(x) = sgn(x)`, with `sgn(0) = +1`.

    For votes, which need no magnitudes, and for sign descent. Neither unbiased nor a contraction, so error feedback
    refuses it. NaN counts as negative and is not seen behind the mean: look for it before.

    On the wire: `ceil(d / 8)` bytes; 32 times less than float32.

    Returns:
      A compressor that decodes to ±1; payloads are gathered, not summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = sign(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 1., -1.,  1.,  1.], dtype=float32)

    References:
      J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: compressed optimisation for non-convex
      problems", arXiv:1802.04434, 2018.
    """

    def compress(x: Array, key: PRNGKeyArray) -> UInt[Array, " bytes"]:
        del key
        return _packed_signs(x)

    def decompress(payload: UInt[Array, " bytes"], like: Like) -> Array:
        return _unpacked_signs(payload, math.prod(like.shape)).reshape(like.shape).astype(like.dtype)

    return Compressor(compress, decompress)


def scaled_sign(*, bucket: int | None = None) -> Compressor:
    """Sends the sign of each entry and one scale: `C(x) = (|x|₁ / d) sgn(x)`, with `sgn(0) = +1`.

    The scale is the least-squares one. δ = |x|₁² / (d |x|₂²), at least 1/d (one nonzero entry) and 2/π = 0.64 for
    Gaussian entries, so use it inside error feedback only. A single bit cannot say zero: entries that are always
    zero decode to plus the scale, and the feedback has to take that back.

    On the wire: `ceil(n / 8)` bytes of signs, 4 bytes of scale per bucket; up to 32 times less than float32.

    Args:
      bucket: the d entries that share a scale; None: the whole array, which suits one layer of a model. Where layers of
        different magnitudes are coded as one vector (`two_shot`, `bucketed`), take 512 to 8192.

    Returns:
      A biased compressor; payloads are gathered, not summed.

    Raises:
      ValueError: `bucket` is below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = scaled_sign(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 4.75, -4.75,  4.75,  4.75], dtype=float32)

    References:
      S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error feedback fixes signSGD and other gradient
      compression schemes", arXiv:1901.09847, 2019.
    """
    if bucket is not None and bucket < 1:
        raise ValueError(f"bucket must be at least 1, or None for the whole array, got {bucket}")

    def mean_magnitude(scaled: UnitRows, counts: Array) -> Array:
        return total(jnp.abs(scaled.rows)) / counts

    def contraction(shape: Shape) -> float:
        size = max(math.prod(shape), 1)
        return 1.0 / min(size, bucket or size)

    return _signs_and_scales(bucket, mean_magnitude)._replace(contraction=contraction)


def one_bit(*, contraction: float | int | None = None) -> Compressor:
    """Sends the sign of each entry and the root of the mean square: `C(x) = (|x|₂ / sqrt(d)) sgn(x)`, `sgn(0) = +1`.

    The code of 1-bit Adam. It keeps the length of x, and is no contraction:
    `|C(x) - x|² = 2 (1 - |x|₁ / (sqrt(d) |x|₂)) |x|²`, which is 0.40 |x|² for Gaussian entries, and |x|² or more where
    `|x|₁ <= sqrt(d) |x|₂ / 2`: about as soon as three of four entries are zero. Nothing then bounds what error feedback
    keeps, although it fills the zeros and so mostly ends that by itself. Feedback refuses the code unless you vouch for
    your arrays; `scaled_sign`, of the same bytes, needs no vouching, and is the better one where the length of x does
    not matter.

    On the wire: `ceil(d / 8)` bytes of signs, 4 bytes of scale; 32 times less than float32.

    Args:
      contraction: the δ that you vouch for, in (0, 1]; 0.59 is that of Gaussian entries. Leave out entries that are
        always zero: one bit cannot say zero.

    Returns:
      A biased compressor; payloads are gathered, not summed.

    Raises:
      ValueError: `contraction` is not in (0, 1].

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist as jd
      >>> code, x = one_bit(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 6.5, -6.5,  6.5,  6.5], dtype=float32)
      >>> reducer = jd.error_feedback(jd.two_shot(one_bit(contraction=0.5)))

    References:
      H. Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
      arXiv:2102.02888, 2021.
    """
    if contraction is not None and not 0 < contraction <= 1:
        raise ValueError(f"contraction must be in (0, 1], got {contraction}; None for arrays of any kind")

    def root_mean_square(scaled: UnitRows, counts: Array) -> Array:
        return norms_of(scaled, "l2") / jnp.sqrt(counts)

    code = _signs_and_scales(None, root_mean_square)
    return code if contraction is None else code._replace(contraction=lambda shape: float(contraction))


def _signs_and_scales(bucket: int | None, scale_of: Callable[[UnitRows, Array], Array]) -> Compressor:
    """`scale_of(scaled, counts)`, with the number of entries of each bucket without those that fill the last one."""

    def compress(x: Array, key: PRNGKeyArray) -> SignPayload:
        del key
        buckets = to_buckets(x, bucket or max(x.size, 1))
        rows, width = buckets.shape
        counts = np.minimum(width, x.size - width * np.arange(rows)).astype(np.float32)[:, None]
        scaled = to_unit(buckets)
        # At most the largest magnitude, but for rounding.
        scales = from_unit(jnp.minimum(scale_of(scaled, jnp.asarray(counts)), scaled.largest), scaled.unit)
        return SignPayload(_packed_signs(x), scales[:, 0])

    def decompress(payload: SignPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        signs = to_buckets(_unpacked_signs(payload.signs, size), bucket or max(size, 1))
        return from_buckets(signs, payload.scales, like)

    return Compressor(compress, decompress)


def _packed_signs(x: Array) -> UInt[Array, " bytes"]:
    return pack((x.reshape(-1) >= 0).astype(jnp.uint8), 1)


def _unpacked_signs(words: UInt[Array, " bytes"], size: int) -> Float[Array, " size"]:
    """±1."""
    return (2 * unpack(words, 1, size).astype(jnp.int32) - 1).astype(jnp.float32)
