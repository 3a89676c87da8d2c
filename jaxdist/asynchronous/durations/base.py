"""How long gradients take: each worker's jobs draw from a stream of its own, whatever the method."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..._core.types import Number

BLOCK = 256
_COMPUTE, _OUTAGES = 1, 2


class Durations(NamedTuple):
    """How long the gradients of workers take.

    Attributes:
      name: for messages and plots.
      draw: `draw(rng, worker, first, count, state) -> (seconds, state)` for the jobs `first ... first + count - 1` of a
        worker, in order; `state` is None before the first. `inf`: never done.
      workers: for how many workers they are, or None for any number.
      outages: `outages(rng, worker)` iterates over `(up, down)`, the seconds that a worker runs and then is gone; or
        None.
      finish: `finish(worker, start, work) -> end` in seconds, for speeds that change with time; or None.
    """

    name: str
    draw: Callable[[np.random.Generator, int, int, int, Any], tuple[np.ndarray, Any]]
    workers: int | None = None
    outages: Callable[[np.random.Generator, int], Iterator[tuple[float, float]]] | None = None
    finish: Callable[[int, float, float], float] | None = None


def stream(durations: Durations, seed: int, worker: int, first: int = 0) -> Iterator[float]:
    """The seconds of a worker's jobs from `first` on: they follow from the seed, the worker and the job alone.

    Args:
      durations: the law.
      seed: of the run.
      worker: its number.
      first: the job to begin with.

    Returns:
      An iterator without end.

    Example:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.exponential(1.0)
      >>> all_jobs = list(islice(durations.stream(law, 0, worker=2), 300))
      >>> all_jobs[299] == next(durations.stream(law, 0, worker=2, first=299))
      True
    """
    block, state = 0, None
    while True:
        rng = np.random.default_rng((seed, _COMPUTE, worker, block))
        drawn, state = durations.draw(rng, worker, block * BLOCK, BLOCK, state)
        yield from drawn[max(0, first - block * BLOCK) :].tolist()
        block += 1


def outages(durations: Durations, seed: int, worker: int) -> Iterator[tuple[float, float]]:
    """The seconds that a worker runs and is gone, in turn; nothing if it never fails."""
    if durations.outages is not None:
        yield from durations.outages(np.random.default_rng((seed, _OUTAGES, worker)), worker)


def check_positive(**values: Number) -> None:
    """`ValueError` that names the first value which is not positive, or not finite."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")


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
