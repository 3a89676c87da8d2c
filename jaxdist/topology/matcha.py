"""MATCHA: matchings of a graph, drawn so that few messages mix fast."""

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .._core.checks import check_range
from .base import Edge, Topology, check_rounds, color_edges, cycle_rounds, matching_round, matrix
from .spectrum import separate_workers
from .varying import _DRAWS, _draw_until_connected


class Matchings(NamedTuple):
    """The matchings of a graph, the probability of each to be active in a step, and the weight of an active edge."""

    edges: tuple[tuple[Edge, ...], ...]
    probabilities: tuple[float, ...]
    alpha: float


def matcha(base: Topology, *, budget: float | int = 0.5, rounds: int = 32, seed: int = 0) -> Topology:
    """Splits a graph into matchings and activates each at random, more often those that matter for mixing.

    With the Laplacians `L_j` of the `M` matchings, each active with probability `p_j` independently (`B_j` is 1 or 0):

        W = I - α Σ_j B_j L_j;   p maximizes λ_2(Σ_j p_j L_j) with Σ_j p_j <= budget · M;
        α minimizes ‖E[W'W] - J‖, E[W'W] = I - 2α L + α² (L² + 2 Σ_j p_j (1 - p_j) L_j), L = Σ_j p_j L_j

    *On the wire* in a step: `budget · M` models on average. The draws are made here and are the same on all workers; in
    some steps none sends.

    Args:
      base: a static, undirected, connected graph; its weights do not matter.
      budget: the mean share of active matchings, in (0, 1].
      rounds: the number of steps that are drawn, again if some workers never communicate; they repeat after that. A
        compiled program contains each different one once, at most `2^M`.
      seed: of the draw.

    Examples:
      >>> from jaxdist import topology
      >>> len(topology.matcha(topology.ring(8), rounds=64).rounds)  # none, either or both of two matchings
      4

    References:
      Wang et al., "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling", arXiv:1905.09435, 2019.
    """
    check_rounds(rounds)
    solved = matchings(base, budget=budget)
    drawn = _draw_until_connected(partial(_draw_active, base, solved, rounds, np.random.default_rng(seed)), _DRAWS)
    if separate_workers(drawn):
        raise ValueError(
            f"in {_DRAWS} draws of rounds={rounds} at budget={budget} some workers of {base.name} never communicate: "
            "draw more rounds, or allow a higher budget"
        )
    return drawn


def _draw_active(base: Topology, solved: Matchings, rounds: int, rng: np.random.Generator) -> Topology:
    active = rng.random((rounds, len(solved.edges))) < np.array(solved.probabilities)
    drawn_rounds = []
    for flags in active:
        matched = [(edges, dict.fromkeys(edges, solved.alpha)) for edges, flag in zip(solved.edges, flags) if flag]
        drawn_rounds.append(matching_round(base.workers, matched))
    return cycle_rounds(f"MATCHA on {base.name}", base.workers, drawn_rounds)


def matchings(base: Topology, *, budget: float | int = 0.5) -> Matchings:
    """The matchings of a graph, the probability of each in MATCHA, and the weight of its edges, as for `matcha`.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.matchings(topology.ring(4)).alpha, 3)
      0.5
    """
    check_range("budget", budget, 0, 1, ends="(]")
    if len(base.rounds) > 1:
        raise ValueError(
            f"matcha needs a graph that stays the same, got {base.name}, which has {len(base.rounds)} rounds"
        )
    adjacent = matrix(base) != 0
    if (adjacent != adjacent.T).any():
        raise ValueError(f"matcha needs an undirected graph, got {base.name}: both ends of an edge must send")
    edges = [(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(adjacent, 1)))]
    groups = tuple(map(tuple, color_edges(edges)))
    if not groups:
        return Matchings((), (), 0.0)
    laplacians = np.array([_laplacian(base.workers, group) for group in groups])
    # A graph is connected if the second eigenvalue of its Laplacian is positive.
    if np.linalg.eigvalsh(laplacians.sum(0))[1] < 1e-9:
        raise ValueError(f"matcha needs a connected graph, got {base.name}: its components would never reach consensus")
    probabilities = _most_connected(laplacians, budget * len(groups))
    return Matchings(groups, tuple(probabilities.tolist()), _best_weight(laplacians, probabilities))


def _laplacian(workers: int, edges: tuple[Edge, ...]) -> np.ndarray:
    out = np.zeros((workers, workers))
    for i, j in edges:
        out[[i, j], [i, j]] += 1
        out[[i, j], [j, i]] -= 1
    return out


def _most_connected(laplacians: np.ndarray, total: float) -> np.ndarray:
    """`p` in [0, 1] with sum `total` that maximizes `λ_2(Σ p_j L_j)`."""
    # The maximum of a concave function, by ascent along supergradients.
    p = np.full(len(laplacians), total / len(laplacians))
    best, best_p = -1.0, p
    for step in range(400):
        values, vectors = np.linalg.eigh(np.tensordot(p, laplacians, 1))
        if values[1] > best + 1e-12:
            best, best_p = values[1], p
        # The eigenvalue is often multiple; the mean over its space has the symmetry of the graph.
        space = vectors[:, 1:][:, values[1:] < values[1] + 1e-6]
        gradient = np.einsum("ik,jil,lk->j", space, laplacians, space) / space.shape[1]
        p = _to_simplex(p + 0.3 / np.sqrt(step + 1) * gradient, total)
    return best_p


def _to_simplex(p: np.ndarray, total: float) -> np.ndarray:
    """The nearest point with entries in [0, 1] and this sum: a shift found by bisection."""
    low, high = p.min() - 1, p.max()
    for _ in range(60):
        shift = (low + high) / 2
        low, high = (shift, high) if np.clip(p - shift, 0, 1).sum() > total else (low, shift)
    return np.clip(p - high, 0, 1)


def second_moment(
    laplacians: Float[np.ndarray, "m w w"], probabilities: Float[np.ndarray, " m"], alpha: float
) -> np.ndarray:
    """`E[W'W] = I - 2α L + α² (L² + 2 Σ_j p_j (1 - p_j) L_j)`, since `L_j² = 2 L_j` for a matching."""
    mean = np.tensordot(probabilities, laplacians, 1)
    spread = np.tensordot(probabilities * (1 - probabilities), laplacians, 1)
    return np.eye(len(mean)) - 2 * alpha * mean + alpha**2 * (mean @ mean + 2 * spread)


def _best_weight(laplacians: np.ndarray, probabilities: np.ndarray) -> float:
    """The `α` that mixes best, by golden section, since the criterion is convex."""
    mean_matrix = np.full(laplacians.shape[1:], 1 / laplacians.shape[1])

    def error(alpha: float) -> float:
        # ‖E[W'W] - J‖
        return np.linalg.eigvalsh(second_moment(laplacians, probabilities, alpha) - mean_matrix)[-1]

    low, high, golden = 0.0, 2.0, (5**0.5 - 1) / 2
    for _ in range(60):
        first, second = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, second) if error(first) < error(second) else (first, high)
    return (low + high) / 2
