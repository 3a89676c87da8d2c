"""Graphs that are the same in every step, for `W = workers`.

References:
  Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study
  for Decentralized Parallel Stochastic Gradient Descent", arXiv:1705.09056, 2017.
  Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for Decentralized Deep Learning on Heterogeneous
  Data", arXiv:2110.04175, 2021 (trees).
"""

import math
from collections.abc import Sequence

import numpy as np

from .base import Topology, check_workers, cycle_rounds, from_edges, from_matrix, permutation_round


def ring(workers: int, *, directed: bool = False) -> Topology:
    """Each worker averages with the two next to it: `1/3` each; with `directed` it sends to the next: `1/2` each.

    *On the wire* in a step: 2 models (1 with `directed`, and with two workers), whatever `W`. It mixes slowly: the
    spectral gap falls as `1/W²`, .2 for 8 workers and .05 for 16.

    A directed ring has no symmetric matrix: not for `d2` and compressed methods. `λ_min` is `-1/3` for an even number
    of workers.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.ring(8)), 4)
      0.8047
    """
    check_workers(workers)
    moves = [shift(workers, 1)] if directed else [shift(workers, 1), shift(workers, -1)]
    return cycle_rounds("directed ring" if directed else "ring", workers, [permutation_round(workers, moves)])


def torus(workers: int, *, shape: Sequence[int] | None = None) -> Topology:
    """A grid whose borders are joined: each worker averages with the next ones along each dimension.

    *On the wire* in a step: 2 models for each dimension (1 where it has two workers), 4 in the plane.

    Args:
      workers: their number `W`.
      shape: the sides, two or more, each at least 2. By default the plane nearest to a square; there is none if `W` is
        prime.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.torus(16)), 4)
      0.6
    """
    check_workers(workers, 4)
    if shape is None:
        side = next(side for side in range(math.isqrt(workers), 0, -1) if workers % side == 0)
        if side == 1:
            raise ValueError(f"a torus of {workers} workers would be a ring, since {workers} is prime: use ring")
        shape = (side, workers // side)
    sides = tuple(shape)
    if math.prod(sides) != workers or min(sides) < 2 or len(sides) < 2:
        raise ValueError(
            f"the shape of a torus of {workers} workers must have two sides or more, each at least 2, with the product "
            f"{workers}, got {sides}"
        )
    # Along a side of two workers both directions are one move, which `permutation_round` takes once.
    grid = np.arange(workers).reshape(sides)
    moves = [np.roll(grid, step, axis).reshape(-1).tolist() for axis in range(len(sides)) for step in (-1, 1)]
    return cycle_rounds("torus " + " x ".join(map(str, sides)), workers, [permutation_round(workers, moves)])


def hypercube(workers: int) -> Topology:
    """Each worker averages with those whose number differs in one bit: `log2 W` neighbors.

    *On the wire* in a step: `log2 W` models. `W` must be a power of two; `ρ = (d-1)/(d+1)` for `d = log2 W`.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.hypercube(8)), 4)
      0.5

    References:
      Nedić et al., "Network Topology and Communication-Computation Tradeoffs in Decentralized Optimization",
      arXiv:1709.08765, 2018.
    """
    check_workers(workers)
    if workers & (workers - 1):
        raise ValueError(
            f"a hypercube needs a power of two of workers, got {workers}: use exponential({workers}), with the same "
            "number of neighbors"
        )
    moves = [[i ^ (1 << bit) for i in range(workers)] for bit in range(workers.bit_length() - 1)]
    return cycle_rounds("hypercube", workers, [permutation_round(workers, moves)])


def complete(workers: int) -> Topology:
    """Each worker averages with all others: one step is the mean. `gossip` then runs a single all-reduce.

    *On the wire* in a step: `2(W-1)/W` models by an all-reduce; `W-1` where each neighbor gets a separate message.
    `ρ = 0`.

    Examples:
      >>> from jaxdist import topology
      >>> topology.mixing_rate(topology.complete(5))
      0.0
    """
    check_workers(workers)
    moves = [shift(workers, step) for step in range(1, workers)]
    return cycle_rounds("complete", workers, [permutation_round(workers, moves)])


def exponential(workers: int) -> Topology:
    """Each worker sends to those 1, 2, 4, 8, ... places ahead.

    *On the wire* in a step: `ceil(log2 W)` models. It mixes as well as a hypercube, for any number of workers; its
    matrix is doubly stochastic but not symmetric: not for `d2` and compressed methods.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.exponential(16)), 4)
      0.6

    References:
      Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363, 2021.
    """
    check_workers(workers)
    moves = [shift(workers, step) for step in powers(workers)]
    return cycle_rounds("exponential", workers, [permutation_round(workers, moves)])


def star(workers: int) -> Topology:
    """Worker 0 averages with all others, and each of them only with worker 0 (Metropolis weights).

    *On the wire* in a step: `W-1` models by worker 0, one after the other, and one by each other worker: a tree of
    smaller degree is nearly always better. `ρ = 1 - 1/W`.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.star(8)), 4)
      0.875
    """
    check_workers(workers)
    return from_edges(workers, [(0, i) for i in range(1, workers)], name="star")


def path(workers: int) -> Topology:
    """A ring with one link left out (Metropolis weights): the tree of smallest degree, for `relay_sgd`.

    *On the wire* in a step: 2 models, 1 at the ends. For gossip it is the slowest connected graph; for relaying the
    delay between two workers is their distance, up to `W-1` steps.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.path(8)), 4)
      0.9493
    """
    check_workers(workers)
    return from_edges(workers, [(i, i + 1) for i in range(workers - 1)], name="path")


def binary_tree(workers: int) -> Topology:
    """Worker `i` averages with `2i+1`, `2i+2` and its parent (Metropolis weights): for `relay_sgd`.

    *On the wire* in a step: up to 3 models. For relaying the delay between two workers is at most `2 log2 W` steps.

    Examples:
      >>> from jaxdist import topology
      >>> len(topology.binary_tree(15).rounds[0].messages)
      3
    """
    check_workers(workers)
    return from_edges(workers, [((i - 1) // 2, i) for i in range(1, workers)], name="binary tree")


def digraph(workers: int, arcs: Sequence[tuple[int, int]]) -> Topology:
    """Any directed graph; each worker divides its model into equal shares for itself and its destinations.

    The matrix is column-stochastic, so the mean of all models is kept; `sgp` weighs the models that arrive, and is the
    only method that turns them into an average. `arcs` has `(source, destination)` of each link.

    Examples:
      >>> from jaxdist import topology
      >>> topology.matrix(topology.digraph(3, [(0, 1), (0, 2), (1, 0), (2, 0)])).round(2).tolist()[0]
      [0.33, 0.5, 0.5]

    References:
      Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792, 2019.
    """
    check_workers(workers)
    # Column j: what worker j sends, in equal shares.
    weights = np.eye(workers)
    for source, destination in arcs:
        if not (0 <= source < workers and 0 <= destination < workers) or source == destination:
            raise ValueError(
                f"an arc must lead from one of the {workers} workers, numbered from 0, to another, got "
                f"{(source, destination)}"
            )
        weights[destination, source] = 1
    return from_matrix(weights / weights.sum(0, keepdims=True), name="digraph")


def shift(workers: int, step: int) -> list[int]:
    """The destination of each worker that sends `step` places ahead."""
    return [(i + step) % workers for i in range(workers)]


def powers(workers: int) -> list[int]:
    """1, 2, 4, ... below `W`. In integers, since rounded logarithms would miss some."""
    return [1 << bit for bit in range((workers - 1).bit_length())]
