"""Arrays as flat shards, split over workers as by a reduce-scatter and by `Sharded(..., multiple=8)`."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._core.types import Array, Like
from ..comm.base import Comm
from .flat import MULTIPLE, concatenate


def length(size: int, workers: int) -> int:
    """The number of entries in each worker's shard of an array of `size` entries."""
    return -(-size // (workers * MULTIPLE)) * MULTIPLE


def rows(x: Array, workers: int, *, groups: int = 1) -> Array:
    """`[*s] -> [W, n]`, padded with zeros: row `j` is worker `j`'s shard; with several groups `[W, groups·n]`."""
    flat = x.ravel()
    flat = jnp.pad(flat, (0, -flat.size % (groups * workers * MULTIPLE)))
    if groups == 1:
        return flat.reshape(workers, -1)
    return flat.reshape(groups, workers, -1).swapaxes(0, 1).reshape(workers, -1)


def unshard(rows: Array, like: Like, *, groups: int = 1) -> Array:
    """`[W, n] -> [*s]`, the inverse of `rows`: removes the padding."""
    if groups > 1:
        rows = rows.reshape(rows.shape[0], groups, -1).swapaxes(0, 1)
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def piece(x: Array, comm: Comm) -> Array:
    """`[*s] -> [n]`: this worker's shard."""
    cut = comm.varying(rows(x, comm.size))
    return lax.dynamic_index_in_dim(cut, comm.index, keepdims=False)


def clear_padding(piece: Array, size: int, workers: int, index: Array, *, groups: int = 1, fill: Any = 0) -> Array:
    """Sets the padding of a shard to `fill`: row `index` of `rows(x, workers, groups=groups)`, `x` of `size` entries.

    Compressors scale blocks that include padding, so values computed there must be removed before compression.
    """
    n = piece.size // groups
    if groups * workers * n == size:
        return piece
    # Count shards rather than entries, whose number may exceed 32 bits.
    filled, rest = divmod(size, n)
    number = index + workers * lax.iota(jnp.int32, groups)
    counts = jnp.where(number < filled, n, jnp.where(number == filled, rest, 0))
    is_inside = lax.broadcasted_iota(jnp.int32, (groups, n), 1) < counts[:, None]
    return jnp.where(is_inside.reshape(piece.shape), piece, jnp.asarray(fill, piece.dtype))


def concat_rows(leaves: Sequence[Array], workers: int, *, groups: int = 1) -> Array:
    """Concatenates the rows of several leaves, `[W, Σ n]`: row `j` has worker `j`'s shards."""
    return concatenate([rows(leaf, workers, groups=groups) for leaf in leaves], rows=True)


def split_leaves(flat: Array, leaves: Sequence[Like], workers: int, *, groups: int = 1) -> list[Array]:
    """`[*batch, Σ n] -> [*batch, n]` for each leaf: the inverse of `concat_rows`, for one row or all rows."""
    out, start = [], 0
    for leaf in leaves:
        n = groups * length(math.prod(leaf.shape), groups * workers)
        out.append(lax.slice_in_dim(flat, start, start + n, axis=flat.ndim - 1))
        start += n
    return out
