"""Workers that are slower than others, always or at times."""

import numpy as np

from ..._core.types import Number
from .base import Durations, check_positive


def one_slow(base: Durations, *, worker: int = 0, factor: Number = 4.0) -> Durations:
    """Slows one worker down by a constant factor.

    Args:
      base: the law of all workers.
      worker: the index of the slow worker.
      factor: the slowdown.

    Returns:
      The law.

    Raises:
      ValueError: `factor` is not positive, or `worker` is out of range.

    Example:
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.one_slow(durations.constant(1.0), worker=2, factor=6)
      >>> [next(durations.stream(law, 0, i)) for i in range(4)]
      [1.0, 1.0, 6.0, 1.0]
    """
    check_positive(factor=factor)
    if worker < 0 or (base.workers is not None and worker >= base.workers):
        raise ValueError(f"worker must be the index of a worker, from 0, got {worker}")

    def draw(rng, i, first, count, state):
        drawn, state = base.draw(rng, i, first, count, state)
        return drawn * (factor if i == worker else 1.0), state

    return base._replace(name=f"one_slow({base.name})", draw=draw)


def random_slow(base: Durations, *, factor: Number, probability: Number) -> Durations:
    """Slows each gradient down with some probability: the mean is `(1 + (f - 1) p)` times that of `base`.

    Args:
      base: the law of all other gradients.
      factor: f, the slowdown; 6 in the paper.
      probability: p; one over the number of workers in the paper.

    Returns:
      The law.

    Raises:
      ValueError: `factor` is not positive, or `probability` outside [0, 1].

    Example:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.random_slow(durations.constant(1.0), factor=6, probability=0.5)
      >>> sorted(set(islice(durations.stream(law, 0, worker=0), 50)))
      [1.0, 6.0]

    References:
      Luo, Lin, Zhuo, Qian, "Hop: heterogeneity-aware decentralized training", arXiv:1902.01064, 2019.
    """
    check_positive(factor=factor)
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability}")

    def draw(rng, worker, first, count, state):
        drawn, state = base.draw(rng, worker, first, count, state)
        return np.where(rng.random(count) < probability, factor, 1.0) * drawn, state

    return base._replace(name=f"random_slow({base.name})", draw=draw)


def markov(base: Durations, *, factor: Number, slow_down: Number, speed_up: Number) -> Durations:
    """Slows workers down for random periods: a Markov chain of two states with one transition per gradient.

    A worker is slow for a fraction `slow_down / (slow_down + speed_up)` of its gradients, which is also the probability
    that it starts slow.

    Args:
      base: the law while a worker is fast.
      factor: the slowdown while it is slow.
      slow_down: the probability that a fast worker is slow at its next gradient.
      speed_up: the probability that a slow worker is fast at its next gradient.

    Returns:
      The law.

    Raises:
      ValueError: `factor` is not positive, or a probability outside [0, 1], or both 0.

    Example:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.markov(durations.constant(1.0), factor=5, slow_down=0.1, speed_up=0.4)
      >>> drawn = list(islice(durations.stream(law, 0, worker=0), 20_000))
      >>> abs(sum(drawn) / len(drawn) - (0.8 + 0.2 * 5)) < 0.1
      True
    """
    check_positive(factor=factor)
    for name, value in (("slow_down", slow_down), ("speed_up", speed_up)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    if not slow_down + speed_up:
        raise ValueError("slow_down and speed_up are both 0, so no worker would ever change: make one positive")

    def draw(rng, worker, first, count, state):
        # The first state is drawn from the stationary distribution.
        inner, slow = state if state is not None else (None, bool(rng.random() < slow_down / (slow_down + speed_up)))
        drawn, inner = base.draw(rng, worker, first, count, inner)
        factors = np.ones(count)
        for k, chance in enumerate(rng.random(count)):
            factors[k] = factor if slow else 1.0
            slow = chance >= speed_up if slow else chance < slow_down
        return drawn * factors, (inner, bool(slow))

    return base._replace(name=f"markov({base.name})", draw=draw)
