"""Codes of one and two bits: signSGD, scaled sign, the code of 1-bit Adam, two means (SparseLoCo) and DRIVE."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .._core.xla_quirks import sum_rows
from .base import Compressor
from .one_pass import in_one_pass
from .packing import pack, pack_signs, unpack
from .random import KeyOrStream, key_words, mix
from .rounding import UnitRows, block_grid, from_buckets, from_unit, norms_of, to_buckets, to_unit


class SignPayload(NamedTuple):
    """Signs, eight to a byte (bit set: not negative), and the decoded magnitude of each bucket."""

    signs: UInt[Array, " bytes"]
    scales: Float[Array, " buckets"]


@with_description
def sign() -> Compressor:
    """Sends the sign of each entry and nothing else: `C(x) = sgn(x)`, with `sgn(0) = +1`.

    For votes, which need no magnitudes, and for sign descent. Neither unbiased nor a contraction, so error feedback
    refuses it, and its reducers refuse `examples=`: zero becomes +1, so that no worker can be left out. NaN counts as
    negative and cannot be detected after the mean: check for it before.

    On the wire: `ceil(d / 8)` bytes; 32 times less than float32.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = sign(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 1., -1.,  1.,  1.], dtype=float32)

    References:
      J. Bernstein et al., "signSGD: compressed optimization for non-convex problems", arXiv:1802.04434, 2018.
    """

    def compress(x: Array, key: PRNGKeyArray) -> UInt[Array, " bytes"]:
        del key
        return pack_signs(x.reshape(-1))

    def decompress(payload: UInt[Array, " bytes"], like: Like) -> Array:
        return _unpack_signs(payload, math.prod(like.shape)).reshape(like.shape).astype(like.dtype)

    return Compressor(compress, decompress, scale_free=True)


@with_description
def scaled_sign(*, bucket: int | None = None) -> Compressor:
    """Sends the sign of each entry and one scale: `C(x) = (|x|₁ / d) sgn(x)`, with `sgn(0) = +1`.

    The scale is the least-squares one. δ = |x|₁² / (d |x|₂²), at least 1/d (one nonzero entry) and 2/π = 0.64 for
    Gaussian entries, so use it only inside error feedback. A single bit cannot represent zero: entries that are
    always zero decode to plus the scale, which the feedback must correct.

    On the wire: `ceil(n / 8)` bytes of signs, 4 bytes of scale per bucket; up to 32 times less than float32.

    Args:
      bucket: the number d of entries that share a scale; None: the whole array, which suits one layer of a model. If
        layers of different magnitudes are encoded as one vector (`two_shot`, `bucketed`), use 512 to 8192.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = scaled_sign(), jnp.array([3.0, -4.0, 0.0, 12.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 4.75, -4.75,  4.75,  4.75], dtype=float32)

    References:
      S. P. Karimireddy et al., "Error feedback fixes signSGD and other gradient compression schemes", arXiv:1901.09847.
    """
    if bucket is not None:
        check_count("bucket", bucket, 1)

    def mean_magnitude(scaled: UnitRows, counts: Array) -> Array:
        return sum_rows(jnp.abs(scaled.rows)) / counts

    def contraction(shape: Shape) -> float:
        size = max(math.prod(shape), 1)
        return 1.0 / min(size, bucket or size)

    return _signs_and_scales(bucket, mean_magnitude)._replace(contraction=contraction)


@with_description
def one_bit(*, contraction: float | int | None = None) -> Compressor:
    """Sends the sign of each entry and the root of the mean square: `C(x) = (|x|₂ / sqrt(d)) sgn(x)`, `sgn(0) = +1`.

    The compressor of 1-bit Adam. It keeps the length of x, and is not a contraction:
    `|C(x) - x|² = 2 (1 - |x|₁ / (sqrt(d) |x|₂)) |x|²`, which is 0.40 |x|² for Gaussian entries, and |x|² or more where
    `|x|₁ <= sqrt(d) |x|₂ / 2`: about as soon as three of four entries are zero. Then the residual of error feedback is
    not bounded, although in most cases it fills the zeros and shrinks again. Error feedback refuses this compressor
    unless a contraction is stated; `scaled_sign`, with the same bytes, needs none, and is better where the length of x
    does not matter.

    On the wire: `ceil(d / 8)` bytes of signs, 4 bytes of scale; 32 times less than float32.

    Args:
      contraction: a δ that holds for your arrays, in (0, 1]; 0.59 for Gaussian entries. Leave out entries that are
        always zero, which one bit cannot represent.

    Examples:
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
    """Signs with the scale `scale_of(scaled, counts)` of each bucket; counts of entries exclude the padding."""

    def compress(x: Array, key: KeyOrStream) -> SignPayload:
        del key
        buckets = to_buckets(x, bucket or max(x.size, 1))
        rows, width = buckets.shape
        counts = jnp.float32(width)
        if rows * width > x.size:
            counts = jnp.asarray(np.minimum(width, x.size - width * np.arange(rows)).astype(np.float32)[:, None])
        scaled = to_unit(buckets)
        # A mean is at most the largest magnitude, except for rounding errors.
        scales = from_unit(jnp.minimum(scale_of(scaled, counts), scaled.largest), scaled.unit)
        return SignPayload(pack_signs(x.reshape(-1)), scales[:, 0])

    def decompress(payload: SignPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        signs = to_buckets(_unpack_signs(payload.signs, size), bucket or max(size, 1))
        return from_buckets(signs, payload.scales, like)

    return Compressor(in_one_pass(compress, bucket) if bucket else compress, decompress)


def _unpack_signs(words: UInt[Array, " bytes"], size: int) -> Float[Array, " size"]:
    """±1."""
    return (2 * unpack(words, 1, size).astype(jnp.int32) - 1).astype(jnp.float32)


class TwoMeansPayload(NamedTuple):
    """Codes of two bits (1: negative, 2: large), and the mean magnitudes of small and large entries of each block."""

    codes: UInt[Array, " bytes"]
    means: Float[Array, "blocks 2"]


@with_description
def two_means(*, block: int = 256) -> Compressor:
    """Sends the sign of each entry and one of two magnitudes: `C(x)_i = sgn(x_i) m`, m small or large.

    The magnitudes of each block are split in two where the squared error is smallest, and m is the mean of each part.
    With `S_j` the sum of the j largest of n magnitudes, the split maximizes `S_j² / j + (S_n - S_j)² / (n - j)`, which
    is `|C(x)|²`; its smallest share of `|x|²` is δ. For the n of a block

        1 / δ = max over m of Σ_{j <= m} (u_j - u_{j-1})²,  u_j = (j sqrt(m) + sqrt(j (n - j) (n - m))) / n,

    attained by the magnitudes `u_j - u_{j-1}`: 0.63, 0.55, 0.47 for blocks of 64, 256, 1024 entries. Gaussian entries
    keep 0.88. Each entry keeps its sign, where a uniform code of two bits has one bin for small values of both signs.

    On the wire: `ceil(d / 4)` bytes of codes and 8 bytes of means per block; 14 times less than float32.

    Args:
      block: entries that share two means. Smaller is more exact and costs 8 bytes per block: 64 to 1024.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = two_means(), jnp.array([2.0, -2.0, 3.0, -3.0, 9.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 2.5, -2.5,  2.5, -2.5,  9. ], dtype=float32)

    References:
      A. Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv:2508.15706, 2025 (values of two
      bits; the optimal split of magnitudes is ours).
    """
    check_count("block", block, 1)

    def compress(x: Array, key: PRNGKeyArray) -> TwoMeansPayload:
        del key
        rows, width = block_grid(x.size, block)
        flat = x.reshape(-1).astype(jnp.float32)
        blocks = jnp.pad(flat, (0, rows * width - x.size)).reshape(rows, width)
        counts = np.full((rows, 1), width)
        counts[-1] = x.size - (rows - 1) * width
        threshold, means = _split_magnitudes(jnp.abs(blocks), jnp.asarray(counts, jnp.int32))
        codes = (blocks < 0).astype(jnp.uint8) | ((jnp.abs(blocks) >= threshold).astype(jnp.uint8) << 1)
        return TwoMeansPayload(pack(codes.reshape(-1)[: x.size], 2), means)

    def decompress(payload: TwoMeansPayload, like: Like) -> Array:
        size = math.prod(like.shape)
        rows, width = block_grid(size, block)
        codes = jnp.pad(unpack(payload.codes, 2, size), (0, rows * width - size)).reshape(rows, width)
        magnitudes = jnp.where(codes >= 2, payload.means[:, 1:], payload.means[:, :1])
        decoded = jnp.where(codes % 2 == 1, -magnitudes, magnitudes).reshape(-1)[:size]
        return decoded.reshape(like.shape).astype(like.dtype)

    def contraction(shape: Shape) -> float:
        _, width = block_grid(math.prod(shape), block)
        return 1.0 / max((_worst_energy(width, m) for m in range(1, width + 1)), default=1.0)

    return Compressor(compress, decompress, contraction=contraction)


def _split_magnitudes(magnitudes: Float[Array, "rows width"], counts: Array) -> tuple[Array, Array]:
    """For each row the smallest of its large magnitudes, `[rows, 1]`, and the means of small and large, `[rows, 2]`."""
    width = magnitudes.shape[1]
    if not width:
        return jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, 2), jnp.float32)
    falling = -jnp.sort(-magnitudes, axis=1)
    scaled, largest, unit = to_unit(falling)
    sums = jnp.cumsum(scaled, axis=1)
    all_sums = sums[:, -1:]
    # |C(x)|² = S_j² / j + (S_n - S_j)² / (n - j) for every number j of large magnitudes.
    large = jnp.broadcast_to(jnp.arange(1, width + 1, dtype=jnp.int32)[None], magnitudes.shape)
    small = jnp.maximum(counts - large, 1).astype(jnp.float32)
    energy = sums * sums / large.astype(jnp.float32) + (all_sums - sums) ** 2 / small
    # Equal magnitudes stay together; with j = n there are no small ones.
    next_magnitude = jnp.pad(scaled[:, 1:], [(0, 0), (0, 1)])
    allowed = (large == counts) | ((large < counts) & (scaled > next_magnitude))
    best = jnp.argmax(jnp.where(allowed, energy, -1.0), axis=1)[:, None]

    def at_best(x: Array) -> Array:
        return jnp.take_along_axis(x, best, axis=1)

    small_mean = jnp.maximum(all_sums - at_best(sums), 0.0) / at_best(small)
    large_mean = at_best(sums) / at_best(large).astype(jnp.float32)
    # Means are at most the largest magnitude, except for rounding errors.
    means = jnp.minimum(jnp.concatenate([small_mean, large_mean], axis=1), largest)
    return at_best(falling), from_unit(means, unit)


def _worst_energy(size: int, nonzero: int) -> float:
    """The largest `|x|²` of `nonzero` magnitudes of which every split keeps at most 1."""
    j = np.arange(nonzero + 1)
    sums = (j * math.sqrt(nonzero) + np.sqrt(j * (size - j) * (size - nonzero))) / size
    return float((np.diff(sums) ** 2).sum())


class DrivePayload(NamedTuple):
    """Signs of the rotated entries, eight to a byte, the scale of each block, and the seed of the rotation."""

    signs: UInt[Array, " bytes"]
    scales: Float[Array, " blocks"]
    seed: UInt[Array, ""]


@with_description
def drive(*, block: int = 256) -> Compressor:
    """Rotates each block at random and sends signs and a scale: `C(x) = s Rᵀ sgn(R x)`, `s = |R x|₁ / d`.

    `R = H D / sqrt(d)` with the Hadamard matrix H of a block of d entries and random signs D, the same for all blocks
    of an array. R spreads every entry over its block, so that signs suit any block: by Khintchine's inequality
    `E|C(x) - x|² <= |x|² / 2`. δ = 1/2, attained by two equal entries among zeros, where `scaled_sign` promises 1/d.
    One entry alone is exact; for Gaussian entries both keep 2/π = 0.64.

    This is the scale with the least error; `|x|² / |R x|₁`, which is unbiased for uniformly random rotations, is not
    for this one: (2, 1) would always decode to (2.5, 0).

    On the wire: a bit an entry of whole blocks, 4 bytes of scale per block, and 4 bytes of seed: 1.125 bits an entry.
    An array shorter than a block is one of the next power of two.

    Args:
      block: entries that are rotated together, a power of two from 8 on. The work for an entry grows with it, the bytes
        of scales fall: 128 to 1024.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = drive(), jnp.zeros(256).at[77].set(5.0)
      >>> bool(jnp.allclose(code.decompress(code.compress(x, jax.random.key(0)), x), x, atol=1e-5))
      True

    References:
      S. Vargaftik et al., "DRIVE: one-bit distributed mean estimation", arXiv:2105.08339, 2021.
      S. J. Szarek, "On the best constants in the Khinchin inequality", Studia Mathematica 58, 1976.
    """
    if block < 8 or block & (block - 1):
        raise ValueError(f"block must be a power of two from 8 on, got {block}")

    def compress(x: Array, key: PRNGKeyArray) -> DrivePayload:
        width = _width(x.size, block)
        flat = jnp.pad(x.reshape(-1).astype(jnp.float32), (0, -x.size % width))
        seed, _ = key_words(key)
        blocks = to_unit(flat.reshape(-1, width))
        # R x = H D x / sqrt(d), and s = |R x|₁ / d.
        rotated = _product(blocks.rows * _random_signs(seed, width), width)
        # A mean is at most the largest magnitude, except for rounding errors.
        scales = from_unit(jnp.minimum(sum_rows(jnp.abs(rotated)) / width, blocks.largest), blocks.unit)
        return DrivePayload(pack_signs(rotated.reshape(-1)), scales[:, 0], seed)

    def decompress(payload: DrivePayload, like: Like) -> Array:
        size = math.prod(like.shape)
        width = _width(size, block)
        bits = unpack(payload.signs, 1, 8 * payload.signs.size).reshape(-1, width)
        # Scaled last: the sums of a block may be larger than its entries, and than the largest float.
        rotated = _product(jnp.where(bits == 1, 1.0, -1.0).astype(jnp.float32), width)
        return from_buckets(rotated * _random_signs(payload.seed, width), payload.scales, like)

    return Compressor(compress, decompress, contraction=lambda shape: 0.5)


def _width(size: int, block: int) -> int:
    """Entries of a block of an array: `block`, or a smaller power of two that holds the array."""
    return min(block, max(8, 1 << max(size - 1, 0).bit_length()))


def _random_signs(seed: UInt[Array, ""], width: int) -> Float[Array, "1 width"]:
    words = mix(mix(jax.lax.iota(jnp.uint32, width)) ^ seed)
    return jnp.where(words >> 31 == 1, 1.0, -1.0).astype(jnp.float32)[None]


def _product(rows: Float[Array, "blocks width"], width: int) -> Float[Array, "blocks width"]:
    """`H rows / sqrt(width)`; as a product of matrices, which beats the fast transform's passes over memory."""
    return jnp.matmul(rows, jnp.asarray(_hadamard(width)), precision=jax.lax.Precision.HIGHEST)


def _hadamard(width: int) -> np.ndarray:
    """Symmetric and orthonormal."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(width))
