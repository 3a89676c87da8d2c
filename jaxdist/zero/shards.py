"""Trees as the flat pieces that workers own, and back."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.layers import forward_positions
from .._core.trees import fold_keys
from .._core.types import Array, AxisNames, Like, Payload, PRNGKeyArray, PyTree, Shape, State, Updates
from ..comm.base import Comm
from ..compressors.base import Compressor
from ..reducers.base import Extras, Reducer, as_generator, run
from ..schedule.buckets import assign_buckets
from ..state.marks import Sharded, axis_tuple, with_value
from ..wire.flat import alike, fused, fused_bytes, stacked
from ..wire.shards import cleared as cleared
from ..wire.shards import joined as joined
from ..wire.shards import length as length
from ..wire.shards import piece as piece
from ..wire.shards import rows as rows


def whole(x: Array, shape: Shape, comm: Comm) -> Array:
    """`[n] -> [*s]`: everybody's pieces, put together again."""
    return joined(comm.all_gather(x), jax.ShapeDtypeStruct(shape, x.dtype))


def gather(pieces: Sequence[Array], likes: Sequence[Like], comm: Comm) -> list[Array]:
    """Everybody's pieces of each leaf, put together again; one collective for each dtype.

    Not one for each bucket: XLA:TPU begins them all at once, and has more in memory than with one.
    """
    return [joined(rows, like) for rows, like in zip(fused(comm.all_gather, pieces), likes, strict=True)]


def cut_alone(tree: PyTree, axis: AxisNames) -> PyTree:
    """Cut leaves flat and padded, if there is no axis."""
    if axis_tuple(axis):
        return tree
    return jax.tree.map(lambda x: with_value(x, rows(x.value, 1)[0]) if _is_cut(x) else x, tree, is_leaf=_is_cut)


def whole_again(tree: PyTree, like: PyTree, axis: AxisNames) -> PyTree:
    """The inverse."""
    if axis_tuple(axis):
        return tree

    def one(x, before):
        return with_value(x, joined(x.value, before.value)) if _is_cut(x) else x

    return jax.tree.map(one, tree, like, is_leaf=_is_cut)


def _is_cut(x: Any) -> bool:
    return isinstance(x, Sharded)


# That of DDP. The gradients of a bucket are given up as soon as it has been sent.
BUCKET_BYTES = 25 * 2**20


def buckets_of(params: Updates, stage: int) -> list[list[int]]:
    """Which leaves share a collective: all of them, or in stage 2 about 25 MiB."""
    leaves, positions = jax.tree.leaves(params), forward_positions(params)
    sizes = [leaves[i].size * leaves[i].dtype.itemsize for i in positions]
    buckets = assign_buckets(sizes, bucket_bytes=BUCKET_BYTES if stage == 2 else sum(sizes) + 1)
    return [sorted(positions[k] for k in bucket) for bucket in buckets]


def init_buckets(form: Reducer, params: Updates, buckets: Sequence[Sequence[int]]) -> State:
    """A reducer's state for each bucket; they do not share their draws."""
    return tuple(fold_keys(form.init(_only(params, members)), i) for i, members in enumerate(buckets))


def mean_pieces(
    form: Reducer, updates: Updates, state: State, buckets: Sequence[Sequence[int]], comm: Comm, extras: Extras
) -> tuple[Updates, State]:
    """The piece of the mean of each leaf that this worker owns; the collectives of one bucket after another's."""
    leaves, tree = jax.tree.flatten(updates)
    states = []
    for members, bucket_state in zip(buckets, state, strict=True):
        part = _only(updates, members)
        reduced, bucket_state = run(as_generator(form, part, bucket_state, comm, extras), comm)
        states.append(bucket_state)
        for i, leaf in zip(members, jax.tree.leaves(reduced.mean), strict=True):
            leaves[i] = leaf
    return tree.unflatten(leaves), tuple(states)


def _only(tree: Updates, members: Sequence[int]) -> Updates:
    """The tree with some of its leaves, and nothing for the others: a leaf keeps its path."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([leaf if i in set(members) else None for i, leaf in enumerate(leaves)])


def encode(
    compressor: Compressor, pieces: Sequence[Array], shapes: Sequence[Shape], key: PRNGKeyArray, comm: Comm
) -> list[Payload]:
    """The payloads `[k, ...]` of the `k` pieces of each length: a program has one code for each length, not leaf.

    `shapes` are those of the leaves that they are pieces of; padding is coded as zeros.
    """
    sizes = map(math.prod, shapes)
    pieces = [cleared(x, size, comm.size, comm.index) for x, size in zip(pieces, sizes, strict=True)]
    groups, stacks = stacked(pieces)
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    return [jax.vmap(compressor.compress)(*pair) for pair in zip(stacks, keys, strict=True)]


def decode(compressor: Compressor, payloads: Sequence[Payload], pieces: Sequence[Like]) -> list[Array]:
    """The inverse of `encode`; payloads `[*batch, k, ...]` give pieces `[*batch, n]`."""
    out: list = list(pieces)
    groups = alike(pieces, lambda x: (x.shape, jnp.dtype(x.dtype)))
    for members, payload in zip(groups, payloads, strict=True):
        like = jax.ShapeDtypeStruct(pieces[members[0]].shape, pieces[members[0]].dtype)
        found = _mapped(compressor, like, payload, len(members))
        for k, i in enumerate(members):
            out[i] = found[..., k, :]
    return out


def _mapped(compressor: Compressor, like: Like, payload: Payload, members: int) -> Array:
    one = jax.eval_shape(compressor.compress, like, jax.random.key(0))
    dimensions = jax.tree.leaves(payload)[0].ndim - jax.tree.leaves(one)[0].ndim
    batch = jax.tree.leaves(payload)[0].shape[:dimensions]
    assert batch[-1] == members
    flat = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[dimensions:]), payload)
    return jax.vmap(lambda x: compressor.decompress(x, like))(flat).reshape(*batch, *like.shape)


def gather_payloads(payloads: Sequence[Payload], comm: Comm, *, agreed: bool = True) -> list[Payload]:
    """Everybody's, `[W, k, ...]`, by one collective of bytes."""
    arrays, structure = jax.tree.flatten(list(payloads))
    return structure.unflatten(fused_bytes(lambda x: comm.all_gather(x, agreed=agreed), arrays))
