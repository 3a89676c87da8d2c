"""Tuning of settings for the shortest step, with few trials."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._core.checks import check_range
from .profile import Profile, not_negative, positive, profile_lists
from .timeline import MOST_MESSAGES


class Range(NamedTuple):
    """Numbers from `low` to `high`, sampled evenly in their logarithm; integers if both ends are integers."""

    low: float | int
    high: float | int


class Trial(NamedTuple):
    """Settings, and the seconds of a step with them."""

    settings: dict[str, Any]
    seconds: float


class Tuned(NamedTuple):
    """The best trial's settings and seconds, and all trials in their order."""

    settings: dict[str, Any]
    seconds: float
    trials: tuple[Trial, ...]


def tune(
    measure: Callable[..., float],
    *,
    space: Mapping[str, Range | Sequence[Any]],
    evaluations: int = 15,
    seed: int = 0,
    start: Sequence[Mapping[str, Any]] = (),
) -> Tuned:
    """Searches for the settings with the shortest step, by Bayesian optimization (a tree of Parzen estimators, optuna).

    The first third of the trials is drawn at random, the others where good trials are denser than bad ones. On
    simulated steps 15 trials are usually within 5 % of the best of a grid of 441; with a `starting_point` always.

    Args:
      measure: `measure(**settings) -> seconds`, from `timeline` or from real steps (`step_seconds`). Results
        that are not finite count as the worst. Processes that measure together must use the same number, or their
        trials will differ: use the largest.
      space: for each setting a `Range`, or a list of choices.
      evaluations: the number of trials.
      seed: of the draws.
      start: settings to try first; numbers outside their range are moved into it.

    Raises:
      ValueError: an argument is out of range, `start` has other settings than `space`, or no trial was finite.
      ModuleNotFoundError: optuna is missing.

    Examples:
      >>> from jaxdist.schedule import Profile, Range, starting_point, timeline, tune
      >>> profile, link = Profile([6, 4, 2], [1e9, 1e9, 6e9], [2, 2, 2]), {"bandwidth": 1e9, "overhead": 0.01}
      >>> best = tune(
      ...     lambda **settings: timeline(profile, **link, **settings).makespan,
      ...     space={"partition_bytes": Range(2**20, 2**33), "credit_bytes": Range(2**20, 2**33)},
      ...     start=[starting_point(profile, **link)],
      ... )
      >>> len(best.trials), best.seconds < 13.6
      (15, True)

    References:
      Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS, 2011. (ByteScheduler uses Gaussian
      processes.)
    """
    check_range("evaluations", evaluations, 1, ends="[]")
    for name, choices in space.items():
        _check_choices(name, choices)
    first_trials = [_clip_to_space(space, settings) for settings in start]
    try:
        import optuna
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("tuning needs optuna: pip install '.[tune]' in a clone of jaxdist") from missing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(1, evaluations // 3), multivariate=True)
    # The level is global: it is set back after the search.
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=sampler)
        for settings in first_trials:
            study.enqueue_trial(settings)
        trials = []
        for _ in range(evaluations):
            trial = study.ask()
            settings = {name: _suggest(trial, name, choices) for name, choices in space.items()}
            seconds = float(measure(**settings))
            # The sampler refuses NaN.
            seconds = seconds if math.isfinite(seconds) else math.inf
            study.tell(trial, seconds)
            trials.append(Trial(settings, seconds))
    finally:
        optuna.logging.set_verbosity(level)
    best = min(trials, key=lambda trial: trial.seconds)
    if not math.isfinite(best.seconds):
        raise ValueError(f"none of {evaluations} trials gave a finite time: check measure and space={dict(space)}")
    return Tuned(best.settings, best.seconds, tuple(trials))


def starting_point(
    profile: Profile, *, bandwidth: float | int, overhead: float | int = 0.0, latency: float | int = 0.0
) -> dict[str, int]:
    """Starting values for tuning partition and credit of a `timeline`.

    The partition minimizes `bound` with a credit of the same size: `δ = sqrt(θ B Σ s / 2)`. The credit is one partition
    and the bytes that the link sends during the latency λ, so that the link never waits: `c = δ + λ B`. Without
    overhead there are a thousand messages.

    Examples:
      >>> from jaxdist.schedule import Profile, starting_point
      >>> profile = Profile(ready=[6, 4, 2], sizes=[1e9, 1e9, 6e9], forward=[2, 2, 2])
      >>> starting_point(profile, bandwidth=1e9, overhead=0.01, latency=0.1)
      {'partition_bytes': 200000000, 'credit_bytes': 300000000}
    """
    total = sum(profile_lists(profile)[1])
    positive(bandwidth=bandwidth)
    not_negative(overhead=overhead, latency=latency)
    partition = max(math.sqrt(overhead * bandwidth * total / 2), total / min(1000, MOST_MESSAGES), 1)
    return {"partition_bytes": round(partition), "credit_bytes": round(partition + latency * bandwidth)}


def step_seconds(
    step: Callable[[], Any],
    *,
    steps: int = 100,
    warmup: int = 1,
    trim: float | int = 0.1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The mean time of a step, without the first steps, the fastest and the slowest.

    Args:
      step: takes one step and waits for its end (`jax.block_until_ready`).
      steps: the number of steps that count.
      warmup: the number of steps before, which do not count; the first one compiles.
      trim: the share that is left out at each end.
      clock: returns the time in seconds.

    Examples:
      >>> from jaxdist.schedule import step_seconds
      >>> times = iter([0, 9, 9, 10, 10, 11, 11, 15])
      >>> step_seconds(lambda: None, steps=3, trim=0.34, clock=lambda: next(times))
      1.0
    """
    check_range("steps", steps, 1, ends="[]")
    check_range("warmup", warmup, 0, ends="[]")
    check_range("trim", trim, 0, 0.5)
    times = []
    for _ in range(warmup + steps):
        begin = clock()
        step()
        times.append(clock() - begin)
    # At least one remains, since trim is below a half.
    out = int(trim * steps)
    return float(np.mean(sorted(times[warmup:])[out : steps - out]))


def _check_choices(name: str, choices: Range | Sequence[Any]) -> None:
    if isinstance(choices, Range):
        if not 0 < choices.low <= choices.high < math.inf:
            raise ValueError(f"{name} must be in a positive range, got {choices}")
    elif not len(choices):
        raise ValueError(f"{name} must have at least one choice, got none")


def _clip_to_space(space: Mapping[str, Range | Sequence[Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    if set(settings) != set(space):
        raise ValueError(f"start must have the settings of space, {sorted(space)}, got {sorted(settings)}")
    moved = {}
    for name, choices in space.items():
        value = settings[name]
        if isinstance(choices, Range):
            value = (int if _is_whole(choices) else float)(min(max(value, choices.low), choices.high))
        elif value not in choices:
            raise ValueError(f"start has {name}={value!r}, which must be one of {list(choices)}")
        moved[name] = value
    return moved


def _is_whole(choices: Range) -> bool:
    return isinstance(choices.low, int) and isinstance(choices.high, int)


def _suggest(trial: Any, name: str, choices: Range | Sequence[Any]) -> Any:
    if not isinstance(choices, Range):
        return trial.suggest_categorical(name, list(choices))
    suggest = trial.suggest_int if _is_whole(choices) else trial.suggest_float
    return suggest(name, choices.low, choices.high, log=True)
