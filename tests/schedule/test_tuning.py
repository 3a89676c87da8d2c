"""Fifteen trials against a grid of 441, and against a clock."""

import math

import numpy as np
import pytest

from jaxdist.schedule import Profile, Range, starting_point, step_seconds, timeline, tune

LOW, HIGH = 2**14, 2**26
SPACE = {"partition_bytes": Range(LOW, HIGH), "credit_bytes": Range(LOW, HIGH)}
# The second and the fourth of the known steps of test_timeline.py, in milliseconds and megabytes.
LATE = Profile([6e-2, 4e-2, 2e-2], [1e6, 1e6, 6e6], [2e-2] * 3)
SLOW = Profile([3e-2, 2e-2, 1e-2], [1e6, 1e6, 10e6], [3e-2] * 3)
LANDSCAPES = {
    "late": (LATE, {"bandwidth": 1e8, "overhead": 5e-4}),
    "late, latency": (LATE, {"bandwidth": 1e8, "overhead": 5e-4, "latency": 1e-3}),
    "slow, latency": (SLOW, {"bandwidth": 1e8, "overhead": 2e-4, "latency": 2e-3}),
}


def shares(name, seeds, *, started):
    """Of how many seeds the best of 15 trials is within 5 % of the best of the grid, and that of 15 random points."""
    profile, link = LANDSCAPES[name]

    def measure(**settings):
        return timeline(profile, **link, **settings).makespan

    points = [int(x) for x in np.geomspace(LOW, HIGH, 21)]
    grid = [measure(partition_bytes=p, credit_bytes=c) for p in points for c in points]
    start = [starting_point(profile, **link)] if started else []
    found = [tune(measure, space=SPACE, seed=seed, start=start).seconds for seed in seeds]
    draws = [np.random.default_rng(seed).choice(grid, 15).min() for seed in seeds]
    return [np.mean(np.array(seconds) < 1.05 * min(grid)) for seconds in (found, draws)]


def test_fifteen_trials_find_what_a_grid_finds():
    assert shares("late, latency", range(8), started=True)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", LANDSCAPES)
def test_fifteen_trials_find_what_a_grid_finds_with_nine_of_ten_seeds(name):
    tuned, random = shares(name, range(50), started=False)
    assert tuned >= 0.9
    assert tuned > random
    assert shares(name, range(50), started=True)[0] == 1


def test_the_start_is_tried_first_and_moved_into_the_space():
    seen = []
    space = {"a": Range(1, 8), "b": Range(0.5, 2.0), "c": ["x", "y"]}
    best = tune(lambda **s: seen.append(s) or s["a"], space=space, evaluations=4, start=[{"a": 20, "b": 0.1, "c": "y"}])
    assert seen[0] == {"a": 8, "b": 0.5, "c": "y"}
    assert [trial.settings for trial in best.trials] == seen
    assert all(isinstance(s["a"], int) and 0.5 <= s["b"] <= 2 for s in seen)
    assert best.seconds == best.settings["a"] == min(s["a"] for s in seen)


def test_equal_seeds_try_the_same():
    def trials(seed):
        return tune(lambda a: (a - 3) ** 2, space={"a": Range(0.1, 10.0)}, seed=seed, evaluations=6).trials

    assert trials(1) == trials(1) != trials(2)


def test_settings_that_fail_are_passed_over():
    best = tune(lambda a: math.nan if a > 4 else a, space={"a": list(range(1, 9))}, evaluations=12)
    assert best.settings["a"] <= 4
    with pytest.raises(ValueError, match="none of 3 trials gave a finite time"):
        tune(lambda a: math.inf, space={"a": Range(1, 9)}, evaluations=3)


def test_a_start_between_integers_keeps_its_fraction():
    found = tune(lambda a: a, space={"a": Range(1, 2.5)}, evaluations=1, start=[{"a": 2.2}])
    assert found.settings == {"a": 2.2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": {"a": Range(4, 2)}}, "a must be in a positive range"),
        ({"space": {"a": Range(0, 2)}}, "a must be in a positive range"),
        ({"space": {"a": []}}, "a must have at least one choice"),
        ({"start": [{"b": 1}]}, r"settings of space, \['a'\], got \['b'\]"),
        ({"space": {"a": [1, 2]}, "start": [{"a": 3}]}, r"a=3, which must be one of \[1, 2\]"),
        ({"evaluations": 0}, "evaluations must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_tuned_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        tune(lambda a: a, **{"space": {"a": Range(1, 2)}, **change})


def test_a_step_is_timed_without_its_outliers():
    spent = iter([100.0, 1.0, 50.0, 2.0, 0.1, 3.0])
    now = [0.0]

    def step():
        now[0] += next(spent)

    assert step_seconds(step, steps=5, trim=0.2, clock=lambda: now[0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match=r"trim must be in \[0, 0.5\)"):
        step_seconds(step, trim=0.5)
