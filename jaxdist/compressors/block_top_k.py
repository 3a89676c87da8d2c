"""Block top-k: the entries of largest magnitude in each block (SparseLoCo, DeMo)."""

import math

import jax
import jax.numpy as jnp

from .._core.checks import check_count
from .._core.descriptions import with_description
from .._core.types import Array, Like, PRNGKeyArray, Shape
from .compressor import Compressor
from .largest import largest_by_threshold
from .rounding import block_grid
from .sparse import SparsePayload, add_entries, check_density, decompress, gather_entries, num_kept


@with_description
def block_top_k(density: float, *, block: int = 4096) -> Compressor:
    """Keeps the k largest `|x_i|` of each block of `block` entries: `k = max(1, round(density block))`.

    δ = k / block (of an array that is shorter than a block: its own k/d), attained where all magnitudes are equal. No
    part of an array is starved, and blocks can be decoded separately; `top_k` sends larger entries for the same bytes.

    *On the wire*: `K = k ceil(d / block)` values in the dtype of x, and their positions as in `top_k`: K of
    `block ceil(d / block)`, 8 bits each for 64 of 4096, where indices within the block take 12. The
    padding of the last block is sent as zeros.

    Args:
      density: the share that is kept, in (0, 1]; 32 or 64 of 4096 entries are common.
      block: entries that compete with each other. Smaller is more even, and nearer to a random choice.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> code, x = block_top_k(0.5, block=2), jnp.array([3.0, -4.0, 0.0, 0.1, 7.0])
      >>> jax.jit(lambda x: code.decompress(code.compress(x, jax.random.key(0)), x))(x)
      Array([ 0. , -4. ,  0. ,  0.1,  7. ], dtype=float32)

    References:
      Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706,
      2025 (SparseLoCo).
      Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, 2024.
    """
    check_density(density)
    check_count("block", block, 1)

    def compress(x: Array, key: PRNGKeyArray) -> SparsePayload:
        del key
        rows, width = block_grid(x.size, block)
        flat = jnp.pad(x.reshape(-1), (0, rows * width - x.size))
        return gather_entries(flat, largest_by_threshold(flat.reshape(rows, width), num_kept(density, width)))

    def decode(payload: SparsePayload, like: Like) -> Array:
        rows, width = block_grid(math.prod(like.shape), block)
        padded = decompress(payload, jax.ShapeDtypeStruct((rows * width,), like.dtype))
        return padded[: math.prod(like.shape)].reshape(like.shape)

    def add_in_blocks(payload: SparsePayload, total: Array) -> Array:
        rows, width = block_grid(total.size, block)
        return add_entries(payload, total, rows * width)

    def contraction(shape: Shape) -> float:
        _, width = block_grid(math.prod(shape), block)
        return num_kept(density, width) / width if width else 1.0

    return Compressor(compress, decode, contraction=contraction, add=add_in_blocks)
