"""Flat shards of leaves, and trees in which some leaves are sharded."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.trees import select_leaves
from .._core.types import Array, Like, PyTree
from ..comm.base import Comm
from ..comm.over import over
from ..state.marks import Sharded, axis_tuple, flatten_marks, is_mark, map_marked, with_value
from .buffers import concatenate, group_alike, rows_of_workers, shard_length


def unshard(rows: Array, like: Like, *, groups: int = 1) -> Array:
    """`[W, n] -> [*s]`, the inverse of `rows`: removes the padding."""
    if groups > 1:
        rows = rows.reshape(rows.shape[0], groups, -1).swapaxes(0, 1)
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def shard_of(x: Array, comm: Comm) -> Array:
    """`[*s] -> [n]`: this worker's shard."""
    cut = comm.varying(rows_of_workers(x, comm.size))
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
    return concatenate([rows_of_workers(leaf, workers, groups=groups) for leaf in leaves], rows=True)


def split_leaves(flat: Array, leaves: Sequence[Like], workers: int, *, groups: int = 1) -> list[Array]:
    """`[*batch, Σ n] -> [*batch, n]` for each leaf: the inverse of `concat_rows`, for one row or all rows."""
    out, start = [], 0
    for leaf in leaves:
        n = groups * shard_length(math.prod(leaf.shape), groups * workers)
        out.append(lax.slice_in_dim(flat, start, start + n, axis=flat.ndim - 1))
        start += n
    return out


def group_by_sharding(tree: PyTree) -> list[list[int]]:
    """Groups the positions of leaves by the mesh axes that their `Sharded` marks split them over.

    Leaves of different groups cannot share a buffer: one that contains a shard differs between the workers of its axis,
    and so would all that is cut out of it again.
    """
    axes = [tuple(axis_tuple(mark.axis) for mark in _shard_marks(leaf.marks)) for leaf in flatten_marks(tree)]
    return group_alike(axes, lambda names: names)


def map_groups(f: Callable[..., PyTree], tree: PyTree, *rest: PyTree, results: int = 1) -> PyTree:
    """`f(tree, *rest)`, for the leaves of each group of `group_by_sharding` by themselves.

    `f` returns a tree like `tree`, or with `results > 1` a tuple of that many.
    """
    groups = group_by_sharding(tree)
    if len(groups) < 2:
        return f(tree, *rest)
    structure = jax.tree.structure(tree)
    out: list[list[Any]] = [[None] * structure.num_leaves for _ in range(results)]
    for members in groups:
        found = iter(jax.tree.leaves(f(*(select_leaves(x, members) for x in (tree, *rest)))))
        for leaves in out:
            for i in members:
                leaves[i] = next(found)
    trees = tuple(structure.unflatten(leaves) for leaves in out)
    return trees if results > 1 else trees[0]


def whole_likes(tree: PyTree) -> PyTree:
    """The shapes and dtypes of whole arrays, in the marks of the shards."""
    return map_marked(lambda marks, x: jax.ShapeDtypeStruct((_shard_marks(marks) or [x])[0].shape, x.dtype), tree)


def gather_marked(tree: PyTree) -> PyTree:
    """Whole arrays in place of shards, in their marks: the tree as it was written. One gather for each sharded leaf."""

    def gather_leaf(x: Any) -> Any:
        if not _shard_marks([x]):
            return x
        return with_value(x, unshard(over(x.axis).all_gather(x.value), jax.ShapeDtypeStruct(x.shape, x.value.dtype)))

    return jax.tree.map(gather_leaf, tree, is_leaf=is_mark)


def split_marked(tree: PyTree) -> PyTree:
    """The inverse of `gather_marked`, for any padding: this worker's shards of what is inside `Sharded` marks."""

    def split_leaf(marks: Sequence[Any], x: Array) -> Array:
        for mark in _shard_marks(marks):
            comm = over(mark.axis)
            flat = x.ravel()
            flat = jnp.pad(flat, (0, -flat.size % (comm.size * mark.multiple))).reshape(comm.size, -1)
            x = lax.dynamic_index_in_dim(comm.varying(flat), comm.index, keepdims=False)
        return x

    return map_marked(split_leaf, tree)


def _shard_marks(marks: Sequence[Any]) -> list[Sharded]:
    # Without an axis, for a single worker, arrays stay as they were written.
    return [mark for mark in marks if isinstance(mark, Sharded) and axis_tuple(mark.axis)]
