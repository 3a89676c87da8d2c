"""Which messages a step sends, where the host chooses the program."""

from typing import Any

import jax

from ...topology import Topology
from .method import check_interval


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
      >>> [jd.transforms.due_round(step, graph, interval=2) for step in range(6)]
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
