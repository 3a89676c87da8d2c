"""The `Topology`: a graph over workers as rounds of messages with mixing weights, which edge colorings find."""

import itertools
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from .._core.checks import check_range

TOLERANCE = 1e-6

Edge = tuple[int, int]


class Permutation(NamedTuple):
    """Messages that are sent at once: every worker sends at most one and receives at most one.

    Attributes:
      pairs: `(source, destination)` of each message.
      weights: the weight that each of the `W` workers gives to the model it receives; 0 where it receives none.
    """

    pairs: tuple[Edge, ...]
    weights: tuple[float, ...]


class Round(NamedTuple):
    """One step of gossip: permutations of models, one after the other, and each worker's weight for its own model."""

    messages: tuple[Permutation, ...]
    self_weights: tuple[float, ...]


class Topology(NamedTuple):
    """A graph over the workers, the same in every step or changing with it. It is static and hashable.

    Its `repr` has the number of different rounds and the degree, the most models that a worker sends in a step.

    Attributes:
      name: for messages and plots.
      workers: their number `W`.
      rounds: the different steps of gossip; a compiled program contains each once.
      order: the round of step `t` is `rounds[order[t % len(order)]]`.
    """

    name: str
    workers: int
    rounds: tuple[Round, ...]
    order: tuple[int, ...]

    def __repr__(self) -> str:
        # As many permutations as the largest degree: see `color_arcs`. The spectral gap takes too long for a `repr`.
        degree = max((len(round.messages) for round in self.rounds), default=0)
        return f"Topology({self.name!r}, workers={self.workers}, degree={degree}, rounds={len(self.rounds)})"


def check_topology(value: Any) -> None:
    """Raises unless the argument is a topology."""
    if not isinstance(value, Topology):
        raise TypeError(f"expected a topology, such as topology.ring(8), got {value!r}")


def matrix(topology: Topology, step: int = 0) -> Float[np.ndarray, "w w"]:
    """The mixing matrix `W [w, w]` of a step, `x <- W x`: row `i` has the weights that worker `i` gives to each model.

    Examples:
      >>> from jaxdist import topology
      >>> topology.matrix(topology.ring(4)).round(2).tolist()[0]
      [0.33, 0.33, 0.0, 0.33]

    References:
      Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004.
    """
    return _matrix_of(topology.rounds[topology.order[step % len(topology.order)]])


def _matrix_of(round: Round) -> np.ndarray:
    out = np.diag(np.array(round.self_weights, float))
    for message in round.messages:
        for source, destination in message.pairs:
            out[destination, source] += message.weights[destination]
    return out


def matrices(topology: Topology) -> list[np.ndarray]:
    """The mixing matrices of all different rounds."""
    return [_matrix_of(round) for round in topology.rounds]


def cycle_rounds(name: str, workers: int, rounds: Sequence[Round]) -> Topology:
    """Returns the topology that goes through the rounds one after the other; equal rounds are kept once."""
    different = tuple(dict.fromkeys(rounds))
    return Topology(name, workers, different, tuple(different.index(round) for round in rounds))


def check_workers(workers: int, smallest: int = 1) -> None:
    """Checks that there are enough workers."""
    check_range("workers", workers, smallest, ends="[]")


def check_rounds(rounds: int) -> None:
    """Checks that at least one round is drawn."""
    check_range("rounds", rounds, 1, ends="[]")


def permutation_round(workers: int, moves: Sequence[Sequence[int]]) -> Round:
    """The round in which worker `i` sends to `moves[k][i]` for every `k`, with equal weights."""
    different = [move for move in dict.fromkeys(map(tuple, moves)) if move != tuple(range(workers))]
    weight = 1 / (len(different) + 1)
    messages = tuple(Permutation(tuple(enumerate(move)), (weight,) * workers) for move in different)
    return Round(messages, (weight,) * workers)


def from_matrix(weights: Float[np.ndarray, "rows columns"], *, name: str = "custom") -> Topology:
    """The graph of any mixing matrix, with the fewest messages.

    Arcs are colored so that no worker sends or receives two messages of a color. The number of colors is the largest
    number of neighbors of a worker, which is the minimum.

    Entry `[i, j]` is the weight that worker `i` gives to the model of `j`. Rows must sum to 1 (averaging) or columns
    (push-sum, for `sgp`); both for all methods except `sgp`.

    Examples:
      >>> import numpy as np
      >>> from jaxdist import topology
      >>> pair = topology.from_matrix(np.full((2, 2), 0.5))
      >>> pair.rounds[0].messages[0].pairs
      ((0, 1), (1, 0))

    References:
      Kőnig, "Über Graphen und ihre Anwendung auf Determinantentheorie und Mengenlehre", 1916 (the coloring).
    """
    weights = np.asarray(weights, float)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or not weights.size:
        raise ValueError(f"the mixing matrix must be square, got shape {weights.shape}")
    if not np.isfinite(weights).all():
        raise ValueError("the mixing matrix must be finite, got NaN or infinity")
    rows, columns = (np.abs(weights.sum(axis) - 1).max() for axis in (1, 0))
    if min(rows, columns) > TOLERANCE:
        raise ValueError(
            "the rows of the mixing matrix must sum to 1 (or, for push-sum, its columns), but rows sum to "
            f"{weights.sum(1).round(4).tolist()}"
        )
    count = len(weights)
    # An arc from j to i for each weight that i gives to the model of j.
    arcs = [(j, i) for i in range(count) for j in range(count) if i != j and weights[i, j]]
    messages = []
    for pairs in color_arcs(arcs):
        received = np.zeros(count)
        for source, destination in pairs:
            received[destination] = weights[destination, source]
        messages.append(Permutation(tuple(pairs), tuple(received.tolist())))
    return cycle_rounds(name, count, [Round(tuple(messages), tuple(np.diag(weights).tolist()))])


def from_edges(workers: int, edges: Sequence[Edge], *, name: str = "custom") -> Topology:
    """Any undirected graph, with Metropolis weights: `W_ij = 1 / (1 + max(d_i, d_j))` for degrees `d`.

    Edges are pairs of neighbors, in either direction. The matrix is symmetric and doubly stochastic.

    Examples:
      >>> from jaxdist import topology
      >>> topology.matrix(topology.from_edges(3, [(0, 1), (1, 2)])).round(2).tolist()[1]
      [0.33, 0.33, 0.33]

    References:
      Xiao et al., "Distributed average consensus with least-mean-square deviation", 2007 (Metropolis weights).
    """
    check_workers(workers)
    edges = unique_edges(workers, edges)
    degrees = np.bincount(np.array(edges, int).reshape(-1), minlength=workers)
    weights = {(i, j): 1 / (1 + max(degrees[i], degrees[j])) for i, j in edges}
    matchings = [(matching, weights) for matching in color_edges(edges)]
    return cycle_rounds(name, workers, [matching_round(workers, matchings)])


def matching_round(workers: int, matchings: Sequence[tuple[Sequence[Edge], dict[Edge, float]]]) -> Round:
    """The round of some matchings with a weight for each edge: both ends of an edge send to each other."""
    messages, self_weights = [], np.ones(workers)
    for edges, weights in matchings:
        received = np.zeros(workers)
        for i, j in edges:
            received[[i, j]] = weights[i, j]
        # Rows sum to 1: each worker gives to its own model what remains.
        self_weights -= received
        pairs = sorted([(i, j) for i, j in edges] + [(j, i) for i, j in edges])
        messages.append(Permutation(tuple(pairs), tuple(received.tolist())))
    return Round(tuple(messages), tuple(self_weights.tolist()))


def unique_edges(workers: int, edges: Sequence[Edge]) -> list[Edge]:
    """Returns each edge once, with the smaller number first."""
    for i, j in edges:
        if not (0 <= i < workers and 0 <= j < workers) or i == j:
            raise ValueError(f"an edge joins two of the {workers} workers, numbered from 0, got {(i, j)}")
    return sorted({(min(i, j), max(i, j)) for i, j in edges})


def color_arcs(arcs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups in which no source and no destination comes twice; their number is the largest in- or out-degree.

    Kőnig's proof: where the first color free at the source is not free at the destination, the path of arcs from the
    destination that alternates between two colors is recolored.
    """
    coloring: _ArcColoring = ({}, {})
    for arc in arcs:
        source_color, target_color = (_first_free(coloring[side], arc[side]) for side in (0, 1))
        if source_color != target_color:
            # After this, the source's color is free at the destination too.
            _swap_path(coloring, arc[1], source_color, target_color)
        coloring[0][arc[0], source_color] = coloring[1][arc[1], source_color] = arc
    groups: dict[int, list[tuple[int, int]]] = {}
    for (_, color), arc in coloring[0].items():
        groups.setdefault(color, []).append(arc)
    return [sorted(groups[color]) for color in sorted(groups)]


# For sources and for destinations: (node, color) -> arc.
_ArcColoring = tuple[dict[tuple[int, int], tuple[int, int]], dict[tuple[int, int], tuple[int, int]]]


def _swap_path(coloring: _ArcColoring, node: int, first: int, second: int) -> None:
    """Exchanges two colors on the path that enters `node`, a destination, with `first`."""
    path, side, color = [], 1, first
    while (node, color) in coloring[side]:
        arc = coloring[side][node, color]
        path.append((arc, color))
        side = 1 - side
        node, color = arc[side], second if color == first else first
    for arc, color in path:
        for side in (0, 1):
            del coloring[side][arc[side], color]
    for arc, color in path:
        for side in (0, 1):
            coloring[side][arc[side], second if color == first else first] = arc


def _first_free(taken: Container[tuple[int, int]], node: int) -> int:
    return next(color for color in itertools.count() if (node, color) not in taken)


def color_edges(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Matchings, in which no worker comes twice: at most one more than the largest degree (Misra and Gries).

    In bipartite graphs, as trees and even rings, their number is the largest degree.
    """
    side = _sides(edges)
    if side is not None:
        arcs = color_arcs([(i, j) if side[i] else (j, i) for i, j in edges])
        return [sorted((min(arc), max(arc)) for arc in group) for group in arcs]
    coloring = _EdgeColoring()
    for x, y in edges:
        coloring.add(x, y)
    groups: dict[int, list[tuple[int, int]]] = {}
    for edge, color in sorted(coloring.colors.items()):
        groups.setdefault(color, []).append(edge)
    return [groups[color] for color in sorted(groups)]


class _EdgeColoring:
    """A proper coloring of edges, to which edges are added one by one (Misra and Gries).

    Attributes:
      colors: of each edge, with the smaller number first.
      neighbor: `(node, color) -> neighbor` along the edge of that color.
    """

    def __init__(self) -> None:
        self.colors: dict[tuple[int, int], int] = {}
        self.neighbor: dict[tuple[int, int], int] = {}

    def add(self, x: int, y: int) -> None:
        """Colors the edge from `x` to `y`, which may change the colors of others."""
        fan = self._fan(x, y)
        color_of_x, color_of_last = _first_free(self.neighbor, x), _first_free(self.neighbor, fan[-1])
        if color_of_x != color_of_last:
            # Now `color_of_last` is free at `x` too.
            self._swap_path(x, color_of_last, color_of_x)
        # The longest prefix that is still a fan and ends where `color_of_last` is free.
        last = 0
        for end, node in enumerate(fan):
            if end and (fan[end - 1], self.colors[min(x, node), max(x, node)]) in self.neighbor:
                break
            if (node, color_of_last) not in self.neighbor:
                last = end
        # Rotation: each edge of the fan takes the color of the next.
        for end in range(last):
            self._color(x, fan[end], self._uncolor(x, fan[end + 1]))
        self._color(x, fan[last], color_of_last)

    def _fan(self, x: int, y: int) -> list[int]:
        """Neighbors of `x` from `y` on; the color of each one's edge is free at the one before."""
        fan = [y]
        while True:
            # A neighbor whose edge has a color that is free at the last one.
            candidates = (
                n for (node, color), n in self.neighbor.items() if node == x and (fan[-1], color) not in self.neighbor
            )
            following = next((n for n in candidates if n not in fan), None)
            if following is None:
                return fan
            fan.append(following)

    def _swap_path(self, node: int, first: int, second: int) -> None:
        """Exchanges two colors on the path from `node` that starts with `first`."""
        path, color = [], first
        while (node, color) in self.neighbor:
            path.append((node, self.neighbor[node, color], color))
            node, color = self.neighbor[node, color], second if color == first else first
        for x, y, _ in path:
            self._uncolor(x, y)
        for x, y, color in path:
            self._color(x, y, second if color == first else first)

    def _color(self, x: int, y: int, color: int) -> None:
        self.colors[min(x, y), max(x, y)] = color
        self.neighbor[x, color], self.neighbor[y, color] = y, x

    def _uncolor(self, x: int, y: int) -> int:
        color = self.colors.pop((min(x, y), max(x, y)))
        del self.neighbor[x, color], self.neighbor[y, color]
        return color


def _sides(edges: Sequence[tuple[int, int]]) -> dict[int, bool] | None:
    """The side of each worker if the graph is bipartite, else `None`."""
    neighbors: dict[int, list[int]] = {}
    for i, j in edges:
        neighbors.setdefault(i, []).append(j)
        neighbors.setdefault(j, []).append(i)
    side: dict[int, bool] = {}
    for first in neighbors:
        reached = [] if first in side else [first]
        side.setdefault(first, True)
        while reached:
            node = reached.pop()
            for other in neighbors[node]:
                if other not in side:
                    side[other] = not side[node]
                    reached.append(other)
    return None if any(side[i] == side[j] for i, j in edges) else side
