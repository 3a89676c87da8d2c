"""Leaves as matrices: which to compress, small ones of one shape stacked, and the way back from their factors."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._typing import Array, Like, PyTree, Shape
from ..compressors.base import working_dtype

# Up to this many elements, matrices of one shape are stacked: every product of its own adds to the compile time. Larger
# ones stay apart, since stacking copies them.
STACKED_SIZE = 2**16

# `(n, m, r)` of a leaf to compress, from its shape; None for one to send whole.
View = Callable[[Shape], tuple[int, int, int] | None]


class Group(NamedTuple):
    """Leaves with one matrix shape, to be stacked; or a single large one."""

    leaves: list[int]
    shape: tuple[int, int]
    dtype: jnp.dtype


def squarest_view(shape: Shape) -> tuple[int, int]:
    """The matrix view of a leaf: cut between leading and trailing dimensions where rows + columns are fewest.

    Example:
      >>> from jaxdist.reducers.power_sgd import squarest_view
      >>> squarest_view((3, 3, 128, 256)), squarest_view((512, 8, 64))
      ((1152, 256), (512, 512))
    """
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(reversed(cuts), key=sum)


def view_of(rank: int, min_compression_rate: float | int, matrix_view: Callable[[Shape], tuple[int, int]]) -> View:
    """Compresses a leaf where that pays."""

    def view(shape):
        if len(shape) < 2 or 0 in shape:
            return None
        n, m = matrix_view(shape)
        r = min(rank, n, m)
        return (n, m, r) if (n + m) * r * min_compression_rate < n * m else None

    return view


def draw(like: PyTree[Like], view: View, side: int, key: Array) -> PyTree:
    """Gaussian factors, `[n, r]` (side 0) or `[m, r]` (side 1) for each compressed leaf and `[0]` for the others."""

    def one(leaf, index):
        found = view(leaf.shape)
        shape = (0,) if found is None else (found[side], found[2])
        return jax.random.normal(jax.random.fold_in(key, index), shape, working_dtype(leaf.dtype))

    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten([one(leaf, i) for i, leaf in enumerate(leaves)])


def group_leaves(leaves: Sequence[Array], view: View) -> tuple[list[Group], list[int]]:
    """Leaves to compress, small ones by matrix shape, and the others."""
    groups: dict[tuple, Group] = {}
    rest = []
    for i, leaf in enumerate(leaves):
        found = view(leaf.shape)
        if found is None:
            rest.append(i)
            continue
        n, m, _ = found
        dtype = jnp.dtype(working_dtype(leaf.dtype))
        alone = i if n * m > STACKED_SIZE else None
        groups.setdefault((found, dtype, alone), Group([], (n, m), dtype)).leaves.append(i)
    return list(groups.values()), rest


def stack(leaves: Sequence[Array], group: Group) -> Array:
    """`[k, n, m]`."""
    return jnp.stack([leaves[i].reshape(group.shape).astype(group.dtype) for i in group.leaves])


def wide(leaf: Array) -> Array:
    """A leaf that is sent whole, in the dtype in which it is sent."""
    return leaf.astype(working_dtype(leaf.dtype))


def outer(left: Array, right: Array) -> Array:
    """`[k, n, r]`, `[k, r, m]` -> `[k, n, m]`."""
    # A transposition on the way to `left` would be folded into the product, which XLA:CPU then does slower.
    return jnp.einsum("knr,krm->knm", lax.optimization_barrier(left), right)


def keep_alive(new: Array, old: Array) -> Array:
    """The new factors `[k, s, r]`, except where they are zero: such say nothing about the next gradient."""
    return jnp.where(jnp.any(new != 0, axis=(1, 2), keepdims=True), new, old)


def put_back(leaves: list[Array], groups: Sequence[Group], stacks: Sequence[Array]) -> None:
    """Writes each matrix of the stacks `[k, n, m]` into its place of `leaves`, in that leaf's shape and dtype."""
    for group, matrices in zip(groups, stacks, strict=True):
        for k, i in enumerate(group.leaves):
            leaves[i] = matrices[k].reshape(leaves[i].shape).astype(leaves[i].dtype)
