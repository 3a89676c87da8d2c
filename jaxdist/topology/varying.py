"""Graphs that change from step to step: fewer messages each time, and a mean of them that mixes well."""

import numpy as np

from .base import Topology, check_workers, in_turn, matched, shifts
from .graphs import powers, shift


def one_peer_exponential(workers: int) -> Topology:
    """In step `t` everybody sends to the one `2^(t mod d)` places ahead, `d = ceil(log2 W)`, and averages.

    *Sent* in a step: one model. After `d` steps all models are equal to their mean, exactly, where `W` is a power of
    two; for other numbers what is left shrinks by some factor each time (.22 for 6 workers, .21 for 12).

    Args:
      workers: their number `W`.

    Returns:
      A topology of `d` rounds. It is directed and doubly stochastic.

    Raises:
      ValueError: there are no workers.

    Example:
      >>> from jaxdist import topology
      >>> [topology.one_peer_exponential(8).rounds[t].messages[0].pairs[0] for t in range(3)]
      [(0, 1), (0, 2), (0, 4)]

    References:
      Ying, Yuan, Chen, Hu, Pan, Yin, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv
      2110.13363, 2021. Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", arXiv
      1811.10792, 2019.
    """
    check_workers(workers)
    steps = powers(workers) or [0]
    return in_turn("one-peer exponential", workers, [shifts(workers, [shift(workers, step)]) for step in steps])


def random_matchings(workers: int, *, rounds: int = 16, seed: int = 0) -> Topology:
    """In each step the workers meet in pairs, drawn anew, and both take the average.

    *Sent* in a step: one model. The expected square of the consensus error falls to `½(1 - 1/(W-1))` of it, whatever
    `W`, and with an odd number, of whom one stays out, to a little more.

    Args:
      workers: their number `W`.
      rounds: how many matchings are drawn; they repeat after that. Each is in the compiled program once.
      seed: of the draw.

    Returns:
      A topology of `rounds` rounds, symmetric.

    Raises:
      ValueError: there are no workers, or no rounds.

    Example:
      >>> from jaxdist import topology
      >>> topology.random_matchings(4).rounds[0].messages[0].pairs
      ((0, 2), (1, 3), (2, 0), (3, 1))

    References:
      Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms", 2006.
    """
    check_workers(workers)
    check_rounds(rounds)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(rounds):
        seats = rng.permutation(workers).tolist()
        edges = sorted((min(pair), max(pair)) for pair in zip(seats[::2], seats[1::2], strict=False))
        drawn.append(matched(workers, [(edges, dict.fromkeys(edges, 0.5))] if edges else []))
    return in_turn("random matchings", workers, drawn)


def relabelled_ring(workers: int, *, rounds: int = 16, seed: int = 0, halves: bool = False) -> Topology:
    """A ring whose workers change places in every step.

    *Sent* in a step: two models, as in a ring. It mixes as a graph of far more neighbors: the consensus error falls
    to .49 of it in each step for 8 workers, .54 for 16 and .56 for 32, where the ring at rest has .80, .95 and .99.

    Args:
      workers: their number `W`.
      rounds: how many orders are drawn; they repeat after that. Each is in the compiled program once.
      seed: of the draw.
      halves: even workers change places with even ones alone, and odd ones with odd ones: all rounds together are
        bipartite then, as `asynchronous.rules.ad_psgd` needs them. It mixes a little more slowly.

    Returns:
      A topology of `rounds` rounds, symmetric.

    Raises:
      ValueError: there are no workers, or no rounds; `halves` with an odd number of workers.

    Example:
      >>> from jaxdist import topology
      >>> round(topology.expected_mixing_rate(topology.relabelled_ring(16, rounds=500)), 2)
      0.56

    References:
      Zhang, Cui, Kayi et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training", 2020.
    """
    check_workers(workers)
    check_rounds(rounds)
    if halves and workers % 2:
        raise ValueError(f"a ring of two halves needs an even number of workers, got {workers}")
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(rounds):
        seats = rng.permutation(workers)
        if halves:
            seats = np.stack([seats[seats % 2 == 0], seats[seats % 2 == 1]], axis=1).reshape(-1)
        moves = []
        for step in (1, -1):
            move = np.empty(workers, int)
            move[seats] = np.roll(seats, -step)
            moves.append(move.tolist())
        drawn.append(shifts(workers, moves))
    return in_turn("relabelled ring", workers, drawn)


def shift_one(workers: int) -> Topology:
    """The first half of the workers meets the second, moved by one place in each step; both take the average.

    In step `s` worker `r < W/2` meets `W/2 + (s + r) mod W/2`.

    *Sent* in a step: one model.

    Args:
      workers: `W`, an even number, or 1.

    Returns:
      A topology of `W/2` rounds, symmetric.

    Raises:
      ValueError: `W` is odd.

    Example:
      >>> from jaxdist import topology
      >>> topology.shift_one(4).rounds[1].messages[0].pairs
      ((0, 3), (1, 2), (2, 1), (3, 0))

    References:
      Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499, 2021.
    """
    check_workers(workers)
    half = workers // 2
    if workers > 1 and workers % 2:
        raise ValueError(
            f"shift_one needs an even number of workers, got {workers}: random_matchings works with any number"
        )
    drawn = []
    for step in range(max(half, 1)):
        edges = [(r, half + (step + r) % half) for r in range(half)]
        drawn.append(matched(workers, [(edges, dict.fromkeys(edges, 0.5))] if edges else []))
    return in_turn("shift one", workers, drawn)


def check_rounds(rounds: int) -> None:
    """Raises unless something is drawn."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
