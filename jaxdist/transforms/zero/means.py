"""The reduce-scatter of the gradients, bucket by bucket."""

from collections.abc import Sequence

import jax

from ..._layers import forward_positions
from ..._typing import State, Updates
from ...comm import Comm
from ...reducers._coded import fold_keys
from ...reducers.base import Reducer, drive, rounds_of
from ...schedule import assign_buckets

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
    form: Reducer, updates: Updates, state: State, buckets: Sequence[Sequence[int]], comm: Comm, agreed: dict
) -> tuple[Updates, State]:
    """The piece of the mean of each leaf that this worker owns; the collectives of one bucket after another's."""
    leaves, tree = jax.tree.flatten(updates)
    states = []
    for members, bucket_state in zip(buckets, state, strict=True):
        part = _only(updates, members)
        reduced, bucket_state = drive(rounds_of(form, part, bucket_state, comm, **agreed), comm)
        states.append(bucket_state)
        for i, piece in zip(members, jax.tree.leaves(reduced.mean), strict=True):
            leaves[i] = piece
    return tree.unflatten(leaves), tuple(states)


def _only(tree: Updates, members: Sequence[int]) -> Updates:
    """The tree with some of its leaves, and nothing for the others: a leaf keeps its path."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([leaf if i in set(members) else None for i, leaf in enumerate(leaves)])
