"""One bit an entry."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .packing import pack, unpack
from .rounding import from_buckets, norms_of, to_buckets
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
      J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: compressed optimization for non-convex
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


class TwoMeansPayload(NamedTuple):
    """Codes of two bits (1: negative, 2: large), and the mean magnitude of the small and the large of each block."""

    codes: UInt[Array, " bytes"]
    means: Float[Array, "blocks 2"]


def two_means(*, block: int = 256) -> Compressor:
    """Sends the sign of each entry and which of two magnitudes it has: `C(x)_i = sgn(x_i) m`, m small or large.

    The magnitudes of each block are cut in two where the squared error is least, and m is the mean of either part. With
    `S_j` the sum of the j largest of n magnitudes, the cut maximizes `S_j² / j + (S_n - S_j)² / (n - j)`, which is
    `|C(x)|²`; its smallest part of `|x|²` is δ. For the n of a block

        1 / δ = max over m of Σ_{j <= m} (u_j - u_{j-1})²,  u_j = (j sqrt(m) + sqrt(j (n - j) (n - m))) / n,

    attained by the magnitudes `u_j - u_{j-1}`: 0.63, 0.55, 0.47 for blocks of 64, 256, 1024 entries. Gaussian entries
    keep 0.88. A code with three equal steps to both sides of zero has one bin for small values of both signs, and loses
    the signs of most entries where tails are heavy; here each entry keeps its sign.

    On the wire: `ceil(d / 4)` bytes of codes and 8 bytes of means per block; 14 times less than float32.

    Args:
      block: entries that share two means. Smaller is more exact and costs 8 bytes per block: 64 to 1024.

    Returns:
      A biased compressor; payloads are gathered.

    Raises:
      ValueError: `block` is below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = two_means(), jnp.array([2.0, -2.0, 3.0, -3.0, 9.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 2.5, -2.5,  2.5, -2.5,  9. ], dtype=float32)

    References:
      A. Sarfi, B. Therien, J. Lidin, E. Belilovsky, "Communication efficient LLM pre-training with SparseLoCo",
      arXiv:2508.15706, 2025 (values of two bits; the cut in the middle of magnitudes is ours).
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")

    def compress(x: Array, key: PRNGKeyArray) -> TwoMeansPayload:
        del key
        rows, width = _rows(x.size, block)
        flat = x.reshape(-1).astype(jnp.float32)
        blocks = jnp.pad(flat, (0, rows * width - x.size)).reshape(rows, width)
        filled = np.full((rows, 1), width)
        filled[-1] = x.size - (rows - 1) * width
        threshold, means = _cut(jnp.abs(blocks), jnp.asarray(filled, jnp.int32))
        codes = (blocks < 0).astype(jnp.uint8) | ((jnp.abs(blocks) >= threshold).astype(jnp.uint8) << 1)
        return TwoMeansPayload(pack(codes.reshape(-1)[: x.size], 2), means)

    def decompress(payload: TwoMeansPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        rows, width = _rows(size, block)
        codes = jnp.pad(unpack(payload.codes, 2, size), (0, rows * width - size)).reshape(rows, width)
        magnitudes = jnp.where(codes >= 2, payload.means[:, 1:], payload.means[:, :1])
        decoded = jnp.where(codes % 2 == 1, -magnitudes, magnitudes).reshape(-1)[:size]
        return decoded.reshape(like.shape).astype(like.dtype)

    def contraction(shape: Shape) -> float:
        _, width = _rows(math.prod(shape), block)
        return 1.0 / max((_worst_energy(width, m) for m in range(1, width + 1)), default=1.0)

    return Compressor(compress, decompress, contraction=contraction)


def _rows(size: int, block: int) -> tuple[int, int]:
    width = min(block, size)
    return (-(-size // width) if width else 1), width


def _cut(magnitudes: Float[Array, "rows width"], filled: Array) -> tuple[Array, Array]:
    """For each row the least of its large magnitudes, `[rows, 1]`, and the means of small and large, `[rows, 2]`."""
    width = magnitudes.shape[1]
    if not width:
        return jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, 2), jnp.float32)
    falling = -jnp.sort(-magnitudes, axis=1)
    scaled, largest, unit = to_unit(falling)
    sums = jnp.cumsum(scaled, axis=1)
    total = sums[:, -1:]
    taken = jnp.broadcast_to(jnp.arange(1, width + 1, dtype=jnp.int32)[None], magnitudes.shape)
    left = jnp.maximum(filled - taken, 1).astype(jnp.float32)
    between = sums * sums / taken.astype(jnp.float32) + (total - sums) ** 2 / left
    # Equal magnitudes stay together; the last cut leaves no small ones.
    below = jnp.pad(scaled[:, 1:], [(0, 0), (0, 1)])
    allowed = (taken == filled) | ((taken < filled) & (scaled > below))
    best = jnp.argmax(jnp.where(allowed, between, -1.0), axis=1)[:, None]

    def at_best(x: Array) -> Array:
        return jnp.take_along_axis(x, best, axis=1)

    count, upper = at_best(taken).astype(jnp.float32), at_best(sums)
    small = jnp.maximum(total - upper, 0.0) / at_best(left)
    # At most the largest magnitude, but for rounding.
    return at_best(falling), from_unit(jnp.minimum(jnp.concatenate([small, upper / count], axis=1), largest), unit)


def _worst_energy(size: int, nonzero: int) -> float:
    """The largest `|x|²` of so many nonzero magnitudes of which every cut keeps at most 1."""
    j = np.arange(nonzero + 1)
    sums = (j * math.sqrt(nonzero) + np.sqrt(j * (size - j) * (size - nonzero))) / size
    return float((np.diff(sums) ** 2).sum())
