"""Laws in which all gradients of a worker have the same distribution, and measured durations."""

import bisect
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ..._core.types import Number
from .base import Durations, check_positive


def _law(name: str, sample: Callable[[np.random.Generator, int], np.ndarray]) -> Durations:
    return Durations(name, lambda rng, worker, first, count, state: (sample(rng, count), None))


def constant(seconds: Number | Sequence[Number]) -> Durations:
    """Every gradient of worker i takes `τ_i`.

    Args:
      seconds: τ of all workers, or one per worker.

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
      shift: ζ, the least duration in seconds.
      mean: m, the mean of the random part.

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


def power(times: Sequence[Number], speeds: Sequence[Sequence[Number]]) -> Durations:
    """A gradient ends when `∫ v_i(t) dt = 1`: for workers whose speeds change, or that are off for a time.

    Args:
      times: the times at which speeds change, in virtual seconds, increasing from 0.
      speeds: for each worker `v_i` in gradients per second from each of the times on; 0 is off, the last one remains.

    Returns:
      The law.

    Raises:
      ValueError: the times do not increase from 0, or a worker lacks a nonnegative speed for one of them.

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
            raise ValueError(f"speeds must be {len(starts)} numbers of at least 0 per worker, got {list(row)}")

    def draw(rng, worker, first, count, state):
        # One unit of work each; `finish` turns work into time.
        return np.ones(count), None

    def finish(worker: int, start: float, work: float) -> float:
        k, now = bisect.bisect_right(starts, start) - 1, start
        # Interval by interval, until the rest of the work fits.
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


def recorded(seconds: Sequence[Sequence[Number]], *, mode: Literal["cycle", "stop"] = "cycle") -> Durations:
    """Measured durations: `seconds[i][k]` for job k of worker i.

    Args:
      seconds: a list per worker; their lengths may differ.
      mode: `"cycle"` repeats the list; `"stop"` never finishes another gradient after its end.

    Returns:
      The law.

    Raises:
      ValueError: a list is empty, or a time is not positive.

    Example:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.recorded([[1.0, 2.0], [3.0]])
      >>> list(islice(durations.stream(law, 0, worker=0), 3))
      [1.0, 2.0, 1.0]
    """
    rows = [np.asarray(row, float) for row in seconds]
    for i, row in enumerate(rows):
        if row.ndim != 1 or not len(row) or not (row > 0).all():
            raise ValueError(f"seconds of worker {i} must be one or more positive numbers, got {seconds[i]}")

    def draw(rng, worker, first, count, state):
        row, jobs = rows[worker], np.arange(first, first + count)
        out = row[jobs % len(row)]
        return (out if mode == "cycle" else np.where(jobs < len(row), out, np.inf)), None

    return Durations("recorded", draw, len(rows))


def from_file(path: Path, *, mode: Literal["cycle", "stop"] = "cycle") -> Durations:
    """Reads `recorded` durations from a JSON file: a list of seconds per worker.

    Args:
      path: the file.
      mode: as for `recorded`.

    Returns:
      The law.

    Raises:
      ValueError: the file has other content.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxdist.asynchronous import durations
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "seconds.json"
      >>> _ = file.write_text("[[1.0, 2.5], [3.0]]")
      >>> durations.from_file(file).workers
      2
    """
    rows = json.loads(path.read_text())
    if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        raise ValueError(f"{path} must contain a list of lists of seconds, one per worker")
    for row in rows:
        if not all(isinstance(value, float | int) for value in row):
            raise ValueError(f"{path} must contain a list of lists of seconds, got {row}")
    return recorded(rows, mode=mode)
