"""Rules on the virtual clock, each at the best of several learning rates and over several seeds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..asynchronous import replay
from .spellings.grammar import parse_call

PIECES = 60  # of a run, after each of which it may end
PERSIST = 3  # evaluations at the target in a row: a single one below it may be noise
DIVERGED = 2  # times the first loss
LAST = 20  # evaluations at the end of a run, whose mean is its loss


class Goal(NamedTuple):
    """When runs end, and what they are judged by: the time to a target, or the loss at the end if there is none."""

    seconds: float  # the longest that a run may take
    target: float | None  # the loss to reach, which ends a run


class Swept(NamedTuple):
    """A rule at its best rate."""

    name: str  # the spelling
    rate: float | None  # None without rates to choose from
    runs: tuple[replay.Result, ...]  # one for each seed


def seconds_to(result: replay.Result, target: float) -> float:
    """Virtual seconds to the target; infinite if it is not reached."""
    return replay.time_to_target(result, target, persist=PERSIST)


def final_loss(result: replay.Result) -> float:
    """The mean of the last evaluations; infinite if the run has diverged, and NaN if there was none."""
    if not len(result.losses):
        return np.nan
    return np.inf if has_diverged(result) else float(np.mean(result.losses[-LAST:]))


def has_diverged(result: replay.Result) -> bool:
    """Whether the last evaluation is far above the first, or NaN."""
    return not result.losses[-1] < DIVERGED * result.losses[0]


def staleness(name: str, trace: replay.Trace) -> np.ndarray:
    """The staleness of each gradient used: in versions of the model, or for `ad_psgd`, which has none, in gradients."""
    return replay.peer_delays(trace) if parse_call(name)[0] == "ad_psgd" else replay.delays(trace)


def in_pieces(clock: replay.Simulator, seconds: float) -> Iterator[replay.ReplayState]:
    """Advances a run to its end, and yields its state after each piece."""
    state = clock.init()
    for piece in range(1, PIECES + 1):
        state = clock.advance(state, seconds=seconds * piece / PIECES)
        yield state


def run_to_goal(clock: replay.Simulator, goal: Goal) -> replay.Result:
    """Runs until the target is reached, the run has diverged, or the time is over."""
    *_, last = _results(clock, goal)
    return last


def _results(clock: replay.Simulator, goal: Goal) -> Iterator[replay.Result]:
    """The result after each piece; the loss of a run with a gradient that is not finite is infinite, its last one."""
    result = clock.result(clock.init())
    try:
        for state in in_pieces(clock, goal.seconds):
            result = clock.result(state)
            yield result
            if has_diverged(result) or (goal.target is not None and np.isfinite(seconds_to(result, goal.target))):
                return
    except replay.NonFiniteGradientError:
        losses, times = np.append(result.losses, np.inf), np.append(result.times, result.seconds)
        yield result._replace(losses=losses, times=times)


def tune_rate(clocks: Mapping[float, replay.Simulator], goal: Goal) -> tuple[float, dict[float, float]]:
    """The best rate, and the seconds, or losses, of those that were not behind it: all rates run side by side.

    With a target all end in the piece in which the first reaches it. If none does, the best has the lowest loss at the
    end. Of rates that are equally good it is the lowest.
    """
    running = {rate: _results(clock, goal) for rate, clock in clocks.items()}
    reached: dict[float, float] = {}
    losses: dict[float, float] = {}
    while running and not reached:
        for rate, results in list(running.items()):
            result = next(results, None)
            if result is None:
                del running[rate]
                continue
            losses[rate] = final_loss(result)
            if goal.target is not None and np.isfinite(seconds_to(result, goal.target)):
                reached[rate] = seconds_to(result, goal.target)
    found = reached if goal.target is not None else losses
    return min(found or losses, key=lambda rate: ((found or losses)[rate], rate)), found


def edge_of(rate: float, rates: Sequence[float]) -> str:
    """What to say about a best rate that is the largest or the smallest of those tried; empty for another."""
    if len(rates) > 1 and rate in (max(rates), min(rates)):
        return f"{rate:g} is the {'largest' if rate == max(rates) else 'smallest'} of --rates"
    return ""
