"""Trees as the flat pieces that workers own, and back."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..._marks import Sharded, is_mark, with_value
from ..._typing import Array, Like, PyTree
from ...comm import Comm
from ...reducers._fused import fused

# Pieces are padded to a multiple of this: XLA:CPU is many times slower for odd lengths.
MULTIPLE = 8


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


def gather(pieces: Sequence[Array], likes: Sequence[Like], comm: Comm) -> list[Array]:
    """Everybody's pieces of each leaf, put together again; one collective for each dtype."""
    gathered = fused(comm.all_gather, pieces)
    return [whole.reshape(-1)[: like.size].reshape(like.shape) for whole, like in zip(gathered, likes, strict=True)]


def cut(tree: PyTree, beside: PyTree) -> PyTree:
    """Marks as `Sharded` the leaves of a state that stand beside a parameter (whose number is not negative)."""
    return jax.tree.map(lambda x, owner: x if owner < 0 else Sharded(x, multiple=MULTIPLE), tree, beside)


def opened(tree: PyTree) -> PyTree:
    """Without the marks."""
    return jax.tree.map(lambda x: x.value if is_mark(x) else x, tree, is_leaf=is_mark)


def closed(tree: PyTree, like: PyTree) -> PyTree:
    """With the marks of `like` again."""
    return jax.tree.map(lambda mark, x: with_value(mark, x) if is_mark(mark) else x, like, tree, is_leaf=is_mark)
