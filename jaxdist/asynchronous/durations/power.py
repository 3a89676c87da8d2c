"""Speeds that change with time."""

import bisect
import math
from collections.abc import Sequence

import numpy as np

from ..._typing import Number
from .base import Durations


def power(times: Sequence[Number], speeds: Sequence[Sequence[Number]]) -> Durations:
    """A gradient is done when `∫ v_i(t) dt = 1`: workers whose speeds change, or that are off for a time.

    Args:
      times: where speeds change, in virtual seconds, increasing, the first 0.
      speeds: for each worker `v_i` in gradients per second from each of the times on; 0 is off, the last one stays.

    Returns:
      The law.

    Raises:
      ValueError: the times do not increase from 0, or there is not a speed that is not negative for each.

    Example:
      >>> import optax
      >>> from jaxdist.asynchronous import durations, replay, rules
      >>> law = durations.power([0, 2.5, 4], [[1, 0, 2]])  # off from 2.5 to 4 s, then twice as fast
      >>> run = replay.run(rules.asgd(optax.sgd(0.1)), durations=law, workers=1, seconds=5)
      >>> (run.trace.steps.tick / 1e9).tolist()
      [1.0, 2.0, 4.25, 4.75]

    References:
      Tyurin, "Tight time complexities in parallel stochastic optimization with arbitrary computation dynamics",
      arXiv:2408.04929, 2024 (the universal computation model).
    """
    starts = [float(time) for time in times]
    if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
        raise ValueError(f"times must increase from 0, got {list(times)}")
    for row in speeds:
        if len(row) != len(starts) or not all(0 <= speed < math.inf for speed in row):
            raise ValueError(f"speeds must be {len(starts)} numbers of at least 0 for each worker, got {list(row)}")

    def draw(rng, worker, first, count, state):
        return np.ones(count), None

    def finish(worker: int, start: float, work: float) -> float:
        k, now = bisect.bisect_right(starts, start) - 1, start
        while True:
            speed = float(speeds[worker][k])
            end = starts[k + 1] if k + 1 < len(starts) else math.inf
            if speed and now + work / speed <= end:
                return now + work / speed
            if end == math.inf:
                return math.inf
            work -= speed * (end - now)
            now, k = end, k + 1

    return Durations("power", draw, len(speeds), finish=finish)
