"""One step of gossip: each worker's average of its own model and those of its neighbors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core.trees import plus
from .._core.types import Array, PyTree
from ..comm.base import Comm
from ..topology.base import Topology
from ..topology.spectrum import is_doubly_stochastic, is_symmetric
from ..wire.mixing import change_at
from .method import Turn, check_interval


def mix(turn: Turn, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """`x_i <- Σ_j W_ij x_j` with the matrix of this step, in float32 or better.

    One message for each dtype and neighbor, however many leaves. What is sent has the dtypes of `like`, those of
    `tree` if it is left out; the mean over workers stays even if that is rounded.

    Args:
      turn: what the `step` of a method was given.
      tree: that of this worker; a tuple of trees travels as one message.
      like: the dtypes on the wire.

    Returns:
      The average, typed as differing between workers.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxdist as jd
      >>> from jaxdist.transforms import Method, Turned, mix
      >>> def step(turn):  # no step at all
      ...     return Turned(mix(turn, turn.params), turn.adapt(turn.gradients)[1], ())
      >>> method = Method(lambda topology: topology, lambda params, topology: (), step)
      >>> tx = jd.gossip(optax.identity(), jd.topology.ring(3), method=method)
      >>> jax.vmap(lambda x: tx.update(x, tx.init(x), x)[0], axis_name="data")(jnp.array([0.0, 3.0, 6.0])).tolist()
      [3.0, 0.0, -3.0]

    References:
      Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004.
    """
    return plus(tree, change(turn, tree, like=like))


def change(turn: Turn, tree: PyTree, *, like: PyTree | None = None) -> PyTree:
    """What `mix` adds to this worker's tree, `Σ_j W_ij (x_j - x_i)`.

    Of differences, since weights like 1/3 are rounded and would let models drift where they agree; with the rounded
    own model in them, so that low precision on the wire keeps the mean.
    """
    return change_at(turn.comm, turn.topology, turn.count, tree, like=like)


def check_doubly_stochastic(topology: Topology) -> None:
    """Raises unless mixing keeps the mean and ends in it."""
    if not is_doubly_stochastic(topology):
        raise ValueError(
            f"the weights of {topology.name} do not sum to 1 in both directions, so workers would not agree on their "
            "mean: use method=sgp() for graphs that are directed and irregular"
        )


def check_static(topology: Topology, what: str) -> None:
    """Raises if the graph changes with the step."""
    if len(topology.rounds) > 1:
        raise ValueError(
            f"{what} needs the same neighbors in every step, got {topology.name}, which has {len(topology.rounds)} "
            "different rounds: use a static topology, such as ring, torus or hypercube"
        )


def check_symmetric(topology: Topology, what: str) -> None:
    """Raises unless both ends of each link give each other the same weight."""
    check_doubly_stochastic(topology)
    if not is_symmetric(topology):
        raise ValueError(
            f"{what} needs symmetric weights, and those of {topology.name} are not: use ring, torus, hypercube, or "
            "another undirected graph"
        )


def due_round(step: int, topology: Topology, *, interval: int = 1) -> int | None:
    """The round of a topology that a step uses: what a host passes to `gossip` as the static `round=`.

    Args:
      step: the number of the step, from 0.
      topology: the graph.
      interval: that of the method.

    Returns:
      The number of the round, or `None` in a step in which nobody talks: then leave `round` out.

    Raises:
      ValueError: the interval is not positive.

    Example:
      >>> import jaxdist as jd
      >>> graph = jd.topology.shift_one(4)
      >>> [jd.decentralized.due_round(step, graph, interval=2) for step in range(6)]
      [None, 0, None, 1, None, 0]

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
    """
    check_interval(interval)
    return None if (step + 1) % interval else topology.order[step // interval % len(topology.order)]


def only(topology: Topology, round: Any) -> Topology:
    """The topology in one of its rounds."""
    if isinstance(round, jax.Array):
        raise ValueError("round chooses the program, so it must be static: distribute(..., static_argnames=('round',))")
    if not 0 <= round < len(topology.rounds):
        raise ValueError(f"round must be one of the {len(topology.rounds)} of {topology.name}, from 0, got {round}")
    return topology._replace(rounds=(topology.rounds[round],), order=(0,))


def carried(outer: Comm, inner: Comm) -> Comm:
    """`outer`, whose messages the `inner.size` members of each group send in equal parts, and gather after.

    Members hold the same values. Over `outer` each sends `1/inner.size` of the bytes.
    """

    def part(x: Array) -> Array:
        return jnp.pad(x.ravel(), (0, -x.size % inner.size)).reshape(inner.size, -1)[inner.index]

    def whole(part: Array, like: Array) -> Array:
        return inner.all_gather(part).ravel()[: like.size].reshape(like.shape)

    def in_parts(collective: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda tree, *rest: jax.tree.map(lambda x: whole(collective(part(x), *rest), x), tree)

    return outer._replace(
        mean=in_parts(outer.mean),
        ppermute=in_parts(outer.ppermute),
        ledger=None,
        uncounted=None,
        remake=lambda wrap: carried(wrap(outer), wrap(inner)),
    )
