"""Workers that are gone for some time."""

from collections.abc import Iterator

import numpy as np

from ..._typing import Number
from .base import Durations, check_positive


def failures(base: Durations, *, up: Number, down: Number) -> Durations:
    """Workers fail and come back: they run for `up · Exp(1)` seconds and are gone for `down · Exp(1)`.

    What a worker computes when it fails is lost, and so is what is sent to it meanwhile. It keeps its state and asks
    for the current model when it is back.

    Args:
      base: how long gradients take.
      up: mean seconds between failures of a worker.
      down: mean seconds until it is back.

    Returns:
      The law.

    Raises:
      ValueError: a time is not positive.

    Example:
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.failures(durations.constant(1.0), up=100, down=5)
      >>> up, down = next(durations.outages(law, 0, worker=3))
      >>> up > 0, down > 0
      (True, True)
    """
    check_positive(up=up, down=down)

    def drawn(rng: np.random.Generator, worker: int) -> Iterator[tuple[float, float]]:
        while True:
            yield up * rng.exponential(), down * rng.exponential()

    return base._replace(name=f"failures({base.name})", outages=drawn)
