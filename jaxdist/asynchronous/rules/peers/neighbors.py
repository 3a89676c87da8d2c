"""Choices by chance that follow from whole numbers, so that they are the same in every run, and after a restore."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, no_type_check

from ....topology.base import Topology

_MASK = (1 << 64) - 1


@no_type_check
def mixed(*words: int) -> int:
    """64 bits that look random and follow from these numbers (SplitMix64)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


# A graph, or what makes one for so many workers, such as `topology.ring`.
Graph = Topology | Callable[[int], Topology]
Choice = Literal["uniform", "in_turn"]
CHOICES = ("uniform", "in_turn")
_NEIGHBOUR = 3


class Halves(NamedTuple):
    """For each node whether it asks; its neighbors in each round, sorted, and those of all rounds."""

    active: tuple[bool, ...]
    rounds: tuple[tuple[tuple[int, ...], ...], ...]
    order: tuple[int, ...]
    neighbors: tuple[tuple[int, ...], ...]


def graph_of(graph: Graph, nodes: int, what: str = "workers") -> Topology:
    """The graph for so many nodes."""
    made = graph if isinstance(graph, Topology) else graph(nodes)
    if made.workers != nodes:
        raise ValueError(f"the {made.name} joins {made.workers} {what}, and there are {nodes}: make it for as many")
    return made


def check_choice(choice: str) -> None:
    """Raises for a wrong spelling."""
    if choice not in CHOICES:
        raise ValueError(f"choice must be one of {', '.join(CHOICES)}, got {choice!r}")


@functools.lru_cache(maxsize=16)
def halves(topology: Topology) -> Halves:
    """The half that asks, to which the least node of each connected part belongs, and the half that replies."""
    nodes = topology.workers
    rounds = tuple(
        tuple(tuple(sorted(_joined(one.messages, node))) for node in range(nodes)) for one in topology.rounds
    )
    neighbors = tuple(tuple(sorted({j for one in rounds for j in one[node]})) for node in range(nodes))
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
                        "exchanges in pairs need a graph of two halves, one that asks and one that replies, or they "
                        f"could wait for each other in a circle; the {topology.name} has the odd cycle {cycle}: use a "
                        "ring of an even number of workers, a hypercube, or another bipartite graph"
                    )
    return Halves(tuple(depth[node] % 2 == 0 for node in range(nodes)), rounds, topology.order, neighbors)


def _joined(messages: tuple, node: int) -> set[int]:
    pairs = [pair for message in messages for pair in message.pairs if node in pair and pair[0] != pair[1]]
    return {end for pair in pairs for end in pair} - {node}


def _cycle(left: int, right: int, parents: dict[int, int]) -> list[int]:
    """Of two neighbors as far from the root: up from one to where the ways meet, and down to the other."""
    up, down = [left], [right]
    while up[-1] != down[-1]:
        up.append(parents[up[-1]])
        down.append(parents[down[-1]])
    return [*up, *down[-2::-1], left]


@no_type_check
def chosen(graph: Halves, choice: Choice, seed: int, node: int, count: int) -> int | None:
    """With whom a node has its exchange number `count`: the same in every run of this seed; None with nobody."""
    options = graph.rounds[graph.order[count % len(graph.order)]][node]
    if not options:
        return None
    which = count // len(graph.order) if choice == "in_turn" else mixed(seed, _NEIGHBOUR, node, count)
    return options[which % len(options)]
