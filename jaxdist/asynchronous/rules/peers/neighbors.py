"""Neighbors in a bipartite graph, and reproducible random choices among them."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, no_type_check

from ....topology.base import Topology

_MASK = (1 << 64) - 1


@no_type_check
def hash_words(*words: int) -> int:
    """Hashes integers to 64 pseudorandom bits (SplitMix64).

    Random choices are functions of integers in the state, so that they are the same in every run and after a restore.
    """
    state = 0
    # One round of SplitMix64 per word, started from the hash of the previous ones.
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


# A topology, or a function that makes one for a number of workers, such as `topology.ring`.
Graph = Topology | Callable[[int], Topology]
Choice = Literal["uniform", "in_turn"]
CHOICES = ("uniform", "in_turn")
# Separates these choices from those of other rules.
_NEIGHBOR_STREAM = 3


class Halves(NamedTuple):
    """For each node whether it initiates exchanges, its sorted neighbors in each round, and those of all rounds."""

    active: tuple[bool, ...]
    rounds: tuple[tuple[tuple[int, ...], ...], ...]
    order: tuple[int, ...]
    neighbors: tuple[tuple[int, ...], ...]


def graph_of(graph: Graph, nodes: int, what: str = "workers") -> Topology:
    """Returns the topology for a number of nodes."""
    topology = graph if isinstance(graph, Topology) else graph(nodes)
    if topology.workers != nodes:
        raise ValueError(f"the {topology.name} has {topology.workers} {what}, but the run has {nodes}")
    return topology


def check_choice(choice: str) -> None:
    """Checks that `choice` is a known policy."""
    if choice not in CHOICES:
        raise ValueError(f"choice must be one of {', '.join(CHOICES)}, got {choice!r}")


@functools.lru_cache(maxsize=16)
def halves(topology: Topology) -> Halves:
    """Splits a bipartite graph into the half that initiates exchanges and the half that replies.

    The lowest node of each connected component belongs to the half that initiates.
    """
    nodes = topology.workers
    rounds = tuple(
        tuple(tuple(sorted(_neighbors_in_round(step.messages, node))) for node in range(nodes))
        for step in topology.rounds
    )
    neighbors = tuple(tuple(sorted({j for step in rounds for j in step[node]})) for node in range(nodes))
    # Breadth-first search; an edge between nodes of the same parity closes an odd cycle.
    depth: dict[int, int] = {}
    parents: dict[int, int] = {}
    for root in range(nodes):
        if root in depth:
            continue
        depth[root], queue = 0, [root]
        for node in queue:
            for other in neighbors[node]:
                if other not in depth:
                    depth[other], parents[other] = depth[node] + 1, node
                    queue.append(other)
                elif (depth[other] - depth[node]) % 2 == 0:
                    cycle = " - ".join(map(str, _cycle(node, other, parents)))
                    raise ValueError(
                        "pairwise exchanges need a bipartite graph, or workers could wait for each other in a cycle; "
                        f"the {topology.name} has the odd cycle {cycle}: use a ring of an even number of workers, a "
                        "hypercube, or another bipartite graph"
                    )
    return Halves(tuple(depth[node] % 2 == 0 for node in range(nodes)), rounds, topology.order, neighbors)


def _neighbors_in_round(messages: tuple, node: int) -> set[int]:
    pairs = [pair for message in messages for pair in message.pairs if node in pair and pair[0] != pair[1]]
    return {end for pair in pairs for end in pair} - {node}


def _cycle(left: int, right: int, parents: dict[int, int]) -> list[int]:
    """Returns the cycle that an edge closes: from one end up to the common ancestor and down to the other end."""
    up, down = [left], [right]
    while up[-1] != down[-1]:
        up.append(parents[up[-1]])
        down.append(parents[down[-1]])
    return [*up, *down[-2::-1], left]


@no_type_check
def choose_neighbor(graph: Halves, choice: Choice, seed: int, node: int, count: int) -> int | None:
    """Returns the partner of a node in its exchange number `count`, or None if it has no neighbor in that round."""
    options = graph.rounds[graph.order[count % len(graph.order)]][node]
    if not options:
        return None
    which = count // len(graph.order) if choice == "in_turn" else hash_words(seed, _NEIGHBOR_STREAM, node, count)
    return options[which % len(options)]
