"""The spectrum of mixing matrices: how fast a graph mixes, and the properties that methods need."""

from collections.abc import Collection

import numpy as np

from .base import TOLERANCE, Topology, matrices, matrix

# Products of mixing matrices below this are rounding errors of zero.
ROUNDING = 1e-13


def mixing_rate(topology: Topology) -> float:
    """`ρ`: the factor by which the consensus error shrinks in a step, on average over one cycle of the rounds.

    For one matrix `‖W - J‖_2`, `J` the matrix of the mean; for several `‖Π_t W_t - J‖_2^(1/T)`. 0: exact after one
    cycle; 1: no consensus. For a matrix that is only column-stochastic (push-sum), the second largest eigenvalue.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.ring(16)), 4), topology.mixing_rate(topology.one_peer_exponential(16))
      (0.9493, 0.0)
    """
    workers, cycle = topology.workers, len(topology.order)
    if workers == 1:
        return 0.0
    if not is_doubly_stochastic(topology):
        # Push-sum: the eigenvalue of the limit is 1, and the next one is the rate.
        product = np.linalg.multi_dot([np.eye(workers), *(matrix(topology, t) for t in reversed(range(cycle)))])
        return float(np.sort(np.abs(np.linalg.eigvals(product)))[-2] ** (1 / cycle))
    mean_matrix = np.full((workers, workers), 1 / workers)
    deviations = [weights - mean_matrix for weights in matrices(topology)]
    # (W - J)(V - J) = WV - J. Normalized after each factor, since the product underflows.
    product, logarithm = np.eye(workers), 0.0
    for i in topology.order:
        product = deviations[i] @ product
        norm = np.linalg.norm(product, 2)
        if norm < ROUNDING:
            return 0.0
        product, logarithm = product / norm, logarithm + np.log(norm)
    return float(np.exp(logarithm / cycle))


def expected_mixing_rate(topology: Topology) -> float:
    """`√λ_max(E[W'W] - J)`: an upper bound of the factor on the consensus error if each step draws a round.

    Papers state the rate of random graphs in this form. For a single matrix it is `mixing_rate`.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.expected_mixing_rate(topology.ring(16)), 4)
      0.9493

    References:
      Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms", 2006.
    """
    different = matrices(topology)
    # E[W'W] over the rounds, each weighted by how often the order names it.
    squares = np.array([weights.T @ weights for weights in different])
    counts = np.bincount(topology.order, minlength=len(different)) / len(topology.order)
    mean_matrix = np.full(squares.shape[1:], 1 / topology.workers)
    return float(np.sqrt(max(np.linalg.eigvalsh(np.tensordot(counts, squares, 1) - mean_matrix)[-1], 0.0)))


def spectral_gap(topology: Topology) -> float:
    """`1 - ρ`: 1 for the complete graph, near 0 for a long ring. The larger, the faster workers reach consensus.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.spectral_gap(topology.torus(16)), 4)
      0.4
    """
    return 1 - mixing_rate(topology)


def smallest_eigenvalue(topology: Topology) -> float:
    """`λ_min`, the smallest eigenvalue over all rounds of a graph with symmetric weights. `d2` needs more than `-1/3`.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.smallest_eigenvalue(topology.hypercube(8)), 4)
      -0.5

    References:
      Tang, Lian, Yan, Zhang, Liu, "D²: Decentralized Training over Decentralized Data", arXiv:1803.07068, 2018.
    """
    if not is_symmetric(topology):
        raise ValueError(
            f"only symmetric weights have ordered eigenvalues, and those of {topology.name} are not symmetric"
        )
    return float(min(np.linalg.eigvalsh(weights)[0] for weights in matrices(topology)))


def is_symmetric(topology: Topology) -> bool:
    """Checks whether `W_ij = W_ji` in every round.

    Examples:
      >>> from jaxdist import topology
      >>> topology.is_symmetric(topology.ring(8)), topology.is_symmetric(topology.exponential(8))
      (True, False)
    """
    return all(np.allclose(weights, weights.T, rtol=0, atol=TOLERANCE) for weights in matrices(topology))


def is_doubly_stochastic(topology: Topology) -> bool:
    """Checks whether rows and columns sum to 1 in every round, so that mixing keeps the mean.

    Examples:
      >>> from jaxdist import topology
      >>> topology.is_doubly_stochastic(topology.digraph(3, [(0, 1), (1, 2), (2, 0), (0, 2)]))
      False
    """
    sums = [weights.sum(axis) for weights in matrices(topology) for axis in (0, 1)]
    return all(np.allclose(x, 1, rtol=0, atol=TOLERANCE) for x in sums)


def reachable(adjacent: np.ndarray, start: int, barred: Collection[int] = ()) -> set[int]:
    """The workers that can be reached from `start` without passing through the `barred` ones."""
    reached, frontier = {start}, [start]
    while frontier:
        neighbors = np.nonzero(adjacent[frontier.pop()])[0].tolist()
        new = [j for j in neighbors if j not in reached and j not in barred]
        reached |= set(new)
        frontier += new
    return reached


def separate_workers(topology: Topology) -> list[int]:
    """The workers that, over all rounds, do not receive from worker 0, or from which it does not, even through others.

    Examples:
      >>> from jaxdist import topology
      >>> topology.spectrum.separate_workers(topology.digraph(3, [(0, 1), (1, 2), (2, 1)]))
      [1, 2]
    """
    adjacent = np.any([weights != 0 for weights in matrices(topology)], axis=0)
    both = reachable(adjacent, 0) & reachable(adjacent.T, 0)
    return [worker for worker in range(topology.workers) if worker not in both]


def lazy(topology: Topology) -> Topology:
    """`(I + W) / 2` in place of `W`: the same messages, which mix half as fast, and no eigenvalue below 0.

    Examples:
      >>> from jaxdist import topology
      >>> topology.matrix(topology.lazy(topology.ring(4))).round(3).tolist()[0]
      [0.667, 0.167, 0.0, 0.167]

    References:
      Yuan, Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning", arXiv:1702.05122, 2019.
    """
    rounds = []
    for round in topology.rounds:
        messages = tuple(m._replace(weights=tuple(w / 2 for w in m.weights)) for m in round.messages)
        rounds.append(round._replace(messages=messages, self_weights=tuple((1 + w) / 2 for w in round.self_weights)))
    return topology._replace(name=f"lazy {topology.name}", rounds=tuple(rounds))
