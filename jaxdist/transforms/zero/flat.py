"""Trees as the flat pieces that workers own, and back."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from ..._typing import Array, Shape
from ...comm import Comm
from ...reducers._flat import MULTIPLE
from ...reducers._fused import fused


def rows(x: Array, workers: int) -> Array:
    """`[*s] -> [W, n]`, padded with zeros: row `j` is what worker `j` owns."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % (workers * MULTIPLE))).reshape(workers, -1)


def piece(x: Array, comm: Comm) -> Array:
    """`[*s] -> [n]`: this worker's row."""
    cut = comm.varying(rows(x, comm.size))
    return lax.dynamic_index_in_dim(cut, comm.index, keepdims=False)


def reduce_scatter(leaves: Sequence[Array], buckets: Sequence[Sequence[int]], comm: Comm) -> list[Array]:
    """The mean over workers of the piece of each leaf that this worker owns; one collective for each bucket."""
    out: dict[int, Array] = {}
    for members in buckets:
        scattered = fused(comm.reduce_scatter_mean, [rows(leaves[i], comm.size) for i in members], rows=True)
        out |= dict(zip(members, scattered, strict=True))
    return [out[i] for i in range(len(leaves))]


def whole(x: Array, shape: Shape, comm: Comm) -> Array:
    """`[n] -> [*s]`: everybody's pieces, put together again."""
    return joined(comm.all_gather(x), shape)


def joined(rows: Array, shape: Shape) -> Array:
    """`[W, n] -> [*s]`: everybody's pieces in a row, without the padding."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def gather(pieces: Sequence[Array], shapes: Sequence[Shape], comm: Comm) -> list[Array]:
    """Everybody's pieces of each leaf, put together again; one collective for each dtype."""
    gathered = fused(comm.all_gather, pieces)
    return [joined(rows, shape) for rows, shape in zip(gathered, shapes, strict=True)]
