"""Weighted averages over all workers or over neighbors, which the online methods share."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._core.checks import NO_PARAMS, check_count
from .._core.trees import plus
from .._core.types import Array, AxisNames, Int, PyTree, Updates
from ..comm.base import Comm
from ..comm.over import over
from ..topology.base import Topology, check_topology
from ..topology.spectrum import is_doubly_stochastic
from ..transforms.common import LearningRate, check_per_worker
from ..transforms.local_gradients import check_leaves, check_local
from ..transforms.weights import weight_of_worker, widen_weight
from ..wire.buffers import fuse
from ..wire.mixing import mixing_change
from .geometry import Geometry

Weights = Literal["batch", "uniform"]


class Averaging(NamedTuple):
    """The arguments of an online method, and how it averages over workers or neighbors."""

    geometry: Geometry
    learning_rate: LearningRate
    topology: Topology | None
    rounds: int
    weights: Weights
    combine_first: bool
    axis: AxisNames

    @property
    def keeps_examples(self) -> bool:
        """Whether the next message is weighted by the examples of this step."""
        return self.combine_first and self.weights == "batch"

    def begin_step(
        self, updates: Updates, params: PyTree | None, examples: Any, active: Any
    ) -> tuple[Comm, list[comms.Sent], Array | None]:
        """Checks what a step was given; returns the workers, the list of what they will send, and this worker's `b`."""
        if params is None:
            raise ValueError(NO_PARAMS)
        check_leaves(updates)
        check_local(updates, self.axis)
        # Models differ between workers, unless each step ends with an exact mean.
        if self.topology is not None or self.combine_first:
            check_per_worker(params, self.axis)
        ledger: list[comms.Sent] = []
        comm = comms.count_sent(over(self.axis), ledger)
        number = weight_of_worker(examples, active, name="any-batch mirror descent")
        return comm, ledger, None if number is None else comm.varying(widen_weight(number, updates))

    def average_over_workers(
        self, tree: PyTree, number: Array | None, fallback: PyTree, comm: Comm, count: Int[Array, ""]
    ) -> PyTree:
        """The mean of all workers' trees in float32, exact or, with a topology, after `rounds` rounds of consensus.

        `number` is `b`, the number of examples that a worker's tree counts for; `None`: all count alike. Where a worker
        receives none at all the result is `fallback`; it is replicated if that is, and the mean is exact.
        """
        topology = self.topology
        if topology is not None and topology.workers != comm.size:
            raise ValueError(
                f"the topology {topology.name} has {topology.workers} workers, but the axis has {comm.size}: make the "
                f"topology for {comm.size}"
            )
        examples = number if self.weights == "batch" else None
        # Pairs (b z, b) are averaged and divided: Σ_j W_ij b_j z_j / Σ_j W_ij b_j, the pooled mean if W is exact.
        message = tree if examples is None else (jax.tree.map(lambda x: _times(x, examples), tree), examples)
        if topology is None:
            # All leaves and the count in one all-reduce.
            leaves, structure = jax.tree.flatten(message)
            message = structure.unflatten(fuse(comm, comm.mean, leaves))
        else:
            for k in range(self.rounds):
                # x_i + Σ_j W_ij (x_j - x_i); round k of this step is step count · rounds + k of a graph that changes.
                message = plus(message, mixing_change(comm, topology, count * self.rounds + k, message))
        if examples is None:
            return message
        tree, total = message
        has_examples = total > 0

        def divide(x, otherwise):
            return jnp.where(has_examples, x / jnp.where(has_examples, total, 1).astype(x.dtype), otherwise)

        return jax.tree.map(divide, tree, fallback)


def updates_to(new: PyTree, params: PyTree) -> Updates:
    """The updates from `params` to `new`, in float32 or better: rounded to bfloat16 they would lead elsewhere."""
    return jax.tree.map(lambda x, p: x - p.astype(x.dtype), new, params)


def check_averaging(geometry: Any, topology: Any, rounds: int, weights: str) -> None:
    """Checks the geometry, and how workers are averaged."""
    if not isinstance(geometry, Geometry):
        raise TypeError(f"expected a geometry, such as euclidean(), got {geometry!r}")
    if topology is not None:
        check_topology(topology)
    if weights not in ("batch", "uniform"):
        raise ValueError(f'weights must be "batch" or "uniform", got {weights!r}')
    check_count("rounds", rounds, 1)
    if topology is None and rounds > 1:
        raise ValueError(f"without a topology the mean is exact after one round, so rounds must be 1, got {rounds}")
    if topology is not None and not is_doubly_stochastic(topology):
        raise ValueError(
            f"the mixing matrices of {topology.name} are not doubly stochastic, so workers would not converge to the "
            "mean: use an undirected graph, or a directed one in which all workers have the same number of neighbors"
        )


def _times(x: Array, examples: Array) -> Array:
    # Selected and not only multiplied, since 0 times NaN is NaN.
    return jnp.where(examples > 0, x * examples.astype(x.dtype), 0)
