"""Two bits an entry: a sign, and one of two magnitudes (SparseLoCo)."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.types import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .compressor import Compressor
from .packing import pack, unpack
from .rounding import block_grid, from_unit, to_unit


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

    *On the wire*: `ceil(d / 4)` bytes of codes and 8 bytes of means per block; 14 times less than float32.

    Args:
      block: entries that share two means. Smaller is more exact and costs 8 bytes per block: 64 to 1024.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = two_means(), jnp.array([2.0, -2.0, 3.0, -3.0, 9.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 2.5, -2.5,  2.5, -2.5,  9. ], dtype=float32)

    References:
      Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706,
      2025 (values of two bits; the optimal split of magnitudes is ours).
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
