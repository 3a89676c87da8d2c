"""Flat buffers, so that many leaves share one collective."""

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import DTypeLike

from .._core.compat import mesh_axes_left_over
from .._core.types import Array, Like, PyTree, Shape, Shaped, UInt
from ..comm.base import Comm
from ..state.marks import LeafOrder, Sharded, is_mark

SMALL = 2**16
# Shards of vectors are padded to a multiple of this: bits fill bytes, and XLA:CPU is many times slower for odd lengths.
MULTIPLE = 8
# The entries from which on a leaf is not stacked with others.
LARGE = 2**20
LARGEST_START = 2**31 - 1
# XLA:CPU takes some 20 ms to compile each part that is cut from one buffer of many.
FEW = 32


def concatenate(arrays: Sequence[Array], *, rows: bool = False) -> Array:
    """Concatenates arrays of one dtype into a vector `[Σ n]`; with `rows`, arrays `[W, *s]` into `[W, Σ n]`.

    On CPU payloads and small vectors are written into the result one by one: XLA would fuse the operations that compute
    them into the concatenation, and such a fusion computes all of them at every element of the result, on one thread. A
    few bias gradients made a small step 15 times slower, and packing the payloads of 10 million entries took four times
    as long. Floating matrices come from products, which are not fused, and writing them costs compile time; of many
    arrays a barrier keeps the operations apart, which costs none.
    """
    batch = 1 if rows else 0
    sizes = [math.prod(array.shape[batch:]) for array in arrays]
    vectors = [array.reshape(*array.shape[:batch], size) for array, size in zip(arrays, sizes)]
    if len(vectors) == 1:
        return vectors[0]
    apart = [
        not jnp.issubdtype(array.dtype, jnp.floating) or (size < SMALL and array.ndim < 2 + batch)
        for array, size in zip(arrays, sizes)
    ]
    starts = list(itertools.accumulate(sizes, initial=0))
    written = [i for i, is_apart in enumerate(apart) if is_apart]

    def write_each(*vectors: Array) -> Array:
        # A write of each would take most of the time to compile.
        if len(written) > FEW:
            return concatenate_all(*lax.optimization_barrier(vectors))
        parts = [jnp.zeros_like(x) if is_apart else x for x, is_apart in zip(vectors, apart)]
        flat = jnp.concatenate(parts, axis=-1)
        # First one entry of a payload: a write into zeros becomes a padding, which is fused like a concatenation.
        first = [(i, vectors[i][..., :1]) for i in written[:1] if not jnp.issubdtype(flat.dtype, jnp.floating)]
        for i, x in first + [(i, vectors[i]) for i in written]:
            flat = lax.dynamic_update_slice(flat, x, (0,) * batch + (starts[i],))
        return flat

    def concatenate_all(*vectors: Array) -> Array:
        return jnp.concatenate(vectors, axis=-1)

    # Beyond, the place of a write would wrap around: JAX takes it as a 32-bit number.
    if starts[-1] > LARGEST_START:
        return concatenate_all(*vectors)
    return lax.platform_dependent(*vectors, cpu=write_each, default=concatenate_all)


def split(flat: Array, sizes: Sequence[int]) -> list[Array]:
    """The inverse of `concatenate`: `[*batch, Σ n]` -> `[*batch, n]` for each size; a remainder is left out.

    Many parts are cut on CPU from a few pieces of the buffer, which takes one more copy, and a third of the time to
    compile 400 parts.
    """
    if len(sizes) <= FEW:
        return _cut(flat, sizes)

    def in_two_steps(flat: Array) -> tuple[Array, ...]:
        step = math.isqrt(len(sizes))
        groups = [sizes[i : i + step] for i in range(0, len(sizes), step)]
        pieces = lax.optimization_barrier(tuple(_cut(flat, [sum(group) for group in groups])))
        return tuple(part for piece, group in zip(pieces, groups) for part in _cut(piece, group))

    return list(lax.platform_dependent(flat, cpu=in_two_steps, default=lambda flat: tuple(_cut(flat, sizes))))


def _cut(flat: Array, sizes: Sequence[int]) -> list[Array]:
    ends = itertools.accumulate(sizes)
    return [lax.slice_in_dim(flat, end - size, end, axis=flat.ndim - 1) for size, end in zip(sizes, ends)]


def group_alike(things: Sequence[Any], kind: Callable[[Any], Hashable]) -> list[list[int]]:
    """Groups the positions of items by kind; kinds are in the order of their first item."""
    groups: dict[Hashable, list[int]] = {}
    for i, thing in enumerate(things):
        groups.setdefault(kind(thing), []).append(i)
    return list(groups.values())


def group_by_shape(leaves: Sequence[Like]) -> list[list[int]]:
    """Groups the positions of leaves by shape and dtype; large leaves are groups of their own."""

    def kind(i: int) -> Hashable:
        alone = i if math.prod(leaves[i].shape) >= LARGE else None
        return leaves[i].shape, _dtype(leaves[i]), alone

    return group_alike(range(len(leaves)), kind)


def stack_by_shape(leaves: Sequence[Array]) -> tuple[list[list[int]], list[Array]]:
    """Stacks leaves of equal shape and dtype, and returns their positions: one program for each shape, not leaf.

    Large leaves are not stacked: a copy of them would take more time and memory than their program takes to compile.
    """
    groups = group_by_shape(leaves)
    return groups, [jnp.stack([leaves[i] for i in members]) for members in groups]


def unstack(groups: Sequence[Sequence[int]], stacks: Sequence[Array]) -> list[Array]:
    """The inverse of `stack_by_shape`: the leaves in their order."""
    leaves = {i: stack[k] for members, stack in zip(groups, stacks, strict=True) for k, i in enumerate(members)}
    return [leaves[i] for i in range(len(leaves))]


def map_stack(f: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
    """`jax.vmap(f)` over stacks of `k` leaves or what was computed from them; a single leaf is not mapped.

    A dimension of one makes rows of what is vectors, for which compilers have worse code: XLA:TPU pads each row of
    bytes to four, and XLA:CPU copies it.
    """
    if jax.tree.leaves(stacks)[0].shape[0] != 1:
        return jax.vmap(f)(*stacks)
    return jax.tree.map(lambda x: x[None], f(*jax.tree.map(lambda x: x[0], stacks)))


def _dtype(leaf: Like) -> jnp.dtype:
    return jnp.dtype(leaf.dtype)


def vectors(leaves: Sequence[Array], *, padding: Callable[[int], int] = lambda size: 0) -> list[Array]:
    """Concatenates the leaves of each dtype into one vector, with `padding(size)` zeros at its end.

    Padded afterwards, a vector would be copied once more.
    """
    flats = []
    for members, like in zip(group_alike(leaves, _dtype), vector_likes(leaves), strict=True):
        zeros = padding(like.size)
        parts = [leaves[i] for i in members]
        flats.append(concatenate([*parts, jnp.zeros(zeros, like.dtype)] if zeros else parts))
    return flats


def vector_likes(leaves: Sequence[Like]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of `vectors(leaves)`."""
    return [
        jax.ShapeDtypeStruct((sum(math.prod(leaves[i].shape) for i in members),), leaves[members[0]].dtype)
        for members in group_alike(leaves, _dtype)
    ]


def vector_orders(tree: PyTree[Like]) -> list[LeafOrder]:
    """The names and shapes of the leaves in each of `vectors(jax.tree.leaves(tree))`."""
    order = leaf_order(tree)
    return [tuple(order[i] for i in members) for members in group_alike(jax.tree.leaves(tree), _dtype)]


class _AnyOrder(tuple):
    """The order of no leaves, which equals every other one.

    `optax.tree.map_params` compares a state with that of a placeholder for the parameters, which has no leaves.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def leaf_order(tree: PyTree[Like]) -> LeafOrder:
    """The names and shapes of all leaves, those of a marked one without its mark."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_mark)
    if not leaves:
        return _AnyOrder()
    return tuple((jax.tree_util.keystr(path, simple=True, separator="."), _shape_of(leaf)) for path, leaf in leaves)


def _shape_of(leaf: Any) -> Shape:
    if not is_mark(leaf):
        return tuple(leaf.shape)
    # A shard does not have the shape of its leaf, nor does an array of all shards.
    return leaf.shape if isinstance(leaf, Sharded) else _shape_of(leaf.value)


def from_vectors(flats: Sequence[Array], leaves: Sequence[Like]) -> list[Array]:
    """The inverse of `vectors`; a vector may be longer than its leaves, and keeps its dtype."""
    out: list[Any] = list(leaves)
    for members, flat in zip(group_alike(leaves, _dtype), flats, strict=True):
        parts = split(flat, [math.prod(leaves[i].shape) for i in members])
        for i, part in zip(members, parts, strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return out


def fuse(
    comm: Comm, collective: Callable[[Array], Array], arrays: Sequence[Array], *, rows: bool = False
) -> list[Array]:
    """`[collective(x) for x in arrays]` with one call for each dtype; `collective` may add a leading dimension.

    With `rows` the arrays have a leading dimension that stays. A worker alone sends nothing, and packing would only
    copy: it calls `collective` for each array.
    """
    if comm.size == 1:
        return [collective(array) for array in arrays]
    out: list[Any] = [None] * len(arrays)
    # Flattening would gather the mesh axes that the compiler shards.
    apart = bool(mesh_axes_left_over())
    kept = 1 if rows else 0
    for members in group_alike(range(len(arrays)), lambda i: (arrays[i].dtype, i if apart else 0)):
        shapes = [arrays[i].shape[kept:] for i in members]
        sizes = [math.prod(shape) for shape in shapes]
        if len(members) == 1 or not sum(sizes):
            for i in members:
                out[i] = collective(arrays[i])
            continue
        flat = collective(concatenate([arrays[i] for i in members], rows=rows))
        for i, shape, part in zip(members, shapes, split(flat, sizes), strict=True):
            out[i] = part.reshape(*flat.shape[:-1], *shape)
    return out


def permute(comm: Comm, tree: PyTree, pairs: Sequence[tuple[int, int]]) -> PyTree:
    """The tree of the worker from which this one receives, zeros without one: `comm.ppermute`, one for each dtype."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(fuse(comm, lambda x: comm.ppermute(x, pairs), leaves))


def fuse_bytes(
    comm: Comm, collective: Callable[[Array], Array], arrays: Sequence[Array], *, rows: bool = False
) -> list[Array]:
    """`fuse` with a single collective of bytes for all dtypes, which is faster than one for each."""
    if comm.size == 1 or len({array.dtype for array in arrays}) < 2:
        return fuse(comm, collective, arrays, rows=rows)
    to_bytes = jax.vmap(_to_bytes) if rows else _to_bytes
    arrived = fuse(comm, collective, [to_bytes(array) for array in arrays], rows=rows)
    return [_from_bytes(words, array[0] if rows else array) for words, array in zip(arrived, arrays, strict=True)]


def _to_bytes(x: Array) -> Array:
    if x.dtype.itemsize == 1:
        return lax.bitcast_convert_type(x.ravel(), jnp.uint8)

    def in_order(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.uint8).ravel()

    # XLA:TPU unrolls the bytes of a number beside each other, also those that are transposed afterwards.
    return lax.platform_dependent(x.ravel(), tpu=to_byte_planes, default=in_order)


def _from_bytes(words: Array, like: Array) -> Array:
    """`[*batch, bytes]` -> `[*batch, *like.shape]`."""
    batch, width = words.shape[:-1], like.dtype.itemsize
    if width == 1:
        return lax.bitcast_convert_type(words, like.dtype).reshape(*batch, *like.shape)

    def in_order(words: Array) -> Array:
        return lax.bitcast_convert_type(words.reshape(*batch, like.size, width), like.dtype)

    in_planes = partial(from_byte_planes, dtype=like.dtype)
    return lax.platform_dependent(words, tpu=in_planes, default=in_order).reshape(*batch, *like.shape)


def to_byte_planes(x: Shaped[Array, " size"]) -> UInt[Array, " bytes"]:
    """The lowest bytes of all numbers, then their second bytes, and so on."""
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, word)
    return jnp.concatenate([(bits >> word.type(8 * i)).astype(jnp.uint8) for i in range(word.itemsize)])


def from_byte_planes(words: UInt[Array, "*batch bytes"], *, dtype: DTypeLike) -> Shaped[Array, "*batch size"]:
    """The inverse of `to_byte_planes`."""
    word = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    planes = jnp.split(words, word.itemsize, axis=-1)
    shifted = [plane.astype(word) << word.type(8 * i) for i, plane in enumerate(planes)]
    return lax.bitcast_convert_type(reduce(operator.or_, shifted), dtype)


def shard_length(size: int, workers: int) -> int:
    """The number of entries in each worker's shard of an array of `size` entries."""
    return -(-size // (workers * MULTIPLE)) * MULTIPLE


def rows_of_workers(x: Array, workers: int, *, groups: int = 1) -> Array:
    """`[*s] -> [W, n]`, padded with zeros: row `j` is worker `j`'s shard; with several groups `[W, groups·n]`."""
    flat = x.ravel()
    # Tracing a padding of nothing takes as long as one of something.
    if padding := -flat.size % (groups * workers * MULTIPLE):
        flat = jnp.pad(flat, (0, padding))
    if groups == 1:
        return flat.reshape(workers, -1)
    return flat.reshape(groups, workers, -1).swapaxes(0, 1).reshape(workers, -1)
