"""Averages over workers: exact or by rounds of consensus over a graph, uniform or weighted by examples."""

from typing import Literal

import jax
import jax.numpy as jnp

from .._core.trees import plus
from .._core.types import Array, Int, PyTree
from ..comm.base import Comm
from ..topology.base import Topology
from ..topology.spectrum import is_doubly_stochastic
from ..wire.flat import fuse
from ..wire.mixing import change_at

Weights = Literal["batch", "uniform"]


def check_averaging(topology: Topology | None, rounds: int, weights: str) -> None:
    """Checks the arguments of `average`."""
    if weights not in ("batch", "uniform"):
        raise ValueError(f'weights must be "batch" or "uniform", got {weights!r}')
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if topology is None and rounds > 1:
        raise ValueError(f"without a topology the mean is exact after one round, so rounds must be 1, got {rounds}")
    if topology is not None and not is_doubly_stochastic(topology):
        raise ValueError(
            f"the mixing matrices of {topology.name} are not doubly stochastic, so workers would not converge to the "
            "mean: use an undirected graph, or a directed one in which all workers have the same number of neighbors"
        )


def average(
    tree: PyTree,
    examples: Array | None,
    fallback: PyTree,
    comm: Comm,
    topology: Topology | None,
    rounds: int,
    count: Int[Array, ""],
) -> PyTree:
    """The mean of all workers' trees, or its approximation after `rounds` rounds of consensus.

    Args:
      tree: of this worker, in float32 or better.
      examples: `b`, the number of examples that it counts for; `None`: all workers count alike. The pair `(b tree, b)`
        is averaged and divided, which is the pooled mean if the averaging is exact.
      fallback: the result where all examples that a worker receives number 0.
      comm: the workers.
      topology: the graph; `None`: an exact mean.
      rounds: of consensus; round `k` of this step is step `count · rounds + k` of a graph that changes.
      count: the number of steps so far.

    Returns:
      The tree; replicated if the mean is exact and `fallback` is replicated.
    """
    if topology is not None and topology.workers != comm.size:
        raise ValueError(
            f"the topology {topology.name} has {topology.workers} workers, but the axis has {comm.size}: make the "
            f"topology for {comm.size}"
        )
    message = tree if examples is None else (jax.tree.map(lambda x: _times(x, examples), tree), examples)
    if topology is None:
        leaves, structure = jax.tree.flatten(message)
        message = structure.unflatten(fuse(comm.mean, leaves))
    else:
        for k in range(rounds):
            message = plus(message, change_at(comm, topology, count * rounds + k, message))
    if examples is None:
        return message
    tree, number = message
    has_examples = number > 0

    def divide(x, otherwise):
        return jnp.where(has_examples, x / jnp.where(has_examples, number, 1).astype(x.dtype), otherwise)

    return jax.tree.map(divide, tree, fallback)


def _times(x: Array, examples: Array) -> Array:
    # Selected and not only multiplied, since 0 times NaN is NaN.
    return jnp.where(examples > 0, x * examples.astype(x.dtype), 0)
