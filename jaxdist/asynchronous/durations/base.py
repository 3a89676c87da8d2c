"""Durations of gradients: each worker draws from its own random stream, which is the same under every rule."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..._core.types import Number

# Durations are drawn in blocks, each from its own generator, so that a job's duration does not depend on where the
# stream starts.
BLOCK = 256
# Separate the random streams of durations and of outages.
_COMPUTE, _OUTAGES = 1, 2


class Durations(NamedTuple):
    """A law of the durations of workers' gradients, and of their outages.

    Attributes:
      name: for messages and plots.
      draw: `draw(rng, worker, first, count, state) -> (seconds, state)` for the jobs `first ... first + count - 1` of a
        worker, in order; `state` is None before the first. A gradient of `inf` seconds never finishes.
      workers: the number of workers, or None for any number.
      outages: `outages(rng, worker)` iterates over `(up, down)`, the seconds for which a worker is up and then down; or
        None.
      finish: `finish(worker, start, work) -> end` in seconds, for speeds that change with time; or None.
    """

    name: str
    draw: Callable[[np.random.Generator, int, int, int, Any], tuple[np.ndarray, Any]]
    workers: int | None = None
    outages: Callable[[np.random.Generator, int], Iterator[tuple[float, float]]] | None = None
    finish: Callable[[int, float, float], float] | None = None


def stream(durations: Durations, seed: int, worker: int, first: int = 0) -> Iterator[float]:
    """Yields the seconds of a worker's jobs from `first` on, which depend only on the seed, the worker and the job.

    Args:
      durations: the law.
      seed: the seed of the run.
      worker: the index of the worker.
      first: the first job.

    Returns:
      An infinite iterator.

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
        # Laws with a state, such as `markov`, need all earlier blocks.
        rng = np.random.default_rng((seed, _COMPUTE, worker, block))
        drawn, state = durations.draw(rng, worker, block * BLOCK, BLOCK, state)
        yield from drawn[max(0, first - block * BLOCK) :].tolist()
        block += 1


def outages(durations: Durations, seed: int, worker: int) -> Iterator[tuple[float, float]]:
    """Yields `(up, down)`, the seconds for which a worker is up and then down; nothing if it never fails."""
    if durations.outages is not None:
        yield from durations.outages(np.random.default_rng((seed, _OUTAGES, worker)), worker)


def check_positive(**values: Number) -> None:
    """Checks that all values are positive and finite."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")


def failures(base: Durations, *, up: Number, down: Number) -> Durations:
    """Adds failures: workers are up for `up · Exp(1)` seconds and down for `down · Exp(1)`.

    A gradient that is running at a failure is lost, and so are messages to the worker while it is down. It keeps its
    state and requests the current model when it recovers.

    Args:
      base: the law of durations.
      up: mean seconds between failures of a worker.
      down: mean seconds until it recovers.

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

    def draw_outages(rng: np.random.Generator, worker: int) -> Iterator[tuple[float, float]]:
        while True:
            yield up * rng.exponential(), down * rng.exponential()

    return base._replace(name=f"failures({base.name})", outages=draw_outages)
