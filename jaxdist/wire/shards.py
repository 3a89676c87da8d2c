"""Arrays as the flat pieces that workers own: how a reduce-scatter cuts them, and `Sharded(..., multiple=8)` too."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Like
from ..comm.base import Comm
from .flat import MULTIPLE, concatenate


def length(size: int, workers: int) -> int:
    """How many entries each worker owns of so many."""
    return -(-size // (workers * MULTIPLE)) * MULTIPLE


def rows(x: Array, workers: int, *, groups: int = 1) -> Array:
    """`[*s] -> [W, n]`, padded with zeros: row `j` is worker `j`'s shard; with several groups `[W, groups·n]`."""
    flat = x.ravel()
    flat = jnp.pad(flat, (0, -flat.size % (groups * workers * MULTIPLE)))
    if groups == 1:
        return flat.reshape(workers, -1)
    return flat.reshape(groups, workers, -1).swapaxes(0, 1).reshape(workers, -1)


def joined(rows: Array, like: Like, *, groups: int = 1) -> Array:
    """`[W, n] -> [*s]`, the inverse: everybody's pieces in a row, without the padding."""
    if groups > 1:
        rows = rows.reshape(rows.shape[0], groups, -1).swapaxes(0, 1)
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def piece(x: Array, comm: Comm) -> Array:
    """`[*s] -> [n]`: this worker's row."""
    cut = comm.varying(rows(x, comm.size))
    return lax.dynamic_index_in_dim(cut, comm.index, keepdims=False)


def cleared(piece: Array, size: int, workers: int, index: Array, *, groups: int = 1, fill: Any = 0) -> Array:
    """Row `index` of `rows(x, workers, groups=groups)` for an `x` of `size` entries, with `fill` for what is padding.

    Codes have scales of blocks, and padding is in them: whatever has been computed there must go before it is coded.
    """
    n = piece.size // groups
    if groups * workers * n == size:
        return piece
    # Pieces are counted, not entries, of which there may be too many for 32 bits.
    filled, rest = divmod(size, n)
    number = index + workers * lax.iota(jnp.int32, groups)
    counts = jnp.where(number < filled, n, jnp.where(number == filled, rest, 0))
    is_inside = lax.broadcasted_iota(jnp.int32, (groups, n), 1) < counts[:, None]
    return jnp.where(is_inside.reshape(piece.shape), piece, jnp.asarray(fill, piece.dtype))


def side_by_side(leaves: Sequence[Array], workers: int, *, groups: int = 1) -> Array:
    """The rows of several leaves, `[W, Σ n]`: row `j` is all that worker `j` owns of them."""
    return concatenate([rows(leaf, workers, groups=groups) for leaf in leaves], rows=True)


def apart(flat: Array, leaves: Sequence[Like], workers: int, *, groups: int = 1) -> list[Array]:
    """`[*batch, Σ n] -> [*batch, n]` for each leaf: the inverse of `side_by_side`, for one row or all of them."""
    out, start = [], 0
    for leaf in leaves:
        n = groups * length(math.prod(leaf.shape), groups * workers)
        out.append(lax.slice_in_dim(flat, start, start + n, axis=flat.ndim - 1))
        start += n
    return out
