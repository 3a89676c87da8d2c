"""Two bits an entry: the sign, and whether it is one of the small or of the large ones of its block."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._typing import Array, Float, Like, PRNGKeyArray, Shape, UInt
from .base import Compressor
from .packing import pack, unpack
from .rows import from_unit, to_unit


class TwoMeansPayload(NamedTuple):
    """Codes of two bits (1: negative, 2: large), and the mean magnitude of the small and the large of each block."""

    codes: UInt[Array, " bytes"]
    means: Float[Array, "blocks 2"]


def two_means(*, block: int = 256) -> Compressor:
    """Sends the sign of each entry and which of two magnitudes it has: `C(x)_i = sgn(x_i) m`, m small or large.

    The magnitudes of each block are cut in two where the squared error is least, and m is the mean of either part. With
    `S_j` the sum of the j largest of n magnitudes, the cut maximises `S_j² / j + (S_n - S_j)² / (n - j)`, which is
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
