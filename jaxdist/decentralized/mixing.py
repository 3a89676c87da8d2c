"""Averages of each worker's model with those of its neighbors, and the checks of topologies that methods share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._core.trees import plus
from .._core.types import Array, PyTree
from ..comm.base import Comm
from ..topology.base import Topology
from ..topology.spectrum import is_doubly_stochastic, is_symmetric
from ..wire.mixing import change_at
from .method import StepContext, check_interval


def mix(context: StepContext, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """`x_i <- Σ_j W_ij x_j` with the matrix of this step, in float32 or better.

    One message for each dtype and neighbor, whatever the number of leaves. Leaves are sent in the dtypes of `like`, by
    default in those of `tree`; rounding them does not change the mean over workers.

    Args:
      context: the argument of a method's `step`.
      tree: of this worker; a tuple of trees is sent as one message.
      like: the dtypes on the wire.

    Returns:
      The average, typed as per-worker.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> from jaxdist.decentralized import Method, StepResult, mix
      >>> def step(context):  # mixing only
      ...     return StepResult(mix(context, context.params), context.adapt(context.gradients)[1], ())
      >>> method = Method(lambda topology: topology, lambda params, topology: (), step)
      >>> tx = jd.gossip(optax.identity(), jd.topology.ring(3), method=method)
      >>> jax.vmap(lambda x: tx.update(x, tx.init(x), x)[0], axis_name="data")(jnp.array([0.0, 3.0, 6.0])).tolist()
      [3.0, 0.0, -3.0]

    References:
      Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004.
    """
    return plus(tree, mixing_delta(context, tree, like=like))


def mixing_delta(context: StepContext, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """`Σ_j W_ij (x_j - x_i)`, the difference that `mix` adds to this worker's tree.

    A sum of differences, since weights like 1/3 are rounded and a sum of models would drift where they are equal. Its
    own model is rounded as it was sent, so that low precision on the wire keeps the mean.
    """
    return change_at(context.comm, context.topology, context.count, tree, like=like)


def check_doubly_stochastic(topology: Topology) -> None:
    """Checks that mixing keeps the mean and converges to it."""
    if not is_doubly_stochastic(topology):
        raise ValueError(
            f"the weights of {topology.name} do not sum to 1 in both directions, so workers would not converge to "
            "their mean: use method=sgp() for graphs that are directed and irregular"
        )


def check_static(topology: Topology, method: str) -> None:
    """Checks that the graph is the same in every step."""
    if len(topology.rounds) > 1:
        raise ValueError(
            f"{method} needs the same neighbors in every step, got {topology.name}, which has {len(topology.rounds)} "
            "different rounds: use a static topology, such as ring, torus or hypercube"
        )


def check_symmetric(topology: Topology, method: str) -> None:
    """Checks that both ends of each link give each other the same weight."""
    check_doubly_stochastic(topology)
    if not is_symmetric(topology):
        raise ValueError(
            f"{method} needs symmetric weights, and those of {topology.name} are not: use ring, torus, hypercube, or "
            "another undirected graph"
        )


def due_round(step: int, topology: Topology, *, interval: int = 1) -> int | None:
    """The round of a topology that a step uses, for the static argument `round=` of `gossip`'s update.

    Args:
      step: the number of the step, from 0.
      topology: the graph.
      interval: the method's.

    Returns:
      The number of the round, or `None` in a step without communication: then leave `round` out.

    Raises:
      ValueError: `interval` is not positive.

    Example:
      >>> import jaxdist as jd
      >>> graph = jd.topology.shift_one(4)
      >>> [jd.decentralized.due_round(step, graph, interval=2) for step in range(6)]
      [None, 0, None, 1, None, 0]

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    check_interval(interval)
    return None if (step + 1) % interval else topology.order[step // interval % len(topology.order)]


def select_round(topology: Topology, round: Any) -> Topology:
    """Returns the static topology of one round."""
    if isinstance(round, jax.Array):
        raise ValueError("round selects the program, so it must be static: distribute(..., static_argnames=('round',))")
    if not 0 <= round < len(topology.rounds):
        raise ValueError(
            f"round must be from 0 to {len(topology.rounds) - 1}, the last round of {topology.name}, got {round}"
        )
    return topology._replace(rounds=(topology.rounds[round],), order=(0,))


def split_messages(outer: Comm, inner: Comm) -> Comm:
    """Returns `outer` with messages that the `inner.size` members of each group send in equal parts and then gather.

    Members have equal values. Over `outer` each sends `1/inner.size` of the bytes.
    """
    return outer._replace(
        mean=partial(_in_parts, outer.mean, inner),
        ppermute=partial(_in_parts, outer.ppermute, inner),
        ledger=None,
        uncounted=None,
        remake=lambda wrap: split_messages(wrap(outer), wrap(inner)),
    )


def _in_parts(collective: Callable[..., Array], inner: Comm, tree: PyTree, *args: Any) -> PyTree:
    """Runs a collective on this member's part of each leaf, and gathers the parts of the results."""

    def communicate_part(x: Array) -> Array:
        part = jnp.pad(x.ravel(), (0, -x.size % inner.size)).reshape(inner.size, -1)[inner.index]
        return inner.all_gather(collective(part, *args)).ravel()[: x.size].reshape(x.shape)

    return jax.tree.map(communicate_part, tree)
