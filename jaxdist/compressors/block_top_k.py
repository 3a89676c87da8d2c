"""The k entries of largest magnitude of each block."""

import math

import jax
import jax.numpy as jnp

from .._typing import Array, Like, PRNGKeyArray, Shape
from .base import Compressor
from .select import largest_by_threshold
from .sparse import SparsePayload, check_density, decompress, gathered, kept


def block_top_k(density: float, *, block: int = 4096) -> Compressor:
    """Keeps the k largest `|x_i|` of each block of `block` entries: `k = max(1, round(density block))`.

    δ = k / block (of an array that is shorter than a block: its own k/d), attained where all magnitudes are equal. No
    part of an array is starved, and blocks can be coded and read apart; `top_k` sends larger entries at equal bytes.

    On the wire: `K = k ceil(d / block)` values in the dtype of x, and their positions as in `top_k`: K of
    `block ceil(d / block)`, 8 bits each for 64 of 4096, where indices within the block take 12. The places that the
    last block lacks are sent as zeros.

    Args:
      density: the part that is kept, in (0, 1]; 32 or 64 of 4096 entries is what is common.
      block: entries that compete with each other. Smaller is more even, and nearer to a random choice.

    Returns:
      A biased compressor; payloads are gathered.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> code, x = block_top_k(0.5, block=2), jnp.array([3.0, -4.0, 0.0, 0.1, 7.0])
      >>> code.decompress(code.compress(x, jax.random.key(0)), x)
      Array([ 0. , -4. ,  0. ,  0.1,  7. ], dtype=float32)

    References:
      A. Sarfi, B. Therien, J. Lidin, E. Belilovsky, "Communication efficient LLM pre-training with SparseLoCo",
      arXiv:2508.15706, 2025.
      B. Peng, J. Quesnelle, D. P. Kingma, "DeMo: decoupled momentum optimization", arXiv:2411.19870, 2024.
    """
    check_density(density)
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        del key
        rows, width = _rows(x.shape, block)
        flat = jnp.pad(x.reshape(-1), (0, rows * width - x.size))
        return gathered(flat, largest_by_threshold(flat.reshape(rows, width), kept(density, width)))

    def decode(payload: SparsePayload, like: Like) -> Array:
        rows, width = _rows(like.shape, block)
        padded = decompress(payload, jax.ShapeDtypeStruct((rows * width,), like.dtype))
        return padded[: math.prod(like.shape)].reshape(like.shape)

    def contraction(shape: Shape) -> float:
        _, width = _rows(shape, block)
        return kept(density, width) / width if width else 1.0

    return Compressor(compress, decode, contraction=contraction)


def _rows(shape: Shape, block: int) -> tuple[int, int]:
    """How many blocks there are, and how many entries each has."""
    size = math.prod(shape)
    width = min(block, size)
    return (-(-size // width) if width else 1), width
