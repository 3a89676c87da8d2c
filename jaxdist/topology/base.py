"""Graphs over the workers, as permutations of messages with mixing weights."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .coloring import color_arcs, color_edges

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
    if workers < smallest:
        raise ValueError(f"workers must be at least {smallest}, got {workers}")


def check_rounds(rounds: int) -> None:
    """Checks that at least one round is drawn."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")


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
