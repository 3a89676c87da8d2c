"""Weighted averages over the neighbors in a topology, one collective per dtype and message."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import comm as comms
from .._core.dtypes import widen, working_dtype
from .._core.types import Array, Int, PyTree
from ..comm.base import Comm
from ..topology.base import Round, Topology
from .flat import fused


def change_at(
    comm: Comm, topology: Topology, count: Int[Array, ""], tree: PyTree, *, like: PyTree | None = None
) -> PyTree:
    """`change` for step `count` of a topology, outside a method."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree if like is None else like)]
    branches = [_one_round(one, topology.workers, dtypes) for one in topology.rounds]
    if len(branches) == 1:
        return structure.unflatten(branches[0](comm, leaves))
    which = jnp.asarray(topology.order, jnp.int32)[count % len(topology.order)]
    return structure.unflatten(comms.switch(which, branches, comm, leaves))


def _one_round(one: Round, workers: int, dtypes: Sequence[jnp.dtype]) -> Callable[[Comm, list[Array]], list[Array]]:
    left = _row_sums(one, workers) - 1  # push-sum alone has rows that sum to something else

    def talk(comm: Comm, leaves: list[Array]) -> list[Array]:
        sent = [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        if is_mean(one, workers):
            means = fused(comm.mean, sent)
            return [widen(comm.varying(mean)) - widen(x) for mean, x in zip(means, sent, strict=True)]
        out = [comm.varying(jnp.zeros(leaf.shape, working_dtype(leaf.dtype))) for leaf in leaves]
        if np.abs(left).max() > 1e-9:
            out = [times(widen(leaf), weight_of(comm, left.tolist())) for leaf in leaves]
        for message in one.messages:
            weight = weight_of(comm, message.weights)
            arrived = fused(lambda x, pairs=message.pairs: comm.ppermute(x, pairs), sent)
            out = [
                total + times(widen(theirs) - widen(mine), weight)
                for total, theirs, mine in zip(out, arrived, sent, strict=True)
            ]
        return out

    return talk


def _row_sums(one: Round, workers: int) -> np.ndarray:
    return np.sum([one.self_weights, *(message.weights for message in one.messages)], axis=0).reshape(workers)


def is_mean(one: Round, workers: int) -> bool:
    """Whether a round is the mean of all, for an all-reduce. Two workers exchange instead, for the same bytes."""
    weights = {*one.self_weights, *(weight for message in one.messages for weight in message.weights)}
    return (
        workers > 2 and len(one.messages) == workers - 1 and all(abs(weight * workers - 1) < 1e-9 for weight in weights)
    )


def weight_of(comm: Comm, weights: Sequence[float]) -> Array | float:
    """The entry of this worker; a plain number where all have the same."""
    if len(set(weights)) == 1:
        return weights[0]
    return jnp.asarray(np.array(weights, np.float32))[comm.index]


def times(x: Array, weight: Array | float) -> Array:
    """In the dtype of `x`."""
    return x * (weight if isinstance(weight, float | int) else weight.astype(x.dtype))
