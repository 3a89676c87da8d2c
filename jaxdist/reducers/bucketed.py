"""Buckets of leaves, each reduced by a collective of its own, as in PyTorch's DDP."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .._core.descriptions import with_description
from .._core.trees import select_leaves
from .._core.types import Like, PyTree, State, Updates
from ..comm.base import Comm
from ..schedule.buckets import assign_buckets, forward_positions
from ..wire.buffers import concatenate, from_vectors, leaf_order, vector_likes
from .messages import for_real_numbers
from .parts import check_parts, init_parts, reduce_parts
from .reducer import NO_EXTRAS, Extras, Reduced, Reducer, Result, forward_forms, forward_limits, weakest
from .trees import is_map_params_placeholder


@with_description
def bucketed(
    reducer: Reducer,
    *,
    bucket_bytes: int = 25 << 20,
    first_bucket_bytes: int | None = 1 << 20,
    flat: bool = True,
    layers: Sequence[Any] | None = None,
) -> Reducer:
    """Reduces the tree in buckets of about `bucket_bytes`, last layers first, with separate collectives for each.

    Separate collectives can start while earlier layers are still computing. The reducer sees a bucket as one vector:
    one scale, one top-k for all leaves in it. With `flat=False` it sees the leaves, as it would without buckets:
    matrices stay matrices, which PowerSGD needs.

    A bucket is ready when the backward pass has computed the last of its gradients, so leaves should be in the order in
    which the forward pass uses them. The keys of a dict are sorted instead: an embedding before blocks `block_0`,
    `block_1`, ... would share a bucket with the head. Pass the order as `layers=`.

    *On the wire*: for each bucket what the reducer sends for one vector of its size, or for its leaves.

    *State*: a tuple with the reducer's state for each bucket.

    Args:
      reducer: reduces one flat vector, or the leaves of one bucket.
      bucket_bytes: the maximum size of a bucket. Small buckets pay more latency, large ones leave nothing to overlap.
        25 MiB is PyTorch's; with ResNet-50 its authors were fastest at 10 to 25 MB over NCCL and at 5 over gloo.
      first_bucket_bytes: the maximum size of the bucket that is ready last; small, since nothing overlaps with it.
      flat: whether leaves of a bucket become one vector.
      layers: the top-level entries of the tree in forward order, as `schedule.forward_order(loss, params, batch)` reads
        it from a loss. `None`: the order of a sequence or NamedTuple; keys of a dict by name, `block_2` before
        `block_10`.

    Raises:
      ValueError: a cap is not positive; with `flat`, the reducer needs matrices or whole gradients (`power_sgd`, `dgc`
        with `clip_norm=`); from `init`, `layers` does not name each entry of the tree once.

    Examples:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.bucketed(jd.error_feedback(jd.compressed(jd.top_k(0.01))), first_bucket_bytes=1000)
      >>> [state.residual.value.shape for state in reducer.init({"a": jnp.zeros(300), "b": jnp.zeros(50)})]
      [(50,), (300,)]

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704, 2020.
    """
    # Checks the caps.
    assign_buckets([], bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    if flat:
        check_parts("bucketed() makes one vector of the leaves of a bucket, unless flat=False", reducer)
    return _Bucketed(reducer, bucket_bytes, first_bucket_bytes, flat, layers).as_reducer()


class _Bucketed(NamedTuple):
    reducer: Reducer
    bucket_bytes: int
    first_bucket_bytes: int | None
    flat: bool
    layers: Sequence[Any] | None

    def as_reducer(self) -> Reducer:
        forms = forward_forms(lambda inner: self._replace(reducer=inner).as_reducer(), self.reducer, shards=False)
        return Reducer(
            for_real_numbers(self.init), self.reduce, weakest(self.reducer), forms, limits=forward_limits(self.reducer)
        )

    def init(self, like: PyTree[Like]) -> State:
        if is_map_params_placeholder(like):
            return 0
        leaves, buckets = jax.tree.leaves(like), self._assign(like)
        if self.flat:
            order = leaf_order(like)
            return init_parts(
                self.reducer,
                [vector_likes([leaves[i] for i in members])[0] for members in buckets],
                orders=[tuple(order[i] for i in members) for members in buckets],
            )
        return init_parts(self.reducer, [select_leaves(like, members) for members in buckets])

    def reduce(self, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS) -> Result:
        leaves, structure = jax.tree.flatten(updates)
        buckets = self._assign(updates)
        # All buckets are made before any is reduced: their arrays are concatenated outside of the collectives.
        if self.flat:
            parts = [concatenate([leaves[i] for i in members]) for members in buckets]
        else:
            parts = [select_leaves(updates, members) for members in buckets]
        reduced, state = reduce_parts(self.reducer, parts, state, comm, extras)
        means, owns = list(leaves), list(leaves)
        for members, done in zip(buckets, reduced, strict=True):
            likes = [leaves[i] for i in members]
            for out, part in ((means, done.mean), (owns, done.own)):
                inside = from_vectors([part], likes) if self.flat else jax.tree.leaves(part)
                for i, leaf in zip(members, inside, strict=True):
                    out[i] = leaf
        return Reduced(structure.unflatten(means), structure.unflatten(owns)), state

    def _assign(self, tree: PyTree[Like]) -> list[list[int]]:
        leaves, positions = jax.tree.leaves(tree), forward_positions(tree, self.layers)
        buckets = assign_buckets(
            [leaves[i].size * leaves[i].dtype.itemsize for i in positions],
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
            kinds=[leaves[i].dtype for i in positions],
        )
        members = [[positions[k] for k in bucket] for bucket in buckets]
        # Buckets that stay trees have their leaves in the order of the tree, and so has their part of the state.
        return members if self.flat else [sorted(bucket) for bucket in members]
