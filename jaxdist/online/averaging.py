"""How workers average: exactly, or by rounds of consensus over a graph; alike, or each by its examples."""

from typing import Literal

import jax
import jax.numpy as jnp

from .._core.trees import plus
from .._core.types import Array, Int, PyTree
from ..comm.base import Comm
from ..topology.base import Topology
from ..topology.spectrum import is_doubly_stochastic
from ..wire.flat import fused
from ..wire.mixing import change_at

Weights = Literal["batch", "uniform"]


def check_averaging(topology: Topology | None, rounds: int, weights: str) -> None:
    """Raises unless these can be the arguments of an averaging."""
    if weights not in ("batch", "uniform"):
        raise ValueError(f'weights must be "batch" or "uniform", got {weights!r}')
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if topology is None and rounds > 1:
        raise ValueError(f"without a topology the mean is exact after one round, so rounds must be 1, got {rounds}")
    if topology is not None and not is_doubly_stochastic(topology):
        raise ValueError(
            f"the mixing matrices of {topology.name} must be doubly stochastic, or workers do not agree on the mean: "
            "take an undirected graph, or a directed one in which all workers have as many neighbors"
        )


def average(
    tree: PyTree,
    examples: Array | None,
    skipped: PyTree,
    comm: Comm,
    topology: Topology | None,
    rounds: int,
    count: Int[Array, ""],
) -> PyTree:
    """The mean of everybody's tree, or what `rounds` rounds of consensus make of it.

    Args:
      tree: this worker's, in float32 or better.
      examples: `b`, how many examples it counts for; `None`: all count alike. The pair `(b tree, b)` is averaged and
        divided, which is the pooled mean as far as the averaging is exact.
      skipped: what a worker takes that hears of no examples at all.
      comm: the group.
      topology: the graph; `None`: an exact mean.
      rounds: of consensus; round `k` of this step is step `count · rounds + k` of a graph that changes.
      count: of the steps so far.

    Returns:
      The tree; agreed if the mean is exact and `skipped` is.
    """
    if topology is not None and topology.workers != comm.size:
        raise ValueError(
            f"{topology.name} is a graph of {topology.workers} workers, but there are {comm.size} along the axis: make "
            f"it for {comm.size}"
        )
    message = tree if examples is None else (jax.tree.map(lambda x: _times(x, examples), tree), examples)
    if topology is None:
        leaves, structure = jax.tree.flatten(message)
        message = structure.unflatten(fused(comm.mean, leaves))
    else:
        for k in range(rounds):
            message = plus(message, change_at(comm, topology, count * rounds + k, message))
    if examples is None:
        return message
    tree, heard = message
    some = heard > 0

    def divide(x, stay):
        return jnp.where(some, x / jnp.where(some, heard, 1).astype(x.dtype), stay)

    return jax.tree.map(divide, tree, skipped)


def _times(x: Array, examples: Array) -> Array:
    # 0 examples count for nothing, whatever is there.
    return jnp.where(examples > 0, x * examples.astype(x.dtype), 0)
