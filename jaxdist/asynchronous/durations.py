"""Durations of gradients: each worker draws from its own random stream, which is the same under every rule."""

import bisect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .._core.checks import check_range
from .._core.types import Number

# Durations are drawn in blocks, each from its own generator, so that a job's duration does not depend on where the
# stream starts.
_BLOCK = 256
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
      least: the least number of workers, where the law names one of them.
    """

    name: str
    draw: Callable[[np.random.Generator, int, int, int, Any], tuple[np.ndarray, Any]]
    workers: int | None = None
    outages: Callable[[np.random.Generator, int], Iterator[tuple[float, float]]] | None = None
    finish: Callable[[int, float, float], float] | None = None
    least: int = 1


def stream(durations: Durations, seed: int, worker: int, first: int = 0) -> Iterator[float]:
    """Yields the seconds of a worker's jobs from `first` on, which depend only on the seed, the worker and the job.

    Examples:
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
        drawn, state = durations.draw(rng, worker, block * _BLOCK, _BLOCK, state)
        yield from drawn[max(0, first - block * _BLOCK) :].tolist()
        block += 1


def outages(durations: Durations, seed: int, worker: int) -> Iterator[tuple[float, float]]:
    """Yields `(up, down)`, the seconds for which a worker is up and then down; nothing if it never fails."""
    if durations.outages is not None:
        yield from durations.outages(np.random.default_rng((seed, _OUTAGES, worker)), worker)


def _check_positive(**values: Number) -> None:
    for name, value in values.items():
        check_range(name, value, 0, ends="()")


# Laws in which all gradients of a worker have the same distribution.


def _law(name: str, sample: Callable[[np.random.Generator, int], np.ndarray]) -> Durations:
    return Durations(name, lambda rng, worker, first, count, state: (sample(rng, count), None))


def constant(seconds: Number | Sequence[Number]) -> Durations:
    """Every gradient of worker i takes `τ_i`; `seconds` is τ of all workers, or one per worker.

    Examples:
      >>> from jaxdist.asynchronous import durations
      >>> next(durations.stream(durations.constant([1.0, 2.0]), 0, worker=1))
      2.0
    """
    times = np.atleast_1d(np.asarray(seconds, float))
    if times.ndim != 1 or not (times > 0).all() or not np.isfinite(times).all():
        raise ValueError(f"seconds must be positive and finite, got {seconds}")
    workers = None if np.ndim(seconds) == 0 else len(times)

    def draw(rng, worker, first, count, state):
        return np.full(count, times[worker if workers else 0]), None

    return Durations("constant", draw, workers)


def exponential(mean: Number) -> Durations:
    """`m · Exp(1)` seconds: the longest of n takes `m H_n` on average, with `H_n = 1 + 1/2 + ... + 1/n`.

    Examples:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> drawn = list(islice(durations.stream(durations.exponential(2.0), 0, worker=0), 10_000))
      >>> abs(sum(drawn) / len(drawn) - 2) < 0.1
      True
    """
    _check_positive(mean=mean)
    return _law("exponential", lambda rng, count: mean * rng.exponential(size=count))


def shifted_exponential(shift: Number, mean: Number) -> Durations:
    """`ζ + m · Exp(1)` seconds: the longest of n takes `ζ + m H_n` on average.

    `shift` is ζ, the least duration, and `mean` is m, the mean of the random part alone.

    Examples:
      >>> from jaxdist.asynchronous import durations
      >>> next(durations.stream(durations.shifted_exponential(0.5, 0.5), 0, worker=0)) >= 0.5
      True

    References:
      Lee et al., "Speeding Up Distributed Machine Learning Using Codes", arXiv:1512.02673, 2018.
    """
    _check_positive(mean=mean)
    check_range("shift", shift, 0, ends="[]")
    return _law("shifted_exponential", lambda rng, count: shift + mean * rng.exponential(size=count))


def lognormal(median: Number, spread: Number) -> Durations:
    """`exp(log m + s · N(0, 1))` seconds, `m exp(s²/2)` on average.

    `median` is m, and `spread` is s: 0.1 is a quiet cluster, 1 a busy one.

    Examples:
      >>> from jaxdist.asynchronous import durations
      >>> next(durations.stream(durations.lognormal(1.0, 0.1), 0, worker=0)) > 0
      True
    """
    _check_positive(median=median, spread=spread)
    return _law("lognormal", lambda rng, count: median * np.exp(spread * rng.standard_normal(count)))


# Speeds that change, and measured durations.


def power(times: Sequence[Number], speeds: Sequence[Sequence[Number]]) -> Durations:
    """A gradient ends when `∫ v_i(t) dt = 1`: for workers whose speeds change, or that are off for a time.

    Args:
      times: the times at which speeds change, in virtual seconds, increasing from 0.
      speeds: for each worker `v_i` in gradients per second from each of the times on; 0 is off, the last one remains.

    Examples:
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

    Examples:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.recorded([[1.0, 2.0], [3.0]])
      >>> list(islice(durations.stream(law, 0, worker=0), 3))
      [1.0, 2.0, 1.0]
    """
    if mode not in ("cycle", "stop"):
        raise ValueError(f'mode must be "cycle" or "stop", got {mode!r}')
    rows = [np.asarray(row, float) for row in seconds]
    for i, row in enumerate(rows):
        if row.ndim != 1 or not len(row) or not (row > 0).all():
            raise ValueError(f"seconds of worker {i} must be one or more positive numbers, got {seconds[i]}")

    def draw(rng, worker, first, count, state):
        row, jobs = rows[worker], np.arange(first, first + count)
        out = row[jobs % len(row)]
        return (out if mode == "cycle" else np.where(jobs < len(row), out, np.inf)), None

    return Durations("recorded", draw, len(rows))


def from_file(path: Path) -> Durations:
    """Reads durations from a JSON file, a list of seconds per worker, which are `recorded` and repeated.

    Examples:
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
        # JSON has numbers that are too large for a float.
        if not all(isinstance(value, float | int) and abs(value) < math.inf for value in row):
            raise ValueError(f"{path} must contain a list of lists of finite seconds, got {row}")
    return recorded(rows)


# Laws that change another one: workers that are slower than others, always or at times, and failures.


def one_slow(base: Durations, *, worker: int = 0, factor: Number = 4.0) -> Durations:
    """Slows one worker down by a constant factor.

    Examples:
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.one_slow(durations.constant(1.0), worker=2, factor=6)
      >>> [next(durations.stream(law, 0, i)) for i in range(4)]
      [1.0, 1.0, 6.0, 1.0]
    """
    _check_positive(factor=factor)
    if worker < 0 or (base.workers is not None and worker >= base.workers):
        raise ValueError(f"worker must be the index of a worker, from 0, got {worker}")

    def draw(rng, i, first, count, state):
        drawn, state = base.draw(rng, i, first, count, state)
        return drawn * (factor if i == worker else 1.0), state

    return base._replace(name=f"one_slow({base.name})", draw=draw, least=max(base.least, worker + 1))


def random_slow(base: Durations, *, factor: Number, probability: Number) -> Durations:
    """Slows each gradient down with probability p: the mean is `(1 + (f - 1) p)` times that of `base`.

    The paper has the factor `f = 6`, and `p` is one over the number of workers.

    Examples:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.random_slow(durations.constant(1.0), factor=6, probability=0.5)
      >>> sorted(set(islice(durations.stream(law, 0, worker=0), 50)))
      [1.0, 6.0]

    References:
      Luo, Lin, Zhuo, Qian, "Hop: Heterogeneity-Aware Decentralized Training", arXiv:1902.01064, 2019.
    """
    _check_positive(factor=factor)
    check_range("probability", probability, 0, 1, ends="[]")

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

    Examples:
      >>> from itertools import islice
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.markov(durations.constant(1.0), factor=5, slow_down=0.1, speed_up=0.4)
      >>> drawn = list(islice(durations.stream(law, 0, worker=0), 20_000))
      >>> abs(sum(drawn) / len(drawn) - (0.8 + 0.2 * 5)) < 0.1
      True
    """
    _check_positive(factor=factor)
    for name, value in (("slow_down", slow_down), ("speed_up", speed_up)):
        check_range(name, value, 0, 1, ends="[]")
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


def failures(base: Durations, *, up: Number, down: Number) -> Durations:
    """Adds failures: workers are up for `up · Exp(1)` seconds and down for `down · Exp(1)`.

    A gradient that is running at a failure is lost, and so are messages to the worker while it is down. It keeps its
    state and requests the current model when it recovers.

    Examples:
      >>> from jaxdist.asynchronous import durations
      >>> law = durations.failures(durations.constant(1.0), up=100, down=5)
      >>> up, down = next(durations.outages(law, 0, worker=3))
      >>> up > 0, down > 0
      (True, True)
    """
    _check_positive(up=up, down=down)

    def draw_outages(rng: np.random.Generator, worker: int) -> Iterator[tuple[float, float]]:
        while True:
            yield up * rng.exponential(), down * rng.exponential()

    return base._replace(name=f"failures({base.name})", outages=draw_outages)
