"""Buckets: groups of leaves that are reduced together, each by its own collectives."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from .._core.layers import forward_positions
from .._core.trees import fold_keys
from .._core.types import Like, PyTree, State, Updates
from ..comm.base import Comm
from ..schedule.buckets import assign_buckets
from ..wire.flat import concatenate, from_vectors, vector_likes
from .base import (
    NO_EXTRAS,
    Extras,
    Reduced,
    Reducer,
    as_generator,
    forward_forms,
    is_map_params_placeholder,
    run,
    weakest,
)


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
      bucket_bytes: the maximum size of a bucket. Small buckets pay more latency, large ones leave nothing to overlap;
        start at 25 MiB, 5 MiB over Ethernet.
      first_bucket_bytes: the maximum size of the bucket that is ready last; small, since nothing overlaps with it.
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
    cfg = _Config(reducer, bucket_bytes, first_bucket_bytes, flat, layers)

    def rebuild(inner):
        return bucketed(
            inner, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, flat=flat, layers=layers
        )

    forms = forward_forms(rebuild, reducer, shards=False)
    return Reducer(partial(_init, cfg), partial(_reduce, cfg), weakest(reducer), forms)


class _Config(NamedTuple):
    reducer: Reducer
    bucket_bytes: int
    first_bucket_bytes: int | None
    flat: bool
    layers: Sequence[Any] | None


def _init(cfg: _Config, like: PyTree[Like]) -> State:
    if is_map_params_placeholder(like):
        return 0
    leaves, structure = jax.tree.flatten(like)
    states = []
    for i, members in enumerate(_assign(cfg, like)):
        part = vector_likes([leaves[k] for k in members])[0] if cfg.flat else _only(leaves, structure, members)
        states.append(fold_keys(cfg.reducer.init(part), i))  # buckets must not share their draws
    return tuple(states)


def _reduce(
    cfg: _Config, updates: Updates, state: State, comm: Comm, extras: Extras = NO_EXTRAS
) -> tuple[Reduced, State]:
    leaves, structure = jax.tree.flatten(updates)
    # A list for all buckets before any is reduced: their arrays are concatenated outside of the collectives.
    buckets = _assign(cfg, updates)
    parts = [
        concatenate([leaves[k] for k in members]) if cfg.flat else _only(leaves, structure, members)
        for members in buckets
    ]
    means, owns, states = list(leaves), list(leaves), []
    for members, part, bucket_state in zip(buckets, parts, state, strict=True):
        reduced, bucket_state = run(as_generator(cfg.reducer, part, bucket_state, comm, extras), comm)
        states.append(bucket_state)
        for out, found in ((means, reduced.mean), (owns, reduced.own)):
            inside = from_vectors([found], [out[i] for i in members]) if cfg.flat else jax.tree.leaves(found)
            for i, leaf in zip(members, inside, strict=True):
                out[i] = leaf
    return Reduced(structure.unflatten(means), structure.unflatten(owns)), tuple(states)


def _assign(cfg: _Config, tree: PyTree[Like]) -> list[list[int]]:
    """The leaves of each bucket."""
    leaves, positions = jax.tree.leaves(tree), forward_positions(tree, cfg.layers)
    buckets = assign_buckets(
        [leaves[i].size * leaves[i].dtype.itemsize for i in positions],
        bucket_bytes=cfg.bucket_bytes,
        first_bucket_bytes=cfg.first_bucket_bytes,
        kinds=[leaves[i].dtype for i in positions],
    )
    members = [[positions[k] for k in bucket] for bucket in buckets]
    # Buckets that stay trees have their leaves in the order of the tree, and so has their part of the state.
    return members if cfg.flat else [sorted(bucket) for bucket in members]


def _only(leaves: Sequence[Any], structure: Any, members: Sequence[int]) -> PyTree:
    """The tree with some of its leaves, and `None` in place of the others: a leaf keeps its path."""
    chosen = set(members)
    return structure.unflatten([leaf if i in chosen else None for i, leaf in enumerate(leaves)])
