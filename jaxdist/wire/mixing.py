"""Weighted averages over the neighbors in a topology, one collective for each dtype and message."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import comm as comms
from .._core.dtypes import widen, widest_float, working_dtype
from .._core.types import Array, Int, PyTree
from ..comm.base import Comm
from ..topology.base import Round, Topology
from .buffers import fuse


def mixing_change(
    comm: Comm, topology: Topology, count: Int[Array, ""], tree: PyTree, *, like: PyTree | None = None
) -> PyTree:
    """The change `Σ_j W_ij x_j - x_i` of this worker by step `count` of a topology."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree if like is None else like)]
    branches = [_mixer(round, topology.workers, dtypes) for round in topology.rounds]
    if len(branches) == 1:
        return structure.unflatten(branches[0](comm, leaves))
    which = jnp.asarray(topology.order, jnp.int32)[count % len(topology.order)]
    return structure.unflatten(comms.switch(which, branches, comm, leaves))


def _mixer(round: Round, workers: int, dtypes: Sequence[jnp.dtype]) -> Callable[[Comm, list[Array]], list[Array]]:
    # Zero except for push-sum, whose rows do not sum to one.
    excess = _row_sums(round, workers) - 1

    def mix(comm: Comm, leaves: list[Array]) -> list[Array]:
        sent = [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        # All weights are 1/W: an all-reduce sends less than W - 1 messages.
        if is_mean(round, workers):
            means = fuse(comm, comm.mean, sent)
            return [widen(comm.varying(mean)) - widen(x) for mean, x in zip(means, sent, strict=True)]
        out = [comm.varying(jnp.zeros(leaf.shape, working_dtype(leaf.dtype))) for leaf in leaves]
        if np.max(np.abs(excess)) > 1e-9:
            out = [multiply_in_dtype(widen(leaf), weight_of(comm, excess.tolist())) for leaf in leaves]
        # Σ_j W_ij (x_j - x_i): differences, so that equal models stay equal to the last bit.
        for message in round.messages:
            weight = weight_of(comm, message.weights)
            arrived = fuse(comm, lambda x, pairs=message.pairs: comm.ppermute(x, pairs), sent)
            out = [
                total + multiply_in_dtype(widen(theirs) - widen(mine), weight)
                for total, theirs, mine in zip(out, arrived, sent, strict=True)
            ]
        return out

    return mix


def _row_sums(round: Round, workers: int) -> np.ndarray:
    return np.sum([round.self_weights, *(message.weights for message in round.messages)], axis=0).reshape(workers)


def is_mean(round: Round, workers: int) -> bool:
    """Checks whether a round is a mean over all workers, for an all-reduce; two workers exchange instead."""
    weights = {*round.self_weights, *(weight for message in round.messages for weight in message.weights)}
    return (
        workers > 2
        and len(round.messages) == workers - 1
        and all(abs(weight * workers - 1) < 1e-9 for weight in weights)
    )


def weight_of(comm: Comm, weights: Sequence[float]) -> Array | float:
    """The weight of this worker; a static number if all are equal."""
    if len(set(weights)) == 1:
        return weights[0]
    return jnp.asarray(np.array(weights), widest_float())[comm.index]


def multiply_in_dtype(x: Array, weight: Array | float) -> Array:
    """Multiplies in the dtype of `x`."""
    return x * (weight if isinstance(weight, float | int) else weight.astype(x.dtype))
