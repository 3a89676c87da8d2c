"""Trees as the flat shards that workers own: averaging into shards, gathering them, and their payloads."""

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
from ..wire.flat import fuse, fuse_bytes, group_alike, stack_by_shape
from ..wire.shards import clear_padding, rows, unshard

# DDP's default. The gradients of a bucket can be freed as soon as it has been sent.
BUCKET_BYTES = 25 * 2**20


def shard_for_one_worker(tree: PyTree, axis: AxisNames) -> PyTree:
    """Flattens and pads sharded leaves into a single shard, if there is no axis: one worker keeps them as written."""
    if axis_tuple(axis):
        return tree
    return jax.tree.map(
        lambda x: with_value(x, rows(x.value, 1)[0]) if _is_sharded(x) else x, tree, is_leaf=_is_sharded
    )


def unshard_for_one_worker(tree: PyTree, like: PyTree, axis: AxisNames) -> PyTree:
    """The inverse of `shard_for_one_worker`; `like` has the original shapes."""
    if axis_tuple(axis):
        return tree

    def unshard_leaf(x: Any, original: Any) -> Any:
        return with_value(x, unshard(x.value, original.value)) if _is_sharded(x) else x

    return jax.tree.map(unshard_leaf, tree, like, is_leaf=_is_sharded)


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def buckets_of(params: Updates, stage: int) -> list[list[int]]:
    """The positions of leaves that share a collective: all of them, or in stage 2 about 25 MiB."""
    # Neighbors in the forward pass share a bucket, since their gradients are ready at about the same time.
    leaves, positions = jax.tree.leaves(params), forward_positions(params)
    sizes = [leaves[i].size * leaves[i].dtype.itemsize for i in positions]
    buckets = assign_buckets(sizes, bucket_bytes=BUCKET_BYTES if stage == 2 else sum(sizes) + 1)
    return [sorted(positions[k] for k in bucket) for bucket in buckets]


def init_buckets(form: Reducer, params: Updates, buckets: Sequence[Sequence[int]]) -> State:
    """A reducer's state for each bucket, with independent random keys."""
    return tuple(fold_keys(form.init(_only(params, members)), i) for i, members in enumerate(buckets))


def mean_pieces(
    form: Reducer, updates: Updates, state: State, buckets: Sequence[Sequence[int]], comm: Comm, extras: Extras
) -> tuple[Updates, State]:
    """Returns this worker's shard of the mean of each leaf; the collectives of one bucket run after another's."""
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
    """The tree with the leaves at these positions and `None` for the others; a leaf keeps its path."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([leaf if i in set(members) else None for i, leaf in enumerate(leaves)])


def gather(shards: Sequence[Array], likes: Sequence[Like], comm: Comm) -> list[Array]:
    """The full arrays, from all workers' shards of each leaf; one collective for each dtype.

    Not one for each bucket: XLA:TPU starts them all at once, which takes more memory than a single one.
    """
    return [unshard(rows, like) for rows, like in zip(fuse(comm.all_gather, shards), likes, strict=True)]


def gather_payloads(payloads: Sequence[Payload], comm: Comm, *, agreed: bool = True) -> list[Payload]:
    """All workers' payloads, `[W, k, ...]`, by one collective of bytes."""
    arrays, structure = jax.tree.flatten(list(payloads))
    return structure.unflatten(fuse_bytes(lambda x: comm.all_gather(x, agreed=agreed), arrays))


def encode(
    compressor: Compressor, shards: Sequence[Array], shapes: Sequence[Shape], key: PRNGKeyArray, comm: Comm
) -> list[Payload]:
    """The payloads `[k, ...]` of the `k` shards of each length: the program encodes once per length, not per leaf.

    `shapes` are the shapes of the full arrays; padding is encoded as zeros.
    """
    # Compressors have one scale per block, which values in the padding would distort.
    sizes = map(math.prod, shapes)
    shards = [clear_padding(x, size, comm.size, comm.index) for x, size in zip(shards, sizes, strict=True)]
    groups, stacks = stack_by_shape(shards)
    # Each leaf draws with its own key.
    keys = [jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(members)) for members in groups]
    return [jax.vmap(compressor.compress)(*pair) for pair in zip(stacks, keys, strict=True)]


def decode(compressor: Compressor, payloads: Sequence[Payload], shards: Sequence[Like]) -> list[Array]:
    """The inverse of `encode`; payloads `[*batch, k, ...]` give shards `[*batch, n]`."""
    out: list = list(shards)
    groups = group_alike(shards, lambda x: (x.shape, jnp.dtype(x.dtype)))
    for members, payload in zip(groups, payloads, strict=True):
        like = jax.ShapeDtypeStruct(shards[members[0]].shape, shards[members[0]].dtype)
        decoded = _decode_stack(compressor, like, payload, len(members))
        for k, i in enumerate(members):
            out[i] = decoded[..., k, :]
    return out


def _decode_stack(compressor: Compressor, like: Like, payload: Payload, members: int) -> Array:
    """Decodes `[*batch, k, ...]` in one `vmap` over all the leading dimensions."""
    # The leading dimensions are those that a single payload does not have.
    single = jax.eval_shape(compressor.compress, like, jax.random.key(0))
    dimensions = jax.tree.leaves(payload)[0].ndim - jax.tree.leaves(single)[0].ndim
    batch = jax.tree.leaves(payload)[0].shape[:dimensions]
    assert batch[-1] == members
    flat = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[dimensions:]), payload)
    return jax.vmap(lambda x: compressor.decompress(x, like))(flat).reshape(*batch, *like.shape)
