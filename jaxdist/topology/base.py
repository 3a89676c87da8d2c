"""Who sends to whom and with what weight: a graph over the workers as messages that permutations carry."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .coloring import color_arcs, color_edges

TOLERANCE = 1e-6


class Message(NamedTuple):
    """What travels at once: every worker sends at most one message and gets at most one.

    Attributes:
      pairs: `(source, destination)` of those that send.
      weights: what each of the `W` workers gives to the model that arrives; 0 where none does.
    """

    pairs: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]


class Round(NamedTuple):
    """One step of gossip: the messages, and what each worker gives to its own model."""

    messages: tuple[Message, ...]
    self_weights: tuple[float, ...]


class Topology(NamedTuple):
    """A graph over the workers, the same in every step or changing with it. Plain numbers: hashable, and static.

    Attributes:
      name: what it is, for messages and plots.
      workers: their number `W`.
      rounds: the different steps of gossip that there are; a compiled program holds each once.
      order: the round of step `t` is `rounds[order[t % len(order)]]`.
    """

    name: str
    workers: int
    rounds: tuple[Round, ...]
    order: tuple[int, ...]


def matrix(topology: Topology, step: int = 0) -> Float[np.ndarray, "w w"]:
    """The mixing matrix of a step: row `i` has the weights that worker `i` gives to each model.

    Args:
      topology: the graph.
      step: any number; the rounds repeat.

    Returns:
      `W [w, w]` in float64: one step of gossip is `x <- W x`.

    Example:
      >>> from jaxdist import topology
      >>> topology.matrix(topology.ring(4)).round(2).tolist()[0]
      [0.33, 0.33, 0.0, 0.33]

    References:
      Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004.
    """
    return _matrix_of(topology.rounds[topology.order[step % len(topology.order)]])


def _matrix_of(one: Round) -> np.ndarray:
    out = np.diag(np.array(one.self_weights, float))
    for message in one.messages:
        for source, destination in message.pairs:
            out[destination, source] += message.weights[destination]
    return out


def matrices(topology: Topology) -> list[np.ndarray]:
    """Those of all different rounds."""
    return [_matrix_of(one) for one in topology.rounds]


def in_turn(name: str, workers: int, rounds: Sequence[Round]) -> Topology:
    """The rounds one after the other; equal ones are kept once."""
    different = tuple(dict.fromkeys(rounds))
    return Topology(name, workers, different, tuple(different.index(one) for one in rounds))


def check_workers(workers: int, least: int = 1) -> None:
    """Raises unless it is a number of workers."""
    if workers < least:
        raise ValueError(f"workers must be at least {least}, got {workers}")


def shifts(workers: int, moves: Sequence[Sequence[int]]) -> Round:
    """Everybody sends along each permutation, `moves[k][i]` being where `i` sends; all weights are equal."""
    different = [move for move in dict.fromkeys(map(tuple, moves)) if move != tuple(range(workers))]
    weight = 1 / (len(different) + 1)
    return Round(tuple(Message(tuple(enumerate(move)), (weight,) * workers) for move in different), (weight,) * workers)


def from_matrix(weights: Float[np.ndarray, "rows columns"], *, name: str = "custom") -> Topology:
    """The graph of a mixing matrix of one's own, with the fewest messages that carry it.

    Arcs are colored so that no worker sends two messages of a color or gets two: as many colors as the worker with
    most neighbors has, which is the least there can be.

    Args:
      weights: `[w, w]`; entry `[i, j]` is what worker `i` gives to the model of `j`. Rows must sum to 1 (averaging) or
        columns (push-sum, for `sgp`); both for all methods but `sgp`.
      name: for messages and plots.

    Returns:
      A static topology.

    Raises:
      ValueError: it is not square, not finite, or neither rows nor columns sum to 1.

    Example:
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
    arcs = [(j, i) for i in range(count) for j in range(count) if i != j and weights[i, j]]
    messages = []
    for pairs in color_arcs(arcs):
        given = np.zeros(count)
        for source, destination in pairs:
            given[destination] = weights[destination, source]
        messages.append(Message(tuple(pairs), tuple(given.tolist())))
    return in_turn(name, count, [Round(tuple(messages), tuple(np.diag(weights).tolist()))])


def from_edges(workers: int, edges: Sequence[tuple[int, int]], *, name: str = "custom") -> Topology:
    """Any undirected graph, with Metropolis weights: `W_ij = 1 / (1 + max(d_i, d_j))` for degrees `d`.

    Args:
      workers: their number `W`.
      edges: the pairs that talk, in either direction.
      name: for messages and plots.

    Returns:
      A static topology whose matrix is symmetric and doubly stochastic.

    Raises:
      ValueError: an edge names a worker that there is not, or joins one with itself.

    Example:
      >>> from jaxdist import topology
      >>> topology.matrix(topology.from_edges(3, [(0, 1), (1, 2)])).round(2).tolist()[1]
      [0.33, 0.33, 0.33]

    References:
      Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation", 2007 (Metropolis weights).
    """
    check_workers(workers)
    joined = unique_edges(workers, edges)
    degrees = np.bincount(np.array(joined, int).reshape(-1), minlength=workers)
    weights = {(i, j): 1 / (1 + max(degrees[i], degrees[j])) for i, j in joined}
    return from_matchings(name, workers, [(pairs, weights) for pairs in color_edges(joined)])


def from_matchings(
    name: str, workers: int, matchings: Sequence[tuple[Sequence[tuple[int, int]], dict[tuple[int, int], float]]]
) -> Topology:
    """A static topology of matchings with a weight for each edge."""
    return in_turn(name, workers, [matched(workers, matchings)])


def matched(workers: int, matchings: Sequence[tuple[Sequence[tuple[int, int]], dict[tuple[int, int], float]]]) -> Round:
    """One round: each matching is a message in which both ends of an edge send."""
    messages, left = [], np.ones(workers)
    for edges, weights in matchings:
        given = np.zeros(workers)
        for i, j in edges:
            given[[i, j]] = weights[i, j]
        left -= given
        pairs = sorted([(i, j) for i, j in edges] + [(j, i) for i, j in edges])
        messages.append(Message(tuple(pairs), tuple(given.tolist())))
    return Round(tuple(messages), tuple(left.tolist()))


def unique_edges(workers: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Each once, the smaller number first."""
    for i, j in edges:
        if not (0 <= i < workers and 0 <= j < workers) or i == j:
            raise ValueError(f"an edge joins two of the {workers} workers, numbered from 0, got {(i, j)}")
    return sorted({(min(i, j), max(i, j)) for i, j in edges})
