"""Flat buckets: leaves are concatenated, and each bucket is reduced by itself."""

import jax

from ..schedule import assign_buckets
from ._coded import fold_keys
from ._flat import concatenate, from_vectors, vector_likes
from .base import Reduced, Reducer, drive, feedback_form, held_by, is_stand_in, rounds_of


def bucketed(reducer: Reducer, *, bucket_bytes: int = 25 << 20, first_bucket_bytes: int | None = 1 << 20) -> Reducer:
    """Reduces the tree as flat vectors of about `bucket_bytes`, last leaves first, with one collective for each.

    Separate collectives can start while earlier layers are still computing. A code sees the whole bucket: one scale,
    one top-k for all leaves in it. Matrices become vectors: PowerSGD does not compress inside buckets.

    *On the wire*: for each bucket what the reducer sends for one vector of its size.

    *State*: a tuple with the reducer's state for each bucket.

    Args:
      reducer: reduces one flat vector.
      bucket_bytes: the cap of a bucket. Too small pays latency for every bucket, too large leaves nothing to overlap;
        start at 25 MiB, 5 MiB over Ethernet.
      first_bucket_bytes: the cap of the bucket that is ready last; small, so that little is left when backward ends.

    Returns:
      The reducer.

    Raises:
      ValueError: a cap is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxdist as jd
      >>> reducer = jd.bucketed(jd.error_feedback(jd.compressed(jd.top_k(0.01))), first_bucket_bytes=1000)
      >>> [state.residual.value.shape for state in reducer.init({"a": jnp.zeros(300), "b": jnp.zeros(50)})]
      [(50,), (300,)]

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, 2020.
    """
    assign_buckets([], bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)  # checks the caps

    def plan(leaves):
        return assign_buckets(
            [leaf.size * leaf.dtype.itemsize for leaf in leaves],
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            kinds=[leaf.dtype for leaf in leaves],
        )

    def init(like):
        if is_stand_in(like):
            return 0
        leaves = jax.tree.leaves(like)
        # Buckets must not share their draws.
        return tuple(fold_keys(reducer.init(_flat_like(leaves, members)), i) for i, members in enumerate(plan(leaves)))

    def reduce(updates, state, comm, **agreed):
        leaves, structure = jax.tree.flatten(updates)
        means, owns, states = list(leaves), list(leaves), []
        for members, bucket_state in zip(plan(leaves), state, strict=True):
            flat = concatenate([leaves[i] for i in members])
            reduced, bucket_state = drive(rounds_of(reducer, flat, bucket_state, comm, **agreed), comm)
            states.append(bucket_state)
            inside = [leaves[i] for i in members]
            for i, mean, own in zip(members, *(from_vectors([flat], inside) for flat in reduced), strict=True):
                means[i], owns[i] = mean, own
        return Reduced(structure.unflatten(means), structure.unflatten(owns)), tuple(states)

    def held(state, like, comm):
        leaves, structure = jax.tree.flatten(like)
        out = list(leaves)
        for members, bucket_state in zip(plan(leaves), state, strict=True):
            flat = held_by(reducer, bucket_state, _flat_like(leaves, members), comm)
            for i, part in zip(members, from_vectors([flat], [leaves[i] for i in members]), strict=True):
                out[i] = part
        return structure.unflatten(out)

    return Reducer(
        init,
        reduce,
        law=reducer.law,
        held=held,
        for_feedback=lambda: bucketed(
            feedback_form(reducer), bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes
        ),
    )


def _flat_like(leaves: list, members: list[int]) -> jax.ShapeDtypeStruct:
    return vector_likes([leaves[i] for i in members])[0]
