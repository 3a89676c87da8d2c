"""Every gradient from one law."""

from collections.abc import Callable, Sequence

import numpy as np

from ..._typing import Number
from .base import Durations, check_positive


def _law(name: str, sample: Callable[[np.random.Generator, int], np.ndarray]) -> Durations:
    return Durations(name, lambda rng, worker, first, count, state: (sample(rng, count), None))


def constant(seconds: Number | Sequence[Number]) -> Durations:
    """Every gradient of a worker takes `τ_i`.

    Args:
      seconds: τ of all workers, or one for each.

    Returns:
      The law.

    Raises:
      ValueError: a time is not positive.

    Example:
      >>> from jaxdist.asynchronous import durations
      >>> next(durations.stream(durations.constant([1.0, 2.0]), 0, worker=1))
      2.0
    """
    times = np.atleast_1d(np.asarray(seconds, float))
    if times.ndim != 1 or not (times > 0).all():
        raise ValueError(f"seconds must be positive, got {seconds}")
    workers = None if np.ndim(seconds) == 0 else len(times)

    def draw(rng, worker, first, count, state):
        return np.full(count, times[worker if workers else 0]), None

    return Durations("constant", draw, workers)


def exponential(mean: Number) -> Durations:
    """`m · Exp(1)`: the longest of n takes `m H_n` on average, with `H_n = 1 + 1/2 + ... + 1/n`.

    Args:
      mean: m in seconds.

    Returns:
      The law.

    Raises:
      ValueError: `mean` is not positive.

    Example:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> drawn = list(islice(durations.stream(durations.exponential(2.0), 0, worker=0), 10_000))
      >>> abs(sum(drawn) / len(drawn) - 2) < 0.1
      True
    """
    check_positive(mean=mean)
    return _law("exponential", lambda rng, count: mean * rng.exponential(size=count))


def shifted_exponential(shift: Number, mean: Number) -> Durations:
    """`ζ + m · Exp(1)`: the longest of n takes `ζ + m H_n` on average.

    Args:
      shift: ζ, the least seconds.
      mean: m, the mean of what comes on top.

    Returns:
      The law.

    Raises:
      ValueError: `shift` is negative or `mean` not positive.

    Example:
      >>> from jaxdist.asynchronous import durations
      >>> next(durations.stream(durations.shifted_exponential(0.5, 0.5), 0, worker=0)) >= 0.5
      True

    References:
      Lee et al., "Speeding up distributed machine learning using codes", arXiv:1512.02673, 2018.
    """
    check_positive(mean=mean)
    if not shift >= 0:
        raise ValueError(f"shift must be at least 0, got {shift}")
    return _law("shifted_exponential", lambda rng, count: shift + mean * rng.exponential(size=count))


def lognormal(median: Number, spread: Number) -> Durations:
    """`exp(log m + s · N(0, 1))`: mean `m exp(s²/2)`.

    Args:
      median: m in seconds.
      spread: s; 0.1 is a quiet cluster, 1 a busy one.

    Returns:
      The law.

    Raises:
      ValueError: an argument is not positive.

    Example:
      >>> from jaxdist.asynchronous import durations
      >>> next(durations.stream(durations.lognormal(1.0, 0.1), 0, worker=0)) > 0
      True
    """
    check_positive(median=median, spread=spread)
    return _law("lognormal", lambda rng, count: median * np.exp(spread * rng.standard_normal(count)))
