"""Graphs that change from step to step: few messages in each, and fast mixing over several."""

from collections.abc import Callable
from functools import partial

import numpy as np

from .base import (
    Edge,
    Round,
    Topology,
    check_rounds,
    check_workers,
    cycle_rounds,
    matching_round,
    permutation_round,
)
from .graphs import powers, shift
from .spectrum import separate_workers

_DRAWS = 100  # of a changing graph: an edge with a low probability may be in none of a few rounds


def one_peer_exponential(workers: int) -> Topology:
    """In step `t` every worker sends to the one `2^(t mod d)` places ahead, `d = ceil(log2 W)`, and averages.

    *On the wire* in a step: one model. If `W` is a power of two, all models are equal to their mean, exactly, after `d`
    steps; for other numbers the consensus error shrinks by some factor in `d` steps (.22 for 6 workers, .21 for 12).
    Directed and doubly stochastic.

    Examples:
      >>> from jaxdist import topology
      >>> [topology.one_peer_exponential(8).rounds[t].messages[0].pairs[0] for t in range(3)]
      [(0, 1), (0, 2), (0, 4)]

    References:
      Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363, 2021
      (exponential graphs). Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning",
      arXiv:1811.10792, 2019 (SGP).
    """
    check_workers(workers)
    rounds = [permutation_round(workers, [shift(workers, step)]) for step in powers(workers) or [0]]
    return cycle_rounds("one-peer exponential", workers, rounds)


def random_matchings(workers: int, *, rounds: int = 16, seed: int = 0) -> Topology:
    """In each step the workers average in pairs, drawn at random (Boyd et al., "Randomized gossip algorithms", 2006).

    *On the wire* in a step: one model. The expected square of the consensus error shrinks by `½(1 - 1/(W-1))`, or by a
    little less with an odd number of workers, of which one is left out.

    After `rounds` matchings they repeat; a compiled program contains each once. They are drawn again if some workers
    never communicate, not even through others.

    Examples:
      >>> from jaxdist import topology
      >>> topology.random_matchings(4).rounds[0].messages[0].pairs
      ((0, 2), (1, 3), (2, 0), (3, 1))
    """
    check_workers(workers)
    check_rounds(rounds)
    rng = np.random.default_rng(seed)
    # A single matching of more than two workers is never enough.
    return _draw_until_connected(partial(_draw_matchings, workers, rounds, rng), _DRAWS if rounds > 1 else 1)


def _draw_until_connected(draw: Callable[[], Topology], attempts: int) -> Topology:
    """Draws until all workers communicate, at most so often, and returns the last draw."""
    drawn = draw()
    for _ in range(attempts - 1):
        if not separate_workers(drawn):
            break
        drawn = draw()
    return drawn


def _draw_matchings(workers: int, rounds: int, rng: np.random.Generator) -> Topology:
    drawn_rounds = []
    for _ in range(rounds):
        # Neighbors in a random order are pairs; the last of an odd number is left out.
        seats = rng.permutation(workers).tolist()
        edges = sorted((min(pair), max(pair)) for pair in zip(seats[::2], seats[1::2], strict=False))
        drawn_rounds.append(_pairing_round(workers, edges))
    return cycle_rounds("random matchings", workers, drawn_rounds)


def relabeled_ring(workers: int, *, rounds: int = 16, seed: int = 0, halves: bool = False) -> Topology:
    """A ring whose workers change places in every step.

    *On the wire* in a step: two models, as in a ring. It mixes as a graph with far more neighbors: the consensus error
    shrinks by .49 in each step for 8 workers, .54 for 16 and .56 for 32; for the fixed ring by .80, .95 and .99.

    Args:
      workers: their number `W`.
      rounds: how many orders are drawn; they repeat after that. Each is in the compiled program once.
      seed: of the draw.
      halves: even workers change places only with even ones, and odd ones with odd ones: then all rounds together are
        bipartite, as `asynchronous.rules.ad_psgd` needs them. It mixes a little more slowly.

    Examples:
      >>> from jaxdist import topology
      >>> round(topology.expected_mixing_rate(topology.relabeled_ring(16, rounds=500)), 2)
      0.56

    References:
      Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training", ICASSP,
      arXiv:2002.01119, 2020.
    """
    check_workers(workers)
    check_rounds(rounds)
    if halves and workers % 2:
        raise ValueError(f"a ring of two halves needs an even number of workers, got {workers}")
    rng = np.random.default_rng(seed)
    drawn_rounds = []
    for _ in range(rounds):
        seats = rng.permutation(workers)
        if halves:
            # Even and odd workers alternate along the ring.
            seats = np.stack([seats[seats % 2 == 0], seats[seats % 2 == 1]], axis=1).reshape(-1)
        moves = []
        for step in (1, -1):
            # The worker in one seat sends to the worker in the next.
            move = np.empty(workers, int)
            move[seats] = np.roll(seats, -step)
            moves.append(move.tolist())
        drawn_rounds.append(permutation_round(workers, moves))
    return cycle_rounds("relabeled ring", workers, drawn_rounds)


def shift_one(workers: int) -> Topology:
    """Each worker of the first half averages with one of the second half, which shifts by one place in each step.

    In step `s` worker `r < W/2` averages with `W/2 + (s + r) mod W/2`.

    *On the wire* in a step: one model. `W` must be even, or 1; there are `W/2` rounds, symmetric.

    Examples:
      >>> from jaxdist import topology
      >>> topology.shift_one(4).rounds[1].messages[0].pairs
      ((0, 3), (1, 2), (2, 1), (3, 0))

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499, 2021.
    """
    check_workers(workers)
    if workers > 1 and workers % 2:
        raise ValueError(
            f"shift_one needs an even number of workers, got {workers}: random_matchings works with any number"
        )
    half = workers // 2
    pairs = [[(r, half + (step + r) % half) for r in range(half)] for step in range(max(half, 1))]
    return cycle_rounds("shift one", workers, [_pairing_round(workers, edges) for edges in pairs])


def _pairing_round(workers: int, edges: list[Edge]) -> Round:
    """The round in which the workers of each pair take the mean of their two models."""
    return matching_round(workers, [(edges, dict.fromkeys(edges, 0.5))] if edges else [])
