"""Buckets: leaves that travel together, and each bucket is reduced by itself."""

from collections.abc import Sequence
from typing import Any

import jax

from .._core.layers import forward_positions
from .._core.trees import fold_keys
from ..schedule.buckets import assign_buckets
from ..wire.flat import concatenate, from_vectors, vector_likes
from .base import NO_EXTRAS, Reduced, Reducer, as_generator, forward_forms, is_map_params_placeholder, run, weakest


def bucketed(
    reducer: Reducer,
    *,
    bucket_bytes: int = 25 << 20,
    first_bucket_bytes: int | None = 1 << 20,
    flat: bool = True,
    layers: Sequence[Any] | None = None,
) -> Reducer:
    """Reduces the tree in buckets of about `bucket_bytes`, last layers first, with the collectives of each by itself.

    Separate collectives can start while earlier layers are still computing. A code sees the whole bucket as one vector:
    one scale, one top-k for all leaves in it. With `flat=False` it sees the leaves, as it would without buckets:
    matrices stay matrices, which PowerSGD needs.

    A bucket is ready when the backward pass has made the last of its gradients, so that leaves must be in the order in
    which the forward pass uses them. A dict does not have it: its keys are sorted, and an embedding before blocks
    `block_0`, `block_1`, ... ends up in one bucket with the head. Tell it, `layers=`.

    *On the wire*: for each bucket what the reducer sends for one vector of its size, or for its leaves.

    *State*: a tuple with the reducer's state for each bucket.

    Args:
      reducer: reduces one flat vector, or the leaves of one bucket.
      bucket_bytes: the cap of a bucket. Too small pays latency for every bucket, too large leaves nothing to overlap;
        start at 25 MiB, 5 MiB over Ethernet.
      first_bucket_bytes: the cap of the bucket that is ready last; small, so that little is left when backward ends.
      flat: whether leaves of a bucket become one vector.
      layers: the top-level entries of the tree in forward order, as `schedule.forward_order(loss, params, batch)` reads
        it from a loss. `None`: the order of a sequence or NamedTuple; keys of a dict by name, `block_2` before
        `block_10`.

    Returns:
      The reducer.

    Raises:
      ValueError: a cap is not positive; from `init`, `layers` does not name each entry of the tree once.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.reducers.bucketed(jd.error_feedback(jd.compressed(jd.top_k(0.01))), first_bucket_bytes=1000)
      >>> [state.residual.value.shape for state in reducer.init({"a": jnp.zeros(300), "b": jnp.zeros(50)})]
      [(50,), (300,)]
      >>> reducer = jd.reducers.bucketed(
      ...     jd.error_feedback(jd.compressed(jd.top_k(0.01))), first_bucket_bytes=100, layers=["b", "a"]
      ... )
      >>> [state.residual.value.shape for state in reducer.init({"a": jnp.zeros(300), "b": jnp.zeros(50)})]
      [(300,), (50,)]

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020.
    """
    assign_buckets([], bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)  # checks the caps

    def plan(tree):
        positions = forward_positions(tree, layers)
        leaves = jax.tree.leaves(tree)
        buckets = assign_buckets(
            [leaves[i].size * leaves[i].dtype.itemsize for i in positions],
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            kinds=[leaves[i].dtype for i in positions],
        )
        # A tree without flattening has its leaves in the order of the tree, and so has its part of the state.
        return [[positions[k] for k in bucket] if flat else sorted(positions[k] for k in bucket) for bucket in buckets]

    def parts(tree, as_vector):
        """For each bucket its members and what its reducer sees of a tree."""
        leaves, structure = jax.tree.flatten(tree)

        def part(members):
            if flat:
                return as_vector([leaves[i] for i in members])
            chosen = set(members)
            return structure.unflatten([leaf if i in chosen else None for i, leaf in enumerate(leaves)])

        return [(members, part(members)) for members in plan(tree)]

    def write(out, members, part):
        """Puts the leaves of one bucket into their places in a list."""
        inside = [out[i] for i in members]
        found = from_vectors([part], inside) if flat else jax.tree.leaves(part)
        for i, leaf in zip(members, found, strict=True):
            out[i] = leaf

    def init(like):
        if is_map_params_placeholder(like):
            return 0
        # Buckets must not share their draws.
        return tuple(fold_keys(reducer.init(part), i) for i, (_, part) in enumerate(parts(like, _vector_like)))

    def reduce(updates, state, comm, extras=NO_EXTRAS):
        leaves, structure = jax.tree.flatten(updates)
        means, owns, states = list(leaves), list(leaves), []
        for (members, part), bucket_state in zip(parts(updates, concatenate), state, strict=True):
            reduced, bucket_state = run(as_generator(reducer, part, bucket_state, comm, extras), comm)
            states.append(bucket_state)
            write(means, members, reduced.mean)
            write(owns, members, reduced.own)
        return Reduced(structure.unflatten(means), structure.unflatten(owns)), tuple(states)

    def rebuild(inner):
        return bucketed(
            inner, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, flat=flat, layers=layers
        )

    return Reducer(init, reduce, weakest(reducer), forward_forms(rebuild, reducer, shards=False))


def _vector_like(leaves: list) -> jax.ShapeDtypeStruct:
    return vector_likes(leaves)[0]
