"""Graphs that stay the same in every step."""

import math
from collections.abc import Sequence

import numpy as np

from .base import Topology, check_workers, from_edges, from_matrix, in_turn, shifts


def ring(workers: int, *, directed: bool = False) -> Topology:
    """Everybody talks to the two next to it: `1/3` each; with `directed` only to the next: `1/2` each.

    *Sent* in a step: 2 models (1 with `directed`, and with two workers), whatever `W`. It mixes slowly: the spectral
    gap falls as `1/W²`, .2 for 8 workers and .05 for 16.

    Args:
      workers: their number `W`; 1 talks to nobody.
      directed: send to the next one alone. Its matrix is not symmetric: not for `d2` and codes.

    Returns:
      A static topology; `λ_min` is `-1/3` for an even number of workers.

    Raises:
      ValueError: there are no workers.

    Example:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.ring(8)), 4)
      0.8047

    References:
      Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056, 2017.
    """
    check_workers(workers)
    moves = [shift(workers, 1)] if directed else [shift(workers, 1), shift(workers, -1)]
    return in_turn("directed ring" if directed else "ring", workers, [shifts(workers, moves)])


def torus(workers: int, *, shape: Sequence[int] | None = None) -> Topology:
    """A grid whose borders are joined: everybody talks to the next ones along each dimension.

    *Sent* in a step: 2 models for each dimension (1 where it has two workers), 4 in the plane.

    Args:
      workers: their number `W`.
      shape: the sides, two or more, each at least 2. By default the plane nearest to a square.

    Returns:
      A static topology.

    Raises:
      ValueError: `shape` does not hold the workers, or `W` has no factors to make a plane of.

    Example:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.torus(16)), 4)
      0.6

    References:
      Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056, 2017.
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
            f"the shape of a torus of {workers} workers has two sides or more, each at least 2, whose product is "
            f"{workers}, got {sides}"
        )
    grid = np.arange(workers).reshape(sides)
    moves = [np.roll(grid, step, axis).reshape(-1).tolist() for axis in range(len(sides)) for step in (-1, 1)]
    return in_turn("torus " + " x ".join(map(str, sides)), workers, [shifts(workers, moves)])


def hypercube(workers: int) -> Topology:
    """Everybody talks to those whose number differs in one bit: `log2 W` neighbors.

    *Sent* in a step: `log2 W` models. `ρ = (d-1)/(d+1)` for `d = log2 W`.

    Args:
      workers: `W`, a power of two.

    Returns:
      A static topology.

    Raises:
      ValueError: `W` is no power of two.

    Example:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.hypercube(8)), 4)
      0.5

    References:
      Nedić, Olshevsky, Rabbat, "Network Topology and Communication-Computation Tradeoffs in Decentralized
      Optimization", arXiv 1709.08765, 2018.
    """
    check_workers(workers)
    if workers & (workers - 1):
        raise ValueError(
            f"a hypercube needs a power of two of workers, got {workers}: exponential({workers}) has as many neighbors"
        )
    moves = [[i ^ (1 << bit) for i in range(workers)] for bit in range(workers.bit_length() - 1)]
    return in_turn("hypercube", workers, [shifts(workers, moves)])


def complete(workers: int) -> Topology:
    """Everybody talks to everybody: one step is the mean. `gossip` then runs a single all-reduce.

    *Sent* in a step: `2(W-1)/W` models by an all-reduce; `W-1` where each neighbor gets a message of its own.

    Args:
      workers: their number `W`.

    Returns:
      A static topology, `ρ = 0`.

    Raises:
      ValueError: there are no workers.

    Example:
      >>> from jaxdist import topology
      >>> topology.mixing_rate(topology.complete(5))
      0.0

    References:
      Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056, 2017.
    """
    check_workers(workers)
    return in_turn("complete", workers, [shifts(workers, [shift(workers, step) for step in range(1, workers)])])


def exponential(workers: int) -> Topology:
    """Everybody sends to those 1, 2, 4, 8, ... places ahead.

    *Sent* in a step: `ceil(log2 W)` models. It mixes as well as a hypercube, for any number of workers; its matrix is
    doubly stochastic but not symmetric: not for `d2` and codes.

    Args:
      workers: their number `W`.

    Returns:
      A static topology.

    Raises:
      ValueError: there are no workers.

    Example:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.exponential(16)), 4)
      0.6

    References:
      Ying, Yuan, Chen, Hu, Pan, Yin, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv
      2110.13363, 2021.
    """
    check_workers(workers)
    return in_turn("exponential", workers, [shifts(workers, [shift(workers, step) for step in powers(workers)])])


def star(workers: int) -> Topology:
    """Worker 0 talks to all others, and they to nobody else (Metropolis weights).

    *Sent* in a step: `W-1` models by worker 0, one by the others, one after the other: a tree of smaller degree is
    nearly always better.

    Args:
      workers: their number `W`.

    Returns:
      A static topology, `ρ = 1 - 1/W`.

    Raises:
      ValueError: there are no workers.

    Example:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.star(8)), 4)
      0.875

    References:
      Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for Decentralized Deep Learning on Heterogeneous
      Data", arXiv 2110.04175, 2021 (trees for relaying).
    """
    check_workers(workers)
    return from_edges(workers, [(0, i) for i in range(1, workers)], name="star")


def path(workers: int) -> Topology:
    """A ring with one link left out (Metropolis weights): the tree of least degree, for `relay_sgd`.

    *Sent* in a step: 2 models, 1 at the ends. For gossip it is the slowest graph there is; for relaying the delay
    between two workers is their distance, up to `W-1` steps.

    Args:
      workers: their number `W`.

    Returns:
      A static topology.

    Raises:
      ValueError: there are no workers.

    Example:
      >>> from jaxdist import topology
      >>> round(topology.mixing_rate(topology.path(8)), 4)
      0.9493

    References:
      Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", arXiv 2110.04175, 2021.
    """
    check_workers(workers)
    return from_edges(workers, [(i, i + 1) for i in range(workers - 1)], name="path")


def binary_tree(workers: int) -> Topology:
    """Worker `i` talks to `2i+1`, `2i+2` and its parent (Metropolis weights): for `relay_sgd`.

    *Sent* in a step: up to 3 models. For relaying the delay between two workers is at most `2 log2 W` steps.

    Args:
      workers: their number `W`.

    Returns:
      A static topology.

    Raises:
      ValueError: there are no workers.

    Example:
      >>> from jaxdist import topology
      >>> len(topology.binary_tree(15).rounds[0].messages)
      3

    References:
      Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", arXiv 2110.04175, 2021.
    """
    check_workers(workers)
    return from_edges(workers, [((i - 1) // 2, i) for i in range(1, workers)], name="binary tree")


def digraph(workers: int, arcs: Sequence[tuple[int, int]], *, name: str = "digraph") -> Topology:
    """Any directed graph, each worker cutting its model into equal shares for itself and those it sends to.

    The matrix is column-stochastic, and the mean of all models is kept; only `sgp`, which weighs what has arrived,
    turns that into an average.

    Args:
      workers: their number `W`.
      arcs: `(source, destination)` of each link.
      name: for messages and plots.

    Returns:
      A static topology.

    Raises:
      ValueError: an arc names a worker that there is not, or joins one with itself.

    Example:
      >>> from jaxdist import topology
      >>> topology.matrix(topology.digraph(3, [(0, 1), (0, 2), (1, 0), (2, 0)])).round(2).tolist()[0]
      [0.33, 0.5, 0.5]

    References:
      Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv 1811.10792, 2019.
    """
    check_workers(workers)
    weights = np.eye(workers)
    for source, destination in arcs:
        if not (0 <= source < workers and 0 <= destination < workers) or source == destination:
            raise ValueError(
                f"an arc leads from one of the {workers} workers, numbered from 0, to another, got "
                f"{(source, destination)}"
            )
        weights[destination, source] = 1
    return from_matrix(weights / weights.sum(0, keepdims=True), name=name)


def shift(workers: int, step: int) -> list[int]:
    """Where each sends who sends so many places ahead."""
    return [(i + step) % workers for i in range(workers)]


def powers(workers: int) -> list[int]:
    """1, 2, 4, ... below `W`. In integers: logarithms of floats lose some."""
    return [1 << bit for bit in range((workers - 1).bit_length())]
